//! Shared memory: a mapped memfd.
//!
//! Other processes may write it at any time, so it is never a slice. Bytes are copied in and out
//! through raw pointers, and words are atomics.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use parking_lot::Mutex;
use rustix::fs::{FallocateFlags, MemfdFlags, Mode, OFlags, SealFlags, SeekFrom};
use rustix::mm::{MapFlags, MlockFlags, ProtFlags};

/// Longest transfer, in bytes, that is copied word by word when both ends are 8-aligned.
const WORDWISE_BYTES_MAX: usize = 256;

/// An owned shared mapping of a memfd: readable, and writable unless it was mapped read-only.
pub struct Memory {
    /// `None` for memory that is not passed on.
    fd: Option<Arc<OwnedFd>>,
    start: NonNull<u8>,
    len: usize,
    is_writable: bool,
    /// Whether a device has pinned pages. Locked during [`Memory::release_pages`].
    is_pinned: Mutex<bool>,
}

// SAFETY: the mapping belongs to the process, not to a thread. All access goes through raw copies
// and atomics, so sharing the handle gives out no references to plain data.
unsafe impl Send for Memory {}
// SAFETY: the same reason as for `Send`.
unsafe impl Sync for Memory {}

impl Memory {
    /// Creates a memfd of `len` zero bytes and maps it. The memfd can never shrink, so no holder of
    /// its descriptor can make an access of another holder fault. A page takes memory when it is
    /// first touched.
    ///
    /// # Errors
    /// If `len` is zero or the system refuses.
    #[cfg(not(miri))]
    pub fn create(name: &str, len: usize) -> io::Result<Self> {
        let fd = rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        rustix::fs::ftruncate(&fd, u64_from(len))?;
        rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        Self::map(fd, len, true)
    }

    /// Creates memory like [`Self::create`], but the process can revoke it by [`Self::revoke`].
    ///
    /// # Errors
    /// If `len` is zero or the system refuses.
    #[cfg(not(miri))]
    pub fn create_revocable(name: &str, len: usize) -> io::Result<Self> {
        let fd = rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        rustix::fs::ftruncate(&fd, u64_from(len))?;
        rustix::fs::fcntl_add_seals(&fd, SealFlags::GROW | SealFlags::SEAL)?;
        Self::map(fd, len, true)
    }

    /// Creates memory of this process alone, because Miri maps no files.
    ///
    /// # Errors
    /// If `len` is zero.
    #[cfg(miri)]
    pub fn create_revocable(name: &str, len: usize) -> io::Result<Self> {
        Self::create(name, len)
    }

    /// Maps the whole of a memfd that [`Self::create_revocable`] has made. If its creator revokes
    /// it while this process uses it, an access kills this process.
    ///
    /// # Errors
    /// If the system refuses, or the file is empty.
    pub fn whole_revocable(fd: OwnedFd) -> io::Result<Self> {
        let len = file_len(&fd)?;
        Self::map(fd, len, true)
    }

    /// Maps the whole of a memfd like [`Self::whole_revocable`], for reading only.
    ///
    /// # Errors
    /// If the system refuses, or the file is empty.
    pub fn whole_revocable_read_only(fd: OwnedFd) -> io::Result<Self> {
        let len = file_len(&fd)?;
        Self::map(fd, len, false)
    }

    /// Empties the memory: its pages are freed, and an access by a process that has mapped it
    /// raises SIGBUS.
    ///
    /// # Errors
    /// If the memory was not created as revocable, or has no descriptor.
    pub fn revoke(mut self) -> io::Result<()> {
        let fd = self.fd.take().ok_or_else(|| refused("the memory has no descriptor".into()))?;
        // This process must not have it mapped.
        drop(self);
        Ok(rustix::fs::ftruncate(&*fd, 0)?)
    }

    /// Creates memory of this process alone, of `len` zero bytes. It has no descriptor.
    ///
    /// # Errors
    /// If `len` is zero or the system refuses.
    pub fn private(name: &str, len: usize) -> io::Result<Self> {
        Self::create(name, len).map(Self::without_fd)
    }

