//! Tracking of the pages of a segment that the program writes.
//!
//! The kernel write-protects pages and records a write by itself, so no thread serves faults.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};

use crate::arena::ArenaError;
use crate::mapping::Mapping;
use crate::uffd;

/// Maximum number of ranges of pages in one call of the kernel.
const RANGES_MAX: usize = 256;

/// Tracks which pages of a mapping are written.
///
/// Writes by devices into pages that were pinned before [`Self::drain_written`], such as registered
/// buffers of `io_uring` or RDMA, are not noticed.
#[derive(Debug)]
pub struct WrittenPages {
    uffd: OwnedFd,
    /// `/proc/self/pagemap`.
    pagemap: File,
    address: usize,
    bytes: usize,
}

impl WrittenPages {
    /// Begins to track writes. All pages count as written until the first
    /// [`Self::drain_written`].
    ///
    /// # Errors
    /// If the kernel is older than Linux 6.7, or another userfaultfd serves faults of the mapping.
    pub fn watch(mapping: &Mapping<'_>) -> Result<Self, ArenaError> {
        let failed = |source| ArenaError::System { what: "track writes to a segment", source };
        let (address, bytes) = (mapping.address(), mapping.bytes());
        let uffd = uffd::open_for_write_tracking().map_err(failed)?;
        uffd::track_writes(&uffd, address, bytes).map_err(failed)?;
        let pagemap = File::open("/proc/self/pagemap").map_err(failed)?;
        Ok(Self { uffd, pagemap, address, bytes })
    }

    /// Calls `found` with each range of bytes whose pages were written since the previous call, in
    /// the order of addresses, and counts them as unwritten from now on.
    ///
    /// # Errors
    /// If the mapping is gone. Then some written pages may never be reported.
    pub fn drain_written(&self, mut found: impl FnMut(Range<usize>)) -> Result<(), ArenaError> {
        let failed = |source| ArenaError::System { what: "find the pages that were written", source };
        let end = self.address + self.bytes;
        let mut at = self.address;
        let mut ranges = [uffd::WrittenRange::default(); RANGES_MAX];
        while at < end {
            let (len, next) =
                uffd::scan_written(self.pagemap.as_fd(), at..end, &mut ranges).map_err(failed)?;
            for range in &ranges[..len] {
                found(range.start() - self.address..range.end() - self.address);
            }
            if next <= at {
                return Err(failed(io::Error::other("the scan of the kernel made no progress")));
            }
            at = next;
        }
        Ok(())
    }
}

impl Drop for WrittenPages {
    /// Ends the tracking. Otherwise a move of the mapping would move page by page.
    fn drop(&mut self) {
        // If the segment was revoked, another mapping is at the addresses, and the call fails.
        let _has_ended = uffd::unregister(&self.uffd, self.address, self.bytes);
    }
}
