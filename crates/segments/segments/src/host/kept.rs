//! Interfaces that the agent provides: the lease of the host, and the segments that an earlier
//! process of the agent has left with the keeper.

use std::fmt::Debug;
use std::os::fd::OwnedFd;

use super::SegmentKey;

/// The lease of the host.
pub trait HostLease: Debug + Send + Sync {
    /// Whether the lease is known to be valid.
    fn lasts(&self) -> bool;
}

/// The memory of a segment that an earlier process of the agent has left with the keeper.
#[derive(Debug)]
pub struct KeptSegment {
    /// The keeper's item number.
    pub number: u64,
    /// The segment.
    pub segment: SegmentKey,
    /// The memory with the segment's bytes.
    pub data: OwnedFd,
    /// The memory with the presence bits and the journal.
    pub present: OwnedFd,
}
