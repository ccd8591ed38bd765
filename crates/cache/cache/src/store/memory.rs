//! The memory of a partition: a mapping of a memfd, or of a part of a file.

use std::fmt;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags};
use rustix::mm::{MapFlags, ProtFlags};

use super::index::Words;

/// Bytes of a page, the unit in which memory is charged and freed.
pub const PAGE_BYTES: usize = 4096;

/// A shared mapping of memory that is zero until it is written.
pub struct Memory {
    base: NonNull<u8>,
    bytes: usize,
    file: Arc<OwnedFd>,
    file_offset: u64,
}

// SAFETY: the mapping lives as long as the value, and all access goes through atomics or through
// the unsafe functions below, whose callers exclude conflicting access.
unsafe impl Send for Memory {}
// SAFETY: as for Send.
unsafe impl Sync for Memory {}

impl Memory {
    /// Maps a new memfd with this name.
    ///
    /// # Errors
    /// If the system has no memory or descriptor for it.
    pub fn create(name: &str, bytes: usize) -> io::Result<Self> {
        let file = rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        rustix::fs::ftruncate(&file, bytes as u64)?;
        // Other processes may map the memfd, too, and must not find it shorter.
        rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW)?;
        Self::map(Arc::new(file), 0, bytes)
    }

    /// Maps a part of a file, which must not be used for anything else.
    ///
    /// # Errors
    /// If the part cannot be mapped.
    pub fn map(file: Arc<OwnedFd>, file_offset: u64, bytes: usize) -> io::Result<Self> {
        // SAFETY: a new mapping at an address that the kernel chooses replaces nothing.
        let base = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                bytes,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED | MapFlags::NORESERVE,
                file.as_fd(),
                file_offset,
            )?
        };
        let base = NonNull::new(base.cast()).ok_or_else(|| io::Error::other("mapped at address 0"))?;
        Ok(Self { base, bytes, file, file_offset })
    }

    /// The word at this offset in bytes.
    ///
    /// # Panics
    /// If the offset is not that of a word in the mapping.
    #[inline]
    pub fn word(&self, offset: usize) -> &AtomicU64 {
        assert!(offset.is_multiple_of(8) && offset + 8 <= self.bytes, "no word at {offset}");
        // SAFETY: the word is in the mapping and aligned, and lives as long as `self`. Words are
        // only accessed as atomics.
        unsafe { AtomicU64::from_ptr(self.base.as_ptr().add(offset).cast()) }
    }

    /// The bytes at this offset.
    ///
    /// # Safety
    /// None of the bytes may be written while the slice lives.
    ///
    /// # Panics
    /// If the bytes are not in the mapping.
    #[inline]
    pub unsafe fn bytes(&self, offset: usize, len: usize) -> &[u8] {
        assert!(offset <= self.bytes && len <= self.bytes - offset, "no bytes at {offset}");
        // SAFETY: the bytes are in the mapping, and the caller excludes writes.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr().add(offset), len) }
    }

    /// Copies bytes to this offset.
    ///
    /// # Safety
    /// No other thread may access the bytes there at the same time.
    ///
    /// # Panics
    /// If the bytes do not fit the mapping.
    #[inline]
    pub unsafe fn write(&self, offset: usize, bytes: &[u8]) {
        assert!(offset <= self.bytes && bytes.len() <= self.bytes - offset, "no bytes at {offset}");
        // SAFETY: the target is in the mapping, nothing else accesses it, and `bytes` is not a part
        // of it, because a slice of the target could not live at this time.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.base.as_ptr().add(offset), bytes.len()) }
    }

    /// Prefetches the cache line at this offset. Only speed depends on it, and on processors other
    /// than x86-64 it does nothing.
    #[inline]
    pub fn prefetch(&self, offset: usize) {
        if offset < self.bytes {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: the address is in the mapping; a prefetch neither faults nor changes memory.
            unsafe {
                use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
                _mm_prefetch::<_MM_HINT_T0>(self.base.as_ptr().add(offset).cast());
            }
        }
    }

    /// A descriptor of the memory, which begins at offset 0 of the file if the memory has its own
    /// memfd.
    ///
    /// # Errors
    /// If there is no descriptor left.
    pub fn descriptor(&self) -> io::Result<OwnedFd> {
        self.file.try_clone()
    }

    /// Returns all pages to the system.
    ///
    /// # Errors
    /// If the kernel cannot free the pages.
    pub fn clear(&self) -> io::Result<()> {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        Ok(rustix::fs::fallocate(&*self.file, flags, self.file_offset, self.bytes as u64)?)
    }

    /// Returns pages to the system. The next reads of them find zeros.
    ///
    /// The bytes must not be needed any more, and no slice of them may live. A failure is logged:
    /// the memory is then used until the cache ends.
    pub fn discard(&self, offset: usize, len: usize) {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        if let Err(error) =
            rustix::fs::fallocate(&*self.file, flags, self.file_offset + offset as u64, len as u64)
        {
            tracing::error!(%error, offset, len, "cannot return memory to the system");
        }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: nothing refers to the mapping any more: all references borrow from `self`.
        if let Err(error) = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.bytes) } {
            tracing::error!(%error, "cannot unmap the memory of a partition");
        }
    }
}

impl fmt::Debug for Memory {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Memory").field("bytes", &self.bytes).finish_non_exhaustive()
    }
}

impl Words for Arc<Memory> {
    #[inline]
    fn load(&self, at: usize) -> u64 {
        self.word(at * 8).load(Ordering::Acquire)
    }

    #[inline]
    fn store(&self, at: usize, value: u64) {
        self.word(at * 8).store(value, Ordering::Release);
    }

    #[inline]
    fn replace(&self, at: usize, expected: u64, value: u64) -> bool {
        self.word(at * 8).compare_exchange(expected, value, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }

    #[inline]
    fn prefetch(&self, at: usize) {
        Memory::prefetch(self, at * 8);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn discarded_memory_is_zero() {
        let memory = Memory::create("test", 4 * PAGE_BYTES).unwrap();
        memory.word(PAGE_BYTES).store(7, Ordering::Relaxed);
        memory.word(8).store(8, Ordering::Relaxed);
        memory.discard(PAGE_BYTES, PAGE_BYTES);
        assert_eq!(memory.word(PAGE_BYTES).load(Ordering::Relaxed), 0);
        assert_eq!(memory.word(8).load(Ordering::Relaxed), 8);
    }
}
