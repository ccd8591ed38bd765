//! A root in a segment that this process owns.

use std::alloc::Layout;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::time::Duration;

use aquifer_client::segments::{self, Process, Pulling, Segment, Synced};

use crate::allocator::{SegmentAllocator, SegmentFull};
use crate::heap::{HeapFault, SegmentHeap};
use crate::migratable::{Description, Migratable};

/// Why a segment with containers cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The segment cannot be used at all.
    #[error(transparent)]
    Segment(#[from] segments::Error),
    /// It has no such containers.
    #[error(transparent)]
    Heap(#[from] HeapFault),
    /// There is no room for the root.
    #[error(transparent)]
    Full(#[from] SegmentFull),
}

/// A value in a segment, with all that it owns there. It lies at the same address in each process.
///
/// Dropping it unmaps the segment, and drops no value: this process, or the next one of its name,
/// gets it again.
#[derive(Debug)]
pub struct Owned<'p, T> {
    segment: Segment<'p>,
    heap: SegmentHeap,
    root: NonNull<T>,
}

// SAFETY: the value and what it owns are reached through this alone, as by a `Box`.
unsafe impl<T: Send> Send for Owned<'_, T> {}
// SAFETY: a shared reference gives no more than a shared reference to the value.
unsafe impl<T: Sync> Sync for Owned<'_, T> {}

/// A hand-over that did not take place.
#[derive(Debug)]
pub struct TransferFailure<'p, T> {
    /// The value, if this process still owns it. Otherwise the agent finds out whether it has
    /// arrived; if it has not, this process receives it again.
    pub owned: Option<Owned<'p, T>>,
    /// Why.
    pub error: segments::Error,
}

impl<'p, T: Migratable> Owned<'p, T> {
    /// Allocates a segment of `bytes` bytes with this number, and builds the value in it.
    ///
    /// # Errors
    /// If the segment cannot be allocated, or is too small.
    pub fn create(
        process: &'p Process,
        id: u64,
        bytes: u64,
        build: impl FnOnce(SegmentAllocator) -> Result<T, SegmentFull>,
    ) -> Result<Self, Error> {
        let segment = process.allocate(id, bytes)?;
        match Self::build(&segment, build) {
            Ok((heap, root)) => Ok(Self { segment, heap, root }),
            Err(error) => {
                // No other process knows of it.
                let _ = segment.deallocate();
                Err(error)
            }
        }
    }

    fn build(
        segment: &Segment<'p>,
        build: impl FnOnce(SegmentAllocator) -> Result<T, SegmentFull>,
    ) -> Result<(SegmentHeap, NonNull<T>), Error> {
        // SAFETY: the segment is this process's alone, and stays mapped as long as the owned value.
        let heap =
            unsafe { SegmentHeap::create(start_of(segment), segment.bytes(), &Description::of::<T>()) }?;
        let value = build(SegmentAllocator(heap))?;
        let layout = Layout::new::<T>();
        // A value without a size has an address of its own, too.
        let layout =
            Layout::from_size_align(layout.size().max(1), layout.align()).map_err(|_| SegmentFull)?;
        let root: NonNull<T> = heap.allocate(layout).ok_or(SegmentFull)?.cast();
        // SAFETY: the memory was allocated for it, and no other thread uses the root.
        unsafe {
            root.write(value);
            heap.set_root(root.as_ptr().expose_provenance());
        }
        Ok((heap, root))
    }

    /// Waits for a value that is handed over to this process, or that an earlier process of its
    /// name has left. `None` if there is none in time.
    ///
    /// # Errors
    /// If the agent has ended; if the segment has another value: then its processes go on owning
    /// it, and the next one of this name that expects it receives it.
    pub fn receive(process: &'p Process, pulling: Pulling, timeout: Duration) -> Result<Option<Self>, Error> {
        let Some(segment) = process.receive(pulling, timeout)? else { return Ok(None) };
        Self::open(segment).map(Some)
    }

