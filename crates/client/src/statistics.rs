//! What a session counts.

use aquifer_ipc::ring::{ExtentAnswer, ExtentStatus};

use crate::session::Extent;

/// What a session has, and what it has done since it was opened.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Statistics {
    /// Bytes of the extents that it has.
    pub bytes: u64,
    /// Extents that it has taken.
    pub allocated: u64,
    /// Extents that it has given back; a section of a larger one that was given back by itself counts as one.
    pub freed: u64,
    /// Bytes read from extents, without those of calls that failed.
    pub read_bytes: u64,
    /// Bytes written to extents, without those of calls that failed.
    pub written_bytes: u64,
    /// Requests to the agent: one for each extent of up to 2 MiB, or section of a larger one, that is taken or given back, and for each piece that is read or written.
    pub requests: u64,
    /// Times that the program slept for an answer, since none came within some 50 µs.
    pub sleeps: u64,
}

impl Statistics {
    pub(crate) fn taken(&mut self, extent: &Extent) {
        self.allocated += 1;
        self.bytes += extent.bytes();
    }

    /// A part of an extent was to be given back: of so many bytes, the first of it or another.
    pub(crate) fn given_back(&mut self, answer: &ExtentAnswer, bytes: u64, is_first: bool) {
        if answer.status == ExtentStatus::Done {
            self.bytes = self.bytes.saturating_sub(bytes);
            self.freed += u64::from(is_first);
        }
    }
}