    /// Closes the descriptor of the memory, and keeps the mapping.
    #[must_use]
    pub fn without_fd(mut self) -> Self {
        self.fd = None;
        self
    }

    /// Creates memory of this process alone, because Miri maps no files.
    ///
    /// # Errors
    /// If `len` is zero.
    #[cfg(miri)]
    pub fn create(_name: &str, len: usize) -> io::Result<Self> {
        if len == 0 {
            return Err(refused("memory of zero bytes cannot be mapped".into()));
        }
        // SAFETY: the layout has a size.
        let start = unsafe { std::alloc::alloc_zeroed(layout_of(len)) };
        let start = NonNull::new(start).ok_or(io::ErrorKind::OutOfMemory)?;
        let fd = Some(Arc::new(std::fs::File::open("/dev/null")?.into()));
        Ok(Self { fd, start, len, is_writable: true, is_pinned: Mutex::new(false) })
    }

    /// Maps the first `len` bytes of a memfd that another process passed.
    ///
    /// # Errors
    /// If the file is shorter than `len`, or not sealed against shrinking: an access beyond its end
    /// would kill this process. If the system refuses.
    pub fn from_fd(fd: OwnedFd, len: usize) -> io::Result<Self> {
        check_file(&fd, len)?;
        Self::map(fd, len, true)
    }

    /// Maps the first `len` bytes of a memfd for reading only. The descriptor may be open for
    /// reading only. Functions that write panic.
    ///
    /// # Errors
    /// The errors of [`Self::from_fd`].
    pub fn from_fd_read_only(fd: OwnedFd, len: usize) -> io::Result<Self> {
        check_file(&fd, len)?;
        Self::map(fd, len, false)
    }

    /// The memfd, opened again for reading only: a receiver cannot map it writable. Processes
    /// of other users cannot open it again for writing either.
    ///
    /// # Errors
    /// If the system refuses.
    ///
    /// # Panics
    /// As [`Self::fd`].
    pub fn read_only_fd(&self) -> io::Result<OwnedFd> {
        use std::os::fd::AsRawFd;
        let own = self.fd();
        // A descriptor for reading only was not opened by the owner, which has set the mode.
        if self.is_writable {
            rustix::fs::fchmod(own, Mode::RUSR | Mode::WUSR)?;
        }
        let path = format!("/proc/self/fd/{}", own.as_raw_fd());
        Ok(rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?)
    }

    /// Whether the memory may be written.
    #[must_use]
    pub fn is_writable(&self) -> bool {
        self.is_writable
    }

    /// Maps the whole of a memfd that another process passed.
    ///
    /// # Errors
    /// The errors of [`Self::from_fd`].
    pub fn whole(fd: OwnedFd) -> io::Result<Self> {
        let len = file_len(&fd)?;
        Self::from_fd(fd, len)
    }

    fn map(fd: OwnedFd, len: usize, is_writable: bool) -> io::Result<Self> {
        if len == 0 {
            return Err(refused("memory of zero bytes cannot be mapped".into()));
        }
        let mut protection = ProtFlags::READ;
        protection.set(ProtFlags::WRITE, is_writable);
        // SAFETY: a fresh mapping at an address of the kernel's choice; it overlays nothing.
        let start = unsafe {
            rustix::mm::mmap(
                ptr::null_mut(),
                len,
                protection,
                MapFlags::SHARED | MapFlags::NORESERVE,
                &fd,
                0,
            )?
        };
        let start = NonNull::new(start.cast::<u8>())
            .ok_or_else(|| refused("the kernel mapped memory at address zero".into()))?;
        Ok(Self { fd: Some(Arc::new(fd)), start, len, is_writable, is_pinned: Mutex::new(false) })
    }

    /// Length in bytes.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "a memory is never empty")]
    pub fn len(&self) -> usize {
        self.len
    }