    /// The value in a segment that was received.
    ///
    /// # Errors
    /// If it has another value.
    pub fn open(segment: Segment<'p>) -> Result<Self, Error> {
        let description = Description::of::<T>();
        // SAFETY: the segment is this process's alone, and stays mapped as long as the owned value.
        // Processes of one user trust each other.
        let heap = unsafe { SegmentHeap::open(start_of(&segment), segment.bytes(), &description) }?;
        let offset = heap.root().wrapping_sub(segment.address());
        let fits = offset.checked_add(size_of::<T>()).is_some_and(|end| end <= segment.bytes());
        let root = std::ptr::with_exposed_provenance_mut(heap.root());
        let root = NonNull::new(root).filter(|root| fits && root.is_aligned());
        Ok(Self { root: root.ok_or(HeapFault::NoContainers)?, heap, segment })
    }

    /// Restores a value from the copies of its segment, as [`Process::restore`] does.
    ///
    /// # Errors
    /// Those of [`Process::restore`]; if the segment has another value.
    pub fn restore(process: &'p Process, id: u64, timeout: Duration) -> Result<Self, Error> {
        Self::open(process.restore(id, timeout)?)
    }

    /// Writes what has changed to `copies` memory nodes, as [`Segment::sync`] does.
    ///
    /// # Errors
    /// Those of [`Segment::sync`].
    pub fn sync(&mut self, copies: usize) -> Result<Synced, segments::Error> {
        self.segment.sync(copies)
    }

    /// The allocator of the segment, for new values in it.
    #[must_use]
    pub fn allocator(&self) -> SegmentAllocator {
        SegmentAllocator(self.heap)
    }

    /// The segment.
    #[must_use]
    pub fn segment(&self) -> &Segment<'p> {
        &self.segment
    }

    /// Prepares a hand-over to another process of the user: all that is slow.
    ///
    /// # Errors
    /// If there is no such process, or it is not prepared.
    pub fn connect(&self, process: &str) -> Result<(), segments::Error> {
        self.segment.connect(process)
    }

    /// Hands the value over to the process to which it is connected.
    ///
    /// # Errors
    /// The value if it is still this process's, and why.
    ///
    /// # Safety
    /// This process keeps nothing of the segment: no container that was moved out of it, and no
    /// copy of its allocator.
    pub unsafe fn transfer(self) -> Result<(), TransferFailure<'p, T>> {
        let Self { segment, heap, root } = self;
        segment.transfer().map_err(|failure| TransferFailure {
            owned: failure.segment.map(|segment| Self { segment, heap, root }),
            error: failure.error,
        })
    }

    /// Hands the value over as [`Self::transfer`] does, and syncs it before.
    ///
    /// # Errors
    /// Those of [`Self::sync`] and [`Self::transfer`].
    ///
    /// # Safety
    /// As for [`Self::transfer`].
    pub unsafe fn sync_and_transfer(self, copies: usize) -> Result<Synced, TransferFailure<'p, T>> {
        let Self { segment, heap, root } = self;
        segment.sync_and_transfer(copies).map_err(|failure| TransferFailure {
            owned: failure.segment.map(|segment| Self { segment, heap, root }),
            error: failure.error,
        })
    }

    /// Waits until all of the segment is here.
    ///
    /// # Errors
    /// If a page is lost.
    pub fn close(&self) -> Result<(), segments::Error> {
        self.segment.close()
    }

    /// Frees the segment with all that is in it. Destructors of values do not run.
    ///
    /// # Errors
    /// If the agent has ended.
    ///
    /// # Safety
    /// As for [`Self::transfer`].
    pub unsafe fn deallocate(self) -> Result<(), segments::Error> {
        self.segment.deallocate()
    }
}

impl<T> Deref for Owned<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        // SAFETY: the root is a value of this type, in a segment that this process owns.
        unsafe { self.root.as_ref() }
    }
}

impl<T> DerefMut for Owned<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: as above, and it is borrowed through this alone.
        unsafe { self.root.as_mut() }
    }
}

fn start_of(segment: &Segment<'_>) -> NonNull<u8> {
    let start = std::ptr::with_exposed_provenance_mut(segment.address());
    NonNull::new(start).expect("no segment is at address 0")
}
