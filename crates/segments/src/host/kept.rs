//! The keeper, which holds the memory of segments for the next process of the agent.

use std::fmt::Debug;
use std::os::fd::{BorrowedFd, OwnedFd};

use super::SegmentKey;

/// Holds the memory of segments.
pub trait SegmentKeeper: Debug + Send + Sync {
    /// Holds the bytes of a segment, and its pages and journal, under a number that is free.
    ///
    /// # Errors
    /// Why it refuses.
    fn hold(&self, number: u64, segment: SegmentKey, fds: [BorrowedFd<'_>; 2]) -> Result<(), String>;

    /// Gives a number up.
    fn release(&self, number: u64);

    /// Whether the host's lease lasts for sure.
    fn is_member(&self) -> bool;
}

/// What an earlier process of the agent has left of a segment.
#[derive(Debug)]
pub struct KeptSegment {
    /// The number under which it is held.
    pub number: u64,
    /// Which.
    pub segment: SegmentKey,
    /// Its bytes.
    pub data: OwnedFd,
    /// Its pages and its journal.
    pub present: OwnedFd,
}

/// Segments end with this process.
#[derive(Clone, Copy, Debug)]
pub struct NoKeeper;

impl SegmentKeeper for NoKeeper {
    fn hold(&self, _number: u64, _segment: SegmentKey, _fds: [BorrowedFd<'_>; 2]) -> Result<(), String> {
        Ok(())
    }

    fn release(&self, _number: u64) {}

    fn is_member(&self) -> bool {
        true
    }
}
