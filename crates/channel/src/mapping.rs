//! The memory of a ring as a program has it mapped.

use std::io;
use std::os::fd::OwnedFd;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};

use aquifer_ipc::ring::{DATA_AT, DATA_BYTES, RING_BYTES, Words};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, mmap_anonymous, munmap};

/// Bytes of the page that a forked child finds empty.
const MARK_BYTES: usize = 4096;

/// A mapping of [`RING_BYTES`]. A forked child does not have it: a session is of one process.
#[derive(Debug)]
pub struct Mapping {
    start: NonNull<u8>,
    /// A page of its own, with a 1 in it, but in forked children.
    mark: NonNull<u8>,
}

// SAFETY: the mapping belongs to the process, not to a thread; it is reached by atomics and raw copies only.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Map the memory that came with [`aquifer_ipc::Frame::SessionOpened`].
    ///
    /// # Errors
    /// If it is too small, or the system refuses.
    pub fn new(fd: &OwnedFd) -> io::Result<Self> {
        let bytes = u64::try_from(rustix::fs::fstat(fd)?.st_size).unwrap_or(0);
        if bytes < RING_BYTES as u64 {
            return Err(io::Error::other("the memory of the session is too small"));
        }
        // SAFETY: a fresh mapping at an address of the kernel's choice; it overlays nothing.
        let start = unsafe {
            mmap(ptr::null_mut(), RING_BYTES, ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED, fd, 0)?
        };
        let at_zero = || io::Error::other("the kernel mapped memory at address zero");
        let start = NonNull::new(start.cast::<u8>()).ok_or_else(at_zero)?;
        // SAFETY: as above.
        let mark = unsafe {
            mmap_anonymous(ptr::null_mut(), MARK_BYTES, ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE)
        };
        let mark =
            mark.map_err(io::Error::from).and_then(|mark| NonNull::new(mark.cast()).ok_or_else(at_zero));
        let mark = mark.inspect_err(|_| unmap(start, RING_BYTES))?;
        let mapping = Self { start, mark };
        // SAFETY: both ranges are the mapping's own.
        unsafe {
            madvise(start.as_ptr().cast(), RING_BYTES, Advice::LinuxDontFork)?;
            madvise(mark.as_ptr().cast(), MARK_BYTES, Advice::LinuxWipeOnFork)?;
        }
        mapping.mark().store(1, Relaxed);
        Ok(mapping)
    }

    /// Whether this is the process that mapped it. In a forked child there is nothing to be touched.
    pub fn is_here(&self) -> bool {
        self.mark().load(Relaxed) == 1
    }

    fn mark(&self) -> &AtomicU32 {
        // SAFETY: a page of ours, aligned and mapped as long as `self`.
        unsafe { AtomicU32::from_ptr(self.mark.as_ptr().cast()) }
    }

    /// Copy into the data area.
    ///
    /// # Panics
    /// If the range is not inside it.
    pub fn write_data(&self, at: u32, bytes: &[u8]) {
        let place = self.data(at, bytes.len());
        // SAFETY: `data` has checked the range; `bytes` is plain memory beside it.
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), place, bytes.len()) }
    }

    /// Copy out of the data area.
    ///
    /// # Panics
    /// If the range is not inside it.
    pub fn read_data(&self, at: u32, out: &mut [u8]) {
        let place = self.data(at, out.len());
        // SAFETY: as in `write_data`.
        unsafe { ptr::copy_nonoverlapping(place, out.as_mut_ptr(), out.len()) }
    }

    fn data(&self, at: u32, len: usize) -> *mut u8 {
        let at = at as usize;
        let is_inside = at.checked_add(len).is_some_and(|end| end <= DATA_BYTES as usize);
        assert!(is_inside, "{len} bytes at {at} are outside of the data area");
        // SAFETY: inside the mapping, as just checked.
        unsafe { self.start.as_ptr().add(DATA_AT + at) }
    }

    fn word(&self, offset: usize, bytes: usize) -> *mut u8 {
        assert!(offset.is_multiple_of(bytes) && offset + bytes <= RING_BYTES, "no word at {offset}");
        // SAFETY: inside the mapping, as just checked.
        unsafe { self.start.as_ptr().add(offset) }
    }
}

impl Words for Mapping {
    fn word_u32(&self, offset: usize) -> &AtomicU32 {
        // SAFETY: in range, aligned (mappings begin at a page), and mapped as long as `self`; all touch it atomically.
        unsafe { AtomicU32::from_ptr(self.word(offset, 4).cast()) }
    }

    fn word_u64(&self, offset: usize) -> &AtomicU64 {
        // SAFETY: as above.
        unsafe { AtomicU64::from_ptr(self.word(offset, 8).cast()) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // Something else may be there by now in a forked child.
        if self.is_here() {
            unmap(self.start, RING_BYTES);
        }
        unmap(self.mark, MARK_BYTES);
    }
}

fn unmap(start: NonNull<u8>, bytes: usize) {
    // SAFETY: called once for each mapping of ours, when nothing borrowed from it is alive.
    let unmapped = unsafe { munmap(start.as_ptr().cast(), bytes) };
    debug_assert!(unmapped.is_ok(), "munmap: {unmapped:?}");
}
