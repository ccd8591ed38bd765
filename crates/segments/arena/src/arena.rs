//! The range of addresses for segments.

use std::io;
use std::ops::Range;

use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};

/// The first address for segments: between the heap and the mappings of a usual program.
pub const ARENA_START: usize = 0x3000_0000_0000;
/// Length in bytes of the range of addresses for segments: 4 TiB. The next 4 TiB are for mappings
/// that were withdrawn.
pub const ARENA_BYTES: usize = 4 << 40;
/// Maximum length of a segment in bytes: 1 TiB.
pub const SEGMENT_BYTES_MAX: usize = 1 << 40;

const MIB_2: usize = 2 << 20;
const GIB: usize = 1 << 30;

/// An error of the arena or of a mapping in it.
#[derive(Debug, thiserror::Error)]
pub enum ArenaError {
    /// The process uses the addresses of the arena for something else.
    #[error(
        "the addresses for segments, {ARENA_START:#x} to {:#x}, are in use: a sanitizer or a runtime \
         has reserved them, so this process cannot have segments",
        ARENA_START + 2 * ARENA_BYTES
    )]
    InUse,
    /// The range of a segment is invalid or in use.
    #[error("a segment of {bytes} bytes cannot be at {address:#x}")]
    Range {
        /// The first address of the segment.
        address: usize,
        /// The length of the segment in bytes.
        bytes: usize,
    },
    /// A system call failed.
    #[error("cannot {what}: {source}")]
    System {
        /// The operation that failed, as a verb with its object.
        what: &'static str,
        /// The system's error.
        source: io::Error,
    },
}

impl ArenaError {
    pub(crate) fn system(what: &'static str) -> impl FnOnce(rustix::io::Errno) -> Self {
        move |error| Self::System { what, source: error.into() }
    }
}

/// The reservation of the addresses for segments in this process.
#[derive(Debug)]
pub struct Arena(());

impl Arena {
    /// Reserves the addresses of the arena, without memory.
    ///
    /// # Errors
    /// [`ArenaError::InUse`] if a part of them is in use, also by another arena of this process.
    pub fn reserve() -> Result<Self, ArenaError> {
        reserve(ARENA_START..ARENA_START + 2 * ARENA_BYTES).map_err(|error| match error {
            rustix::io::Errno::EXIST => ArenaError::InUse,
            error => ArenaError::System { what: "reserve the addresses for segments", source: error.into() },
        })?;
        Ok(Self(()))
    }

    /// The alignment of a segment of `bytes` bytes. Due to it, the kernel moves whole page tables
    /// when the segment is withdrawn, which is fast.
    #[must_use]
    pub const fn alignment(bytes: usize) -> usize {
        if bytes >= GIB { GIB } else { MIB_2 }
    }

    /// Checks that a segment may have a range of addresses.
    ///
    /// # Errors
    /// If the range is not aligned, not whole pages, or not inside the arena.
    pub fn check(address: usize, bytes: usize) -> Result<(), ArenaError> {
        let is_length = bytes > 0 && bytes <= SEGMENT_BYTES_MAX && bytes.is_multiple_of(4096);
        let is_inside = address >= ARENA_START
            && bytes <= ARENA_BYTES
            && address.checked_sub(ARENA_START).is_some_and(|at| at <= ARENA_BYTES - bytes);
        if is_length && is_inside && address.is_multiple_of(Self::alignment(bytes)) {
            Ok(())
        } else {
            Err(ArenaError::Range { address, bytes })
        }
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        // SAFETY: mappings borrow the arena, so nothing but reservations is left in the range.
        let unmapped = unsafe { munmap(std::ptr::with_exposed_provenance_mut(ARENA_START), 2 * ARENA_BYTES) };
        debug_assert!(unmapped.is_ok(), "the range was reserved");
    }
}

/// Reserves addresses that are not mapped, without access to them.
pub(crate) fn reserve(range: Range<usize>) -> Result<(), rustix::io::Errno> {
    let flags = MapFlags::PRIVATE | MapFlags::NORESERVE | MapFlags::FIXED_NOREPLACE;
    let start = std::ptr::with_exposed_provenance_mut(range.start);
    // SAFETY: `FIXED_NOREPLACE` overlays nothing, and the mapping has no access.
    unsafe { mmap_anonymous(start, range.len(), ProtFlags::empty(), flags) }.map(drop)
}
