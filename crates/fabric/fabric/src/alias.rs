//! Alias mappings: addresses whose pages are those of a memory, in any order. By them an object
//! keeps its address when it moves (CoRM §3.5).

use std::io;
use std::ptr::NonNull;
use std::sync::Arc;

use rustix::mm::{MapFlags, ProtFlags};

use crate::Memory;
use crate::memory::u64_from;

/// A range of addresses as long as a memory, which initially maps each byte of the memory at its
/// own offset.
#[derive(Debug)]
pub struct AliasMapping {
    memory: Arc<Memory>,
    start: NonNull<u8>,
}

// SAFETY: the mapping belongs to the process, not to a thread; it hands out no references.
unsafe impl Send for AliasMapping {}
// SAFETY: the same reason as for `Send`.
unsafe impl Sync for AliasMapping {}

impl AliasMapping {
    /// Maps a memory once more, at the address `wish` of this process if that is free.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn new(memory: Arc<Memory>, wish: usize) -> io::Result<Self> {
        // SAFETY: without MAP_FIXED it overlays nothing.
        let start = unsafe {
            rustix::mm::mmap(
                std::ptr::without_provenance_mut(wish),
                memory.len(),
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED | MapFlags::NORESERVE,
                memory.fd(),
                0,
            )?
        };
        let start = NonNull::new(start.cast()).ok_or(io::ErrorKind::AddrNotAvailable)?;
        Ok(Self { memory, start })
    }

    /// The memory that provides the pages.
    #[must_use]
    pub fn memory(&self) -> &Arc<Memory> {
        &self.memory
    }

    /// First address.
    #[must_use]
    pub fn as_ptr(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    /// Maps the `len` bytes at `from` of the memory at `at` of the mapping. A concurrent access
    /// sees the old pages or the new ones.
    ///
    /// # Errors
    /// If a number is not a multiple of the page size, or a range is not inside; if the system
    /// refuses, which limits the number of mappings (`vm.max_map_count`). Nothing has changed then.
    pub fn remap(&self, at: usize, from: usize, len: usize) -> io::Result<()> {
        self.can_remap(at, from, len)?;
        // SAFETY: it replaces a part of this mapping, to which there are no references; the memory
        // cannot shrink below it.
        unsafe {
            rustix::mm::mmap(
                self.as_ptr().add(at).cast(),
                len,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED | MapFlags::NORESERVE | MapFlags::FIXED,
                self.memory.fd(),
                u64_from(from),
            )?;
        }
        Ok(())
    }

    /// Checks the arguments of [`Self::remap`].
    ///
    /// # Errors
    /// If a number is not a multiple of the page size, or a range is not inside.
    pub fn can_remap(&self, at: usize, from: usize, len: usize) -> io::Result<()> {
        let page = rustix::param::page_size();
        let is_inside = |start: usize| start.checked_add(len).is_some_and(|end| end <= self.memory.len());
        if len == 0 || [at, from, len].iter().any(|number| !number.is_multiple_of(page)) {
            let what = format!("{len} bytes from {from} to {at} are not whole pages of {page} bytes");
            return Err(io::Error::new(io::ErrorKind::InvalidInput, what));
        }
        if !is_inside(at) || !is_inside(from) {
            let what = format!(
                "{len} bytes from {from} to {at} are not inside a memory of {} bytes",
                self.memory.len()
            );
            return Err(io::Error::new(io::ErrorKind::InvalidInput, what));
        }
        Ok(())
    }
}

impl Drop for AliasMapping {
    fn drop(&mut self) {
        // SAFETY: `self` owns the mapping, and nothing borrowed from `self` is alive.
        let unmapped = unsafe { rustix::mm::munmap(self.as_ptr().cast(), self.memory.len()) };
        debug_assert!(unmapped.is_ok(), "munmap: {unmapped:?}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: usize = 4096;

    fn byte(view: &AliasMapping, at: usize) -> u8 {
        assert!(at < view.memory().len());
        // SAFETY: inside the mapping.
        unsafe { view.as_ptr().add(at).read_volatile() }
    }

    #[test]
    fn addresses_move_and_bytes_stay() {
        let memory = Arc::new(Memory::create("test", 4 * PAGE).unwrap());
        (0..4).for_each(|page| memory.write(page * PAGE, &[u8::try_from(page).unwrap() + 1]));
        let view = AliasMapping::new(Arc::clone(&memory), 1 << 40).unwrap();
        assert_eq!(view.as_ptr().addr(), 1 << 40, "the address is free");
        view.remap(0, 2 * PAGE, 2 * PAGE).unwrap();
        let seen: Vec<u8> = (0..4).map(|page| byte(&view, page * PAGE)).collect();
        assert_eq!(seen, [3, 4, 3, 4], "two addresses may be of one page");
        memory.write(3 * PAGE, &[9]);
        assert_eq!(byte(&view, PAGE), 9);
    }

    #[test]
    fn ranges_of_partial_pages_or_outside_are_refused() {
        let memory = Arc::new(Memory::create("test", 4 * PAGE).unwrap());
        let view = AliasMapping::new(memory, 0).unwrap();
        for (at, from, len) in [(1, 0, PAGE), (0, 1, PAGE), (0, 0, 1), (0, 0, 0)] {
            assert!(view.remap(at, from, len).unwrap_err().to_string().contains("whole pages"));
        }
        for (at, from, len) in [(3 * PAGE, 0, 2 * PAGE), (0, 4 * PAGE, PAGE), (usize::MAX & !4095, 0, PAGE)] {
            assert!(view.remap(at, from, len).unwrap_err().to_string().contains("not inside"));
        }
    }
}
