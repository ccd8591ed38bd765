//! The memory of a session's ring, mapped into a program.

use std::io;
use std::os::fd::OwnedFd;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};

use aquifer_ipc::ring::{DATA_AT, DATA_BYTES, RING_BYTES, RingWords};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, mmap_anonymous, munmap};

/// Bytes of the page that is empty in a forked child.
const MARK_BYTES: usize = 4096;

/// A mapping of [`RING_BYTES`]. A forked child does not inherit it, because a session belongs to
/// one process.
#[derive(Debug)]
pub struct RingMapping {
    start: NonNull<u8>,
    /// A page that contains 1 in the process that mapped it, and 0 in forked children.
    mark: NonNull<u8>,
}

// SAFETY: the mapping belongs to the process, not to a thread, and is accessed only by atomics and
// raw copies.
unsafe impl Send for RingMapping {}
// SAFETY: shared access is by atomics and raw copies only.
unsafe impl Sync for RingMapping {}

impl RingMapping {
    /// Maps the memory that [`aquifer_ipc::Frame::SessionOpened`] carried.
    ///
    /// # Errors
    /// If the memory is too small, or a system call fails.
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
        // SAFETY: a fresh mapping at an address of the kernel's choice; it overlays nothing.
        let mark = unsafe {
            mmap_anonymous(ptr::null_mut(), MARK_BYTES, ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE)
        };
        let mark =
            mark.map_err(io::Error::from).and_then(|mark| NonNull::new(mark.cast()).ok_or_else(at_zero));
        let mark = mark.inspect_err(|_| unmap(start, RING_BYTES))?;
        let mapping = Self { start, mark };
        // SAFETY: both ranges were just mapped and are used by `mapping` only.
        unsafe {
            madvise(start.as_ptr().cast(), RING_BYTES, Advice::LinuxDontFork)?;
            madvise(mark.as_ptr().cast(), MARK_BYTES, Advice::LinuxWipeOnFork)?;
        }
        mapping.mark().store(1, Relaxed);
        Ok(mapping)
    }

    /// Whether the calling process mapped the memory. In a forked child the memory must not be
    /// used.
    pub fn is_own_process(&self) -> bool {
        self.mark().load(Relaxed) == 1
    }

    fn mark(&self) -> &AtomicU32 {
        // SAFETY: the page is aligned, and mapped as long as `self` lives.
        unsafe { AtomicU32::from_ptr(self.mark.as_ptr().cast()) }
    }

    /// Copies `bytes` into the data area at offset `at`.
    ///
    /// # Panics
    /// If the range is outside of the data area.
    pub fn write_data(&self, at: u32, bytes: &[u8]) {
        let place = self.data(at, bytes.len());
        // SAFETY: `data` has checked the range, and `bytes` is other memory.
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), place, bytes.len()) }
    }

    /// Copies bytes at offset `at` of the data area into `out`.
    ///
    /// # Panics
    /// If the range is outside of the data area.
    pub fn read_data(&self, at: u32, out: &mut [u8]) {
        let place = self.data(at, out.len());
        // SAFETY: `data` has checked the range, and `out` is other memory.
        unsafe { ptr::copy_nonoverlapping(place, out.as_mut_ptr(), out.len()) }
    }

    /// Address of a range of the data area, which it checks.
    fn data(&self, at: u32, len: usize) -> *mut u8 {
        let at = at as usize;
        let is_inside = at.checked_add(len).is_some_and(|end| end <= DATA_BYTES as usize);
        assert!(is_inside, "{len} bytes at {at} are outside of the data area");
        // SAFETY: the range is inside the mapping, as just checked.
        unsafe { self.start.as_ptr().add(DATA_AT + at) }
    }

    /// Address of an aligned word of the ring, which it checks.
    fn word(&self, offset: usize, bytes: usize) -> *mut u8 {
        assert!(offset.is_multiple_of(bytes) && offset + bytes <= RING_BYTES, "no word at {offset}");
        // SAFETY: the range is inside the mapping, as just checked.
        unsafe { self.start.as_ptr().add(offset) }
    }
}

impl RingWords for RingMapping {
    fn word_u32(&self, offset: usize) -> &AtomicU32 {
        // SAFETY: `word` has checked range and alignment (mappings begin at a page), the memory is
        // mapped as long as `self` lives, and all access to it is atomic.
        unsafe { AtomicU32::from_ptr(self.word(offset, 4).cast()) }
    }

    fn word_u64(&self, offset: usize) -> &AtomicU64 {
        // SAFETY: `word` has checked range and alignment, the memory is mapped as long as `self`
        // lives, and all access to it is atomic.
        unsafe { AtomicU64::from_ptr(self.word(offset, 8).cast()) }
    }
}

impl Drop for RingMapping {
    fn drop(&mut self) {
        // In a forked child another mapping may be at this address.
        if self.is_own_process() {
            unmap(self.start, RING_BYTES);
        }
        unmap(self.mark, MARK_BYTES);
    }
}

fn unmap(start: NonNull<u8>, bytes: usize) {
    // SAFETY: called once for each mapping of this module, when no borrow of it is alive.
    let unmapped = unsafe { munmap(start.as_ptr().cast(), bytes) };
    debug_assert!(unmapped.is_ok(), "munmap: {unmapped:?}");
}
