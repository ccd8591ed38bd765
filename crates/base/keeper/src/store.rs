//! The interface by which services store items that must outlive their daemon.

use std::fmt::Debug;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;

use aquifer_channel::HoldRefused;
use aquifer_ipc::{HeldItem, HeldKind};

/// Stores items and their descriptors for the next process of a daemon.
pub trait KeeperStore: Debug + Send + Sync {
    /// Stores an item and copies of its descriptors, in place of the item with the same kind and
    /// number.
    ///
    /// # Errors
    /// If the keeper refuses a new item. An item that replaces another is never refused, and
    /// without a keeper there is no error.
    fn hold(&self, item: &HeldItem, fds: &[BorrowedFd<'_>]) -> Result<(), HoldRefused>;

    /// Stores an item as [`Self::hold`] does, with descriptors that this process uses itself, so
    /// that no copies are made.
    ///
    /// # Errors
    /// Those of [`Self::hold`].
    fn hold_shared(&self, item: &HeldItem, fds: Vec<Arc<OwnedFd>>) -> Result<(), HoldRefused>;

    /// Removes an item.
    fn release(&self, kind: HeldKind, id: u64);
}
