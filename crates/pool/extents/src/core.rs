//! The core of a session, without system calls, clock, threads or random numbers.
//!
//! The agent and `model_tests` drive the same [`SessionCore`], each with its own [`ExtentPool`].

mod account;
mod allocate;
mod session;
mod stock;

use std::time::Duration;

use aquifer_ipc::ring::{RingStatus, TransferRange};
use aquifer_pool::{Extent, NodeId, OperationGuard, SizeClass, Stretch};

#[cfg(test)]
pub(crate) use account::UserAccount;
pub(crate) use account::{SESSIONS_PER_USER_MAX, UserAccounts};
pub(crate) use session::SessionCore;

/// Bytes to copy between an extent and the ring's data area.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Transfer {
    pub extent: Extent,
    pub range: TransferRange,
    pub is_write: bool,
}

/// The interface of a session to the pool and the clock.
pub(crate) trait ExtentPool {
    /// Marks an allocation as in progress until the result is dropped.
    ///
    /// Must be held from before an extent is allocated until it is in the book, so that the leak
    /// scan does not free the extent in between.
    fn begin_allocation(&self) -> Option<OperationGuard>;

    /// Allocates an extent.
    fn allocate(&mut self, class: SizeClass) -> Result<Extent, RingStatus>;

    /// Allocates up to `count` extents of one node, at least one.
    fn allocate_many(&mut self, class: SizeClass, count: u32) -> Result<Vec<Extent>, RingStatus>;

    /// Allocates this number of neighbouring sections.
    fn allocate_stretch(&mut self, sections: u32) -> Result<Stretch, RingStatus>;

    /// A number that changes with each freed section that a node clears; `None` if no node will
    /// have room for a stretch of `sections` when all is cleared.
    fn clearing_progress(&self, sections: u32) -> Option<u64>;

    /// The log record in the extent's control word, for [`Self::resume_free`].
    fn last_record(&self, extent: Extent) -> u32;

    /// Frees extents. For each returns whether it is freed or lost with its node; false if the node
    /// cannot be reached at present.
    fn free(&mut self, extents: &[Extent]) -> Vec<bool>;

    /// Completes the free of an extent whose control word had this record when the free began.
    /// Returns whether the extent is freed, or lost with its node, as [`Self::free`] does.
    fn resume_free(&mut self, extent: Extent, record: u32) -> bool;

    /// Whether there is a connection to the node.
    fn is_connected(&self, node: NodeId) -> bool;

    /// Carries out transfers, those of one node in order. Returns the result of each.
    fn transfer(&mut self, transfers: &[Transfer]) -> Vec<RingStatus>;

    /// Nodes whose connection has broken since the last call. Operations that were in flight may
    /// still take effect there.
    fn drain_lost_nodes(&mut self) -> Vec<NodeId>;

    /// The quota of the session's user.
    fn quota_bytes(&self) -> u64;

    /// Whether `bytes` can be allocated without what is left free for other users.
    fn has_room(&mut self, bytes: u64) -> bool;

    /// Time since the agent started.
    fn now(&self) -> Duration;

    /// Waits for this time.
    fn pause(&mut self, time: Duration);
}
