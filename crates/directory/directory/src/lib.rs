//! The directory: a small, strongly consistent store with leases, transactions and watches.
//!
//! The directory records the live nodes and hosts, and their addresses.
//! A user holds an `Arc<dyn Directory>`, and does not depend on the implementation:
//!
//! - [`embedded`]: a redb file, in process or behind a Unix socket.
//! - [`sim`]: in memory, with virtual time and injected faults.
//! - `aquifer-directory-etcd`: a real etcd, for a cluster of machines.
//!
//! All implementations have the same semantics, and pass one conformance suite.
//! The terms are etcd's: a revision counts the changes of the whole directory, and the version of
//! a key is the revision of its last change.
//!
//! A change is durable before it is acknowledged, so the directory is slow, and no data path may
//! wait for it.

#![forbid(unsafe_code)]

pub mod clock;
pub mod core;
pub mod embedded;
mod engine;
mod error;
mod failure_log;
#[cfg(test)]
mod golden_tests;
mod model;
mod mutation;
pub mod names;
mod retry;
pub mod sim;

use std::fmt::Debug;
use std::time::Duration;

pub use core::check;
pub use error::{DirectoryError, LimitKind};
pub use failure_log::FailureLog;
pub use model::{
    Compare, DirectoryEntry, KeyOperation, Lease, LeaseId, Listing, Transaction, TransactionOutcome,
    WatchEvent, WatchEventKind, limits,
};
pub use mutation::Mutation;
pub use retry::{ConnectDirectory, DirectoryRetries};

/// A store of the cluster's metadata.
///
/// Calls may come from any thread, and block until they are answered.
///
/// After [`DirectoryError::Unavailable`], [`DirectoryError::Storage`] or
/// [`DirectoryError::Protocol`] the change may or may not have been made: the answer was lost, the
/// change was perhaps not stored, or the answer was not understood.
/// A caller that must know reads the directory again.
/// After any other error the change was not made.
pub trait Directory: Send + Sync + Debug {
    /// The entry of a key; `None` if the key is absent.
    ///
    /// # Errors
    /// [`DirectoryError::InvalidKey`], a limit, or [`DirectoryError::Unavailable`].
    fn get(&self, key: &str) -> Result<Option<DirectoryEntry>, DirectoryError>;

    /// All entries whose keys begin with `prefix`, in the order of their keys, at one revision.
    ///
    /// The empty prefix lists all entries.
    /// `watch(prefix, listing.revision + 1)` continues without a gap.
    ///
    /// # Errors
    /// [`DirectoryError::Limit`] for more than [`limits::LIST_ENTRIES_MAX`] entries or
    /// [`limits::LIST_BYTES_MAX`] bytes: use a narrower prefix.
    fn list(&self, prefix: &str) -> Result<Listing, DirectoryError>;

    /// Applies all operations if every compare holds, else none.
    ///
    /// A compare that does not hold is no error, but [`TransactionOutcome::Conflict`].
    ///
    /// # Errors
    /// A limit, [`DirectoryError::ChangedTwice`], or [`DirectoryError::LeaseGone`].
    fn transaction(&self, transaction: &Transaction) -> Result<TransactionOutcome, DirectoryError>;

    /// Grants a lease that ends `ttl` after the last keep-alive.
    ///
    /// The lease's epoch is greater than that of every lease granted before, also across restarts.
    ///
    /// # Errors
    /// [`DirectoryError::Limit`] for a `ttl` outside [`limits::TTL_MIN`]..=[`limits::TTL_MAX`], or
    /// for too many leases.
    fn lease_grant(&self, ttl: Duration) -> Result<Lease, DirectoryError>;

    /// Restarts the lease's time to live.
    ///
    /// # Errors
    /// [`DirectoryError::LeaseGone`] if the lease has ended; its keys are deleted then.
    fn lease_keep_alive(&self, id: LeaseId) -> Result<(), DirectoryError>;

    /// Ends the lease now, and deletes every key attached to it.
    ///
    /// # Errors
    /// [`DirectoryError::LeaseGone`] if the lease had already ended.
    fn lease_revoke(&self, id: LeaseId) -> Result<(), DirectoryError>;

    /// Opens a watch on the keys that begin with `prefix`.
    ///
    /// It reports all changes from `from_revision` on; 0 stands for the changes that are made
    /// after this call returns.
    ///
    /// # Errors
    /// [`DirectoryError::Compacted`] if changes of `from_revision` are no longer kept.
    fn watch(&self, prefix: &str, from_revision: u64) -> Result<Box<dyn Watch>, DirectoryError>;

    /// Sets a key, attached to `lease` if there is one, and returns the new revision.
    ///
    /// # Errors
    /// The errors of [`Directory::transaction`].
    fn put(&self, key: &str, value: &[u8], lease: Option<LeaseId>) -> Result<u64, DirectoryError> {
        let operation = KeyOperation::Put { key: key.to_owned(), value: value.to_vec(), lease };
        self.transaction(&Transaction { compares: Vec::new(), operations: vec![operation] })?.unconditional()
    }

    /// Deletes a key if it exists, and returns the directory's revision afterwards.
    ///
    /// # Errors
    /// The errors of [`Directory::transaction`].
    fn delete(&self, key: &str) -> Result<u64, DirectoryError> {
        let operation = KeyOperation::Delete { key: key.to_owned() };
        self.transaction(&Transaction { compares: Vec::new(), operations: vec![operation] })?.unconditional()
    }
}

/// A stream of changes, complete and in the order in which they were made.
pub trait Watch: Send + Debug {
    /// The next change; `None` if there was none within `timeout`.
    ///
    /// A watch that has failed reports nothing more.
    /// To continue, open a watch from the revision of the last event received.
    /// It repeats the events of that revision, because all changes of a transaction share one.
    ///
    /// # Errors
    /// [`DirectoryError::Compacted`] if the next changes are no longer kept: list again, then
    /// watch from there.
    fn next(&mut self, timeout: Duration) -> Result<Option<WatchEvent>, DirectoryError>;
}
