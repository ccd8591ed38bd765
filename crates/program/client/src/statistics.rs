//! Statistics of a session.

use aquifer_ipc::ring::{RingAnswer, RingStatus};

use crate::session::Extent;

/// Counts of a session since it was opened.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Statistics {
    /// Bytes of the extents that are allocated now.
    pub bytes: u64,
    /// Extents that were allocated.
    pub allocated: u64,
    /// Extents that were freed. A section of a larger extent that is freed alone counts as one.
    pub freed: u64,
    /// Bytes read from extents by calls that succeeded.
    pub read_bytes: u64,
    /// Bytes written to extents by calls that succeeded.
    pub written_bytes: u64,
    /// Requests to the agent: one for each allocated extent, for each freed extent of up to 2 MiB
    /// or section of a larger one, and for each piece that was read or written.
    pub requests: u64,
    /// Number of times that the program slept because an answer took more than about 50 µs.
    pub sleeps: u64,
}

impl Statistics {
    /// Counts an allocated extent.
    pub(crate) fn count_allocation(&mut self, extent: &Extent) {
        self.allocated += 1;
        self.bytes += extent.bytes();
    }

    /// Counts the free of a part of an extent; `is_first` for its first part.
    pub(crate) fn count_free(&mut self, answer: &RingAnswer, bytes: u64, is_first: bool) {
        if answer.status == RingStatus::Done {
            self.bytes = self.bytes.saturating_sub(bytes);
            self.freed += u64::from(is_first);
        }
    }
}
