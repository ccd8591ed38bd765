//! A handle to the root value of a segment that this process owns.

use std::alloc::Layout;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::time::Duration;

use aquifer_client::segments::{self, Process, Pulling, Segment, Synced};

use crate::allocator::{SegmentAllocator, SegmentFull};
use crate::heap::{HeapFault, SegmentHeap};
use crate::migratable::{Description, Migratable};

/// The reason why a segment with containers cannot be created or opened.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// An operation on the segment failed.
    #[error(transparent)]
    Segment(#[from] segments::Error),
    /// The segment does not have the expected containers.
    #[error(transparent)]
    Heap(#[from] HeapFault),
    /// The segment has no room for the root.
    #[error(transparent)]
    Full(#[from] SegmentFull),
}

/// A value in a segment, with all values that it owns there. Its address is the same in each
/// process.
///
/// Dropping the handle unmaps the segment, and does not drop the value: this process, or the next
/// one of its name, can receive it again.
#[derive(Debug)]
pub struct Owned<'p, T> {
    segment: Segment<'p>,
    heap: SegmentHeap,
    root: NonNull<T>,
}

// SAFETY: only this handle reaches the value, as with a `Box`.
unsafe impl<T: Send> Send for Owned<'_, T> {}
// SAFETY: a shared reference to the handle yields only shared references to the value.
unsafe impl<T: Sync> Sync for Owned<'_, T> {}

/// The error of a hand-over.
#[derive(Debug)]
pub struct TransferFailure<'p, T> {
    /// The value, if this process still owns it. If `None`, the agent finds out whether the value
    /// has arrived; if it has not, this process receives it again.
    pub owned: Option<Owned<'p, T>>,
    /// The reason of the failure.
    pub error: segments::Error,
}

impl<'p, T: Migratable> Owned<'p, T> {
    /// Allocates a segment of `bytes` bytes with number `id`, and builds the value in it.
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
                // No other process has used the segment, so a failure here leaks only memory.
                let _ = segment.deallocate();
                Err(error)
            }
        }
    }

    /// Creates the heap of a segment, and the value as its root.
    fn build(
        segment: &Segment<'p>,
        build: impl FnOnce(SegmentAllocator) -> Result<T, SegmentFull>,
    ) -> Result<(SegmentHeap, NonNull<T>), Error> {
        // SAFETY: only this process owns the segment, and it stays mapped as long as the value.
        let heap =
            unsafe { SegmentHeap::create(start_of(segment), segment.bytes(), &Description::of::<T>()) }?;
        let value = build(SegmentAllocator(heap))?;
        let layout = Layout::new::<T>();
        // A value of size 0 also gets an address of its own.
        let layout =
            Layout::from_size_align(layout.size().max(1), layout.align()).map_err(|_| SegmentFull)?;
        let root: NonNull<T> = heap.allocate(layout).ok_or(SegmentFull)?.cast();
        // SAFETY: the memory was allocated for the value, and no other thread uses the root.
        unsafe {
            root.write(value);
            heap.set_root(root.as_ptr().expose_provenance());
        }
        Ok((heap, root))
    }

    /// Waits for a value that is handed over to this process, or that an earlier process of its
    /// name has left. Returns `None` after `timeout`.
    ///
    /// # Errors
    /// If the agent has ended, or the segment has a value of another type. Then the segment stays
    /// with this process name: the next process of the name that expects the type can receive it.
    pub fn receive(process: &'p Process, pulling: Pulling, timeout: Duration) -> Result<Option<Self>, Error> {
        let Some(segment) = process.receive(pulling, timeout)? else { return Ok(None) };
        Self::open(segment).map(Some)
    }

    /// Opens the value in a segment that was received.
    ///
    /// # Errors
    /// If the segment has no value, or one of another type.
    pub fn open(segment: Segment<'p>) -> Result<Self, Error> {
        let description = Description::of::<T>();
        // SAFETY: only this process owns the segment, and it stays mapped as long as the value.
        // Processes of one user trust each other.
        let heap = unsafe { SegmentHeap::open(start_of(&segment), segment.bytes(), &description) }?;
        let offset = heap.root().wrapping_sub(segment.address());
        let fits = offset.checked_add(size_of::<T>()).is_some_and(|end| end <= segment.bytes());
        let root = std::ptr::with_exposed_provenance_mut(heap.root());
        let root = NonNull::new(root).filter(|root| fits && root.is_aligned());
        Ok(Self { root: root.ok_or(HeapFault::NoContainers)?, heap, segment })
    }

    /// Restores a value from the copies of its segment, by [`Process::restore`].
    ///
    /// # Errors
    /// The errors of [`Process::restore`]; also if the segment has a value of another type.
    pub fn restore(process: &'p Process, id: u64, timeout: Duration) -> Result<Self, Error> {
        Self::open(process.restore(id, timeout)?)
    }

    /// Writes the changed parts of the segment to `copies` memory nodes, by [`Segment::sync`].
    ///
    /// # Errors
    /// The errors of [`Segment::sync`].
    pub fn sync(&mut self, copies: usize) -> Result<Synced, segments::Error> {
        self.segment.sync(copies)
    }

    /// The allocator of the segment, for new values in it.
    #[must_use]
    pub fn allocator(&self) -> SegmentAllocator {
        SegmentAllocator(self.heap)
    }

    /// The segment of the value.
    #[must_use]
    pub fn segment(&self) -> &Segment<'p> {
        &self.segment
    }

    /// Prepares a hand-over to another process of the user, so that [`Self::transfer`] is fast.
    ///
    /// # Errors
    /// If there is no such process, or it cannot be prepared.
    pub fn connect(&self, process: &str) -> Result<(), segments::Error> {
        self.segment.connect(process)
    }

    /// Hands the value over to the process of [`Self::connect`].
    ///
    /// # Errors
    /// The reason of the failure, and the value if this process still owns it.
    ///
    /// # Safety
    /// This process must keep nothing of the segment: no container that was moved out of it, and no
    /// copy of its allocator.
    pub unsafe fn transfer(self) -> Result<(), TransferFailure<'p, T>> {
        let Self { segment, heap, root } = self;
        segment.transfer().map_err(|failure| TransferFailure {
            owned: failure.segment.map(|segment| Self { segment, heap, root }),
            error: failure.error,
        })
    }

    /// Syncs the value, and then hands it over by [`Self::transfer`].
    ///
    /// # Errors
    /// The errors of [`Self::sync`] and [`Self::transfer`].
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

    /// Waits until all pages of the segment are present.
    ///
    /// # Errors
    /// If a page is lost.
    pub fn close(&self) -> Result<(), segments::Error> {
        self.segment.close()
    }

    /// Frees the segment with all values in it. Destructors of the values do not run.
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
        // SAFETY: the root is a value of type `T`, in a segment that this process owns.
        unsafe { self.root.as_ref() }
    }
}

impl<T> DerefMut for Owned<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: the root is a value of type `T`, and is borrowed exclusively through this handle.
        unsafe { self.root.as_mut() }
    }
}

fn start_of(segment: &Segment<'_>) -> NonNull<u8> {
    let start = std::ptr::with_exposed_provenance_mut(segment.address());
    NonNull::new(start).expect("no segment is at address 0")
}