    /// The memfd, to be passed to other processes.
    ///
    /// # Panics
    /// If the memory is [`Self::private`] or [`Self::without_fd`].
    #[must_use]
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_ref().expect("memory without a descriptor is not passed on").as_fd()
    }

    /// The memfd, for an owner that may outlive the mapping.
    ///
    /// # Panics
    /// As [`Self::fd`].
    #[must_use]
    pub fn shared_fd(&self) -> Arc<OwnedFd> {
        Arc::clone(self.fd.as_ref().expect("memory without a descriptor is not passed on"))
    }

    /// The first byte. Other processes may change the memory at any time. It must not be written
    /// if it was mapped read-only.
    #[must_use]
    pub fn as_ptr(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    /// Copies bytes out. If `offset`, the buffer and its length are multiples of 8, a copy of at
    /// most 256 bytes reads each 8-byte word atomically.
    ///
    /// # Panics
    /// If the range is not inside the memory.
    #[inline]
    pub fn read(&self, offset: usize, out: &mut [u8]) {
        let source = self.range(offset, out.len());
        // SAFETY: `range` checked the source; `out` is exclusively borrowed, and cannot overlap it.
        unsafe { copy(out.as_mut_ptr(), source, out.len()) }
    }

    /// Copies bytes in.
    ///
    /// # Panics
    /// If the range is not inside the memory, or the memory was mapped read-only.
    #[inline]
    pub fn write(&self, offset: usize, bytes: &[u8]) {
        self.expect_writable();
        let destination = self.range(offset, bytes.len());
        // SAFETY: `range` checked the destination; `bytes` is plain memory and does not overlap it.
        unsafe { copy(destination, bytes.as_ptr(), bytes.len()) }
    }

    /// Loads the 8-byte word at `offset`, with the ordering `Acquire`. Works on memory that was
    /// mapped read-only.
    ///
    /// # Panics
    /// If it is not inside the memory or `offset` is not a multiple of 8.
    #[inline]
    #[must_use]
    pub fn load_u64(&self, offset: usize) -> u64 {
        assert!(offset.is_multiple_of(8), "offset {offset} is not a multiple of 8");
        let word = self.range(offset, 8).cast::<u64>();
        // SAFETY: in range, aligned, and mapped for as long as `self` lives. Acquire loads of 8
        // bytes are permitted on read-only memory.
        unsafe { AtomicU64::from_ptr(word).load(Ordering::Acquire) }
    }

    /// The 8-byte word at `offset`.
    ///
    /// # Panics
    /// If it is not inside the memory or `offset` is not a multiple of 8; if the memory was mapped
    /// read-only.
    #[inline]
    #[must_use]
    pub fn atomic_u64(&self, offset: usize) -> &AtomicU64 {
        self.expect_writable();
        assert!(offset.is_multiple_of(8), "offset {offset} is not a multiple of 8");
        let word = self.range(offset, 8).cast::<u64>();
        // SAFETY: in range, aligned (mappings begin at a page), and mapped for as long as `self`
        // lives. All users of shared words access them atomically or as raw bytes.
        unsafe { AtomicU64::from_ptr(word) }
    }

    /// The 4-byte word at `offset`.
    ///
    /// # Panics
    /// If it is not inside the memory or `offset` is not a multiple of 4; if the memory was mapped
    /// read-only.
    #[inline]
    #[must_use]
    pub fn atomic_u32(&self, offset: usize) -> &AtomicU32 {
        self.expect_writable();
        assert!(offset.is_multiple_of(4), "offset {offset} is not a multiple of 4");
        let word = self.range(offset, 4).cast::<u32>();
        // SAFETY: in range, aligned, and mapped for as long as `self` lives.
        unsafe { AtomicU32::from_ptr(word) }
    }

    /// Returns the pages of a range to the system. The range then reads as zeros in all mappings.
    ///
    /// # Errors
    /// If the system refuses, as it does for an empty range.
    ///
    /// # Panics
    /// If the range is not inside the memory, or the memory was mapped read-only.
    pub fn punch(&self, offset: usize, len: usize) -> io::Result<()> {
        self.expect_writable();
        self.range(offset, len);
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        Ok(rustix::fs::fallocate(self.fd(), flags, u64_from(offset), u64_from(len))?)
    }

    /// Records that a device is about to pin pages of this memory. Their memory cannot be returned
    /// to the system from then on, because the device would still access the pages that were
    /// returned.
    pub fn pin(&self) {
        *self.is_pinned.lock() = true;
    }

    /// Whether a device may have pinned pages of this memory.
    #[must_use]
    pub fn is_pinned(&self) -> bool {
        *self.is_pinned.lock()
    }

    /// Returns pages to the system as [`Self::punch`] does, unless a device may have pinned some.
    /// Returns whether it did.
    ///
    /// # Errors
    /// As [`Self::punch`].
    ///
    /// # Panics
    /// As [`Self::punch`].
    pub fn release_pages(&self, offset: usize, len: usize) -> io::Result<bool> {
        let is_pinned = self.is_pinned.lock();
        if !*is_pinned {
            self.punch(offset, len)?;
        }
        Ok(!*is_pinned)
    }

    /// Keeps pages of this memory from being swapped out, each from its first access by this
    /// process on.
    ///
    /// # Errors
    /// If this process may not lock as much memory.
    #[cfg(not(miri))]
    pub fn lock_touched(&self) -> io::Result<()> {
        // SAFETY: the range is the mapping of `self`, and a lock does not change what is there.
        let locked = unsafe { rustix::mm::mlock_with(self.as_ptr().cast(), self.len, MlockFlags::ONFAULT) };
        Ok(locked?)
    }

    /// Keeps the pages of a range from being swapped out.
    ///
    /// # Errors
    /// If this process may not lock as much memory.
    ///
    /// # Panics
    /// If the range is not inside the memory.
    #[cfg(not(miri))]
    pub fn lock_range(&self, offset: usize, len: usize) -> io::Result<()> {
        let start = self.range(offset, len);
        // SAFETY: the range is part of the mapping, and a lock does not change what is there.
        let locked = unsafe { rustix::mm::mlock(start.cast(), len) };
        Ok(locked?)
    }

    /// The offset of the first page at or after `offset` that has memory; `None` if there is none.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn next_allocated(&self, offset: usize) -> io::Result<Option<usize>> {
        match rustix::fs::seek(self.fd(), SeekFrom::Data(u64_from(offset))) {
            Ok(found) => Ok(usize::try_from(found).ok()),
            Err(rustix::io::Errno::NXIO) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Reads bytes without creating pages: a page that was never written reads as zeros.
    ///
    /// # Errors
    /// If the system refuses.
    ///
    /// # Panics
    /// If the range is not inside the memory.
    pub fn peek(&self, offset: usize, out: &mut [u8]) -> io::Result<()> {
        self.range(offset, out.len());
        let mut done = 0;
        while done < out.len() {
            match rustix::io::pread(self.fd(), &mut out[done..], u64_from(offset + done))? {
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                found => done += found,
            }
        }
        Ok(())
    }

    /// The bytes that the system has allocated, which are those of touched pages.
    ///
    /// # Errors
    /// If the system call fails.
    pub fn allocated_bytes(&self) -> io::Result<u64> {
        // The unit is 512 bytes, independent of the file system.
        Ok(u64::try_from(rustix::fs::fstat(self.fd())?.st_blocks).unwrap_or(0) * 512)
    }

    #[inline]
    fn expect_writable(&self) {
        assert!(self.is_writable, "the memory was mapped read-only");
    }

    /// The start of a range as an offset; `None` if the range is not inside the memory.
    #[inline]
    pub(crate) fn offset(&self, offset: u64, len: u64) -> Option<usize> {
        let is_inside = offset.checked_add(len).is_some_and(|end| end <= u64_from(self.len));
        if is_inside { usize::try_from(offset).ok() } else { None }
    }

    /// The first byte of a range; `None` if the range is not inside the memory.
    #[inline]
    pub(crate) fn pointer(&self, offset: u64, len: u64) -> Option<*mut u8> {
        let offset = self.offset(offset, len)?;
        // SAFETY: `offset` is at most `self.len`, so the result is in or one past the mapping.
        Some(unsafe { self.as_ptr().add(offset) })
    }

    /// The first byte of a range.
    ///
    /// # Panics
    /// If the range is not inside the memory.
    #[inline]
    fn range(&self, offset: usize, len: usize) -> *mut u8 {
        let inside = offset.checked_add(len).is_some_and(|end| end <= self.len);
        assert!(inside, "{len} bytes at {offset} are outside of memory of {} bytes", self.len);
        // SAFETY: `offset` is at most `self.len`, so the result is in or one past the mapping.
        unsafe { self.as_ptr().add(offset) }
    }
}

fn file_len(fd: &OwnedFd) -> io::Result<usize> {
    Ok(usize::try_from(rustix::fs::fstat(fd)?.st_size).unwrap_or(0))
}

/// Checks whether the first `len` bytes of a file can be accessed at any time.
fn check_file(fd: &OwnedFd, len: usize) -> io::Result<()> {
    let seals = rustix::fs::fcntl_get_seals(fd)
        .map_err(|source| refused(format!("the descriptor is not a memfd with seals: {source}")))?;
    if !seals.contains(SealFlags::SHRINK) {
        return Err(refused("the memfd is not sealed against shrinking".into()));
    }
    let size = u64::try_from(rustix::fs::fstat(fd)?.st_size).unwrap_or(0);
    if size < u64_from(len) {
        return Err(refused(format!("the memfd has {size} bytes, {len} are needed")));
    }
    Ok(())
}

impl Drop for Memory {
    #[cfg(miri)]
    fn drop(&mut self) {
        // SAFETY: it was allocated with this layout, and nothing borrowed from `self` is alive.
        unsafe { std::alloc::dealloc(self.as_ptr(), layout_of(self.len)) }
    }

    #[cfg(not(miri))]
    fn drop(&mut self) {
        // SAFETY: `self` owns the mapping, and nothing borrowed from `self` is alive.
        let unmapped = unsafe { rustix::mm::munmap(self.as_ptr().cast(), self.len) };
        debug_assert!(unmapped.is_ok(), "munmap: {unmapped:?}");
    }
}

impl std::fmt::Debug for Memory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Memory").field("len", &self.len).field("fd", &self.fd).finish()
    }
}

