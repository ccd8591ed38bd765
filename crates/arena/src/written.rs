//! Which pages of a segment the program has written since the last look.
//!
//! The kernel write-protects pages, and notes a write by itself: no thread waits for another one.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};

use crate::arena::ArenaError;
use crate::mapping::Mapping;
use crate::uffd;

/// Ranges of pages in one look.
const RANGES_MAX: usize = 256;

/// Watches over the pages of a mapping.
///
/// Writes by devices into pages that were pinned before a look, such as registered buffers of
/// `io_uring` or RDMA, are not noticed.
#[derive(Debug)]
pub struct WrittenPages {
    uffd: OwnedFd,
    /// `/proc/self/pagemap`.
    pagemap: File,
    address: usize,
    bytes: usize,
}

impl WrittenPages {
    /// Begins to watch. All pages count as written until the first look.
    ///
    /// # Errors
    /// If the kernel is older than Linux 6.7, or faults of the mapping are served otherwise.
    pub fn watch(mapping: &Mapping<'_>) -> Result<Self, ArenaError> {
        let failed = |source| ArenaError::System { what: "watch over the pages of a segment", source };
        let (address, bytes) = (mapping.address(), mapping.bytes());
        let uffd = uffd::open_for_writes().map_err(failed)?;
        uffd::register_writes(&uffd, address, bytes).map_err(failed)?;
        let pagemap = File::open("/proc/self/pagemap").map_err(failed)?;
        Ok(Self { uffd, pagemap, address, bytes })
    }

    /// Tells which bytes of the segment are of pages that were written since the last look, in
    /// order. From now on they are not.
    ///
    /// # Errors
    /// If the mapping is gone. Then some pages may be forgotten.
    pub fn look(&self, mut found: impl FnMut(Range<usize>)) -> Result<(), ArenaError> {
        let failed = |source| ArenaError::System { what: "look which pages were written", source };
        let end = self.address + self.bytes;
        let mut at = self.address;
        let mut ranges = [uffd::WrittenRange::default(); RANGES_MAX];
        while at < end {
            let (len, next) =
                uffd::look_for_writes(self.pagemap.as_fd(), at..end, &mut ranges).map_err(failed)?;
            for range in &ranges[..len] {
                found(range.start() - self.address..range.end() - self.address);
            }
            if next <= at {
                return Err(failed(io::Error::other("the kernel did not go on")));
            }
            at = next;
        }
        Ok(())
    }
}

impl Drop for WrittenPages {
    /// Ends the watch. Otherwise a move of the mapping would move page by page.
    fn drop(&mut self) {
        // It may be another mapping by now, if the segment was taken from the program.
        let _has_ended = uffd::unregister(&self.uffd, self.address, self.bytes);
    }
}
