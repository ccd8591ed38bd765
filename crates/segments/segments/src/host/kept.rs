//! The lease of the host, and the segments that an earlier process of the agent has left.

use std::fmt::Debug;
use std::os::fd::OwnedFd;

use super::SegmentKey;

/// The lease of the host.
pub trait HostLease: Debug + Send + Sync {
    /// Whether the lease has certainly not ended.
    fn lasts(&self) -> bool;
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