/// Copies between memories that other threads or processes may be writing.
///
/// A copy of at most 256 aligned bytes is made word by word. A reader that races with an atomic
/// then sees the word before or after it, never a mixture. The pool reads its words by plain READs
/// and depends on this.
///
/// # Safety
/// Both ranges must be mapped for the whole call.
#[inline]
pub unsafe fn copy(to: *mut u8, from: *const u8, len: usize) {
    let misaligned = (to.addr() | from.addr() | len) & 7;
    if misaligned == 0 && len <= WORDWISE_BYTES_MAX {
        let (to, from) = (to.cast::<u64>(), from.cast_mut().cast::<u64>());
        for word in 0..len / 8 {
            // SAFETY: inside the caller's ranges, aligned by the check above.
            unsafe {
                let value = AtomicU64::from_ptr(from.add(word)).load(Ordering::Relaxed);
                AtomicU64::from_ptr(to.add(word)).store(value, Ordering::Relaxed);
            }
        }
    } else {
        // SAFETY: the caller guarantees both ranges. They may overlap if both ends are the same
        // memory.
        unsafe { ptr::copy(from, to, len) }
    }
}

/// Converts `usize` to `u64`, without loss on each machine that Linux runs on.
#[inline]
pub fn u64_from(value: usize) -> u64 {
    value as u64
}

#[cfg(miri)]
fn layout_of(len: usize) -> std::alloc::Layout {
    std::alloc::Layout::from_size_align(len, 4096).expect("memory of tests is small")
}

fn refused(reason: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, reason)
}

#[cfg(test)]
mod tests;
