//! Who is alive, who leads, where things are: a small, consistent store of keys with versions,
//! leases that carry a fencing epoch, transactions and watches.
//!
//! Consumers hold an `Arc<dyn Directory>` and know nothing of what stands behind it:
//! [`embedded`] (a redb file, in process or served over a Unix socket), [`sim`] (in memory,
//! virtual time, faults on demand), and in a crate of its own a real etcd, for a cluster of machines. All share the semantics of [`core`] and
//! pass one conformance suite. The words are etcd's: a key's version is the revision of its last
//! change, revisions count the changes of the whole directory.
//!
//! It is never on a data path: every change is made durable before it is acknowledged.

#![forbid(unsafe_code)]

pub mod clock;
pub mod core;
pub mod embedded;
mod engine;
mod error;
#[cfg(test)]
mod golden_tests;
mod model;
pub mod names;
pub mod sim;

use std::fmt::Debug;
use std::time::Duration;

pub use error::{Bound, DirectoryError};
pub use model::{
    Compare, Entry, Event, EventKind, Lease, LeaseId, Listing, Operation, Transaction, TransactionOutcome,
    limits,
};

/// The cluster's metadata. Every call is safe from any thread and blocks until it is answered.
///
/// An [`DirectoryError::Unavailable`] leaves open whether a change was made; all others mean that it was not.
pub trait Directory: Send + Sync + Debug {
    /// The entry at a key, `None` if there is none.
    ///
    /// # Errors
    /// An unfit key; the directory is out of reach.
    fn get(&self, key: &str) -> Result<Option<Entry>, DirectoryError>;

    /// All entries whose key begins with `prefix` (empty: all), in the order of their keys, as they
    /// were at one revision. `watch(prefix, listing.revision + 1)` continues without a gap.
    ///
    /// # Errors
    /// More than [`limits::LIST_ENTRIES_MAX`] entries or [`limits::LIST_BYTES_MAX`] bytes: ask for a narrower prefix.
    fn list(&self, prefix: &str) -> Result<Listing, DirectoryError>;

    /// All or nothing: apply the operations if every compare holds.
    ///
    /// # Errors
    /// A limit; a key that two operations change; a lease that is gone. A compare that does not
    /// hold is no error but [`TransactionOutcome::Conflict`].
    fn transaction(&self, transaction: &Transaction) -> Result<TransactionOutcome, DirectoryError>;

    /// Ask for a lease. Its epoch is greater than that of every lease granted before, over restarts too.
    ///
    /// # Errors
    /// A `ttl` out of [`limits::TTL_MIN`]..=[`limits::TTL_MAX`]; too many leases.
    fn lease_grant(&self, ttl: Duration) -> Result<Lease, DirectoryError>;

    /// Begin the lease's time anew.
    ///
    /// # Errors
    /// [`DirectoryError::LeaseGone`] if it ended: whatever was done under it is over.
    fn lease_keep_alive(&self, id: LeaseId) -> Result<(), DirectoryError>;

    /// End the lease now, and with it every key attached to it.
    ///
    /// # Errors
    /// [`DirectoryError::LeaseGone`] if it had ended already.
    fn lease_revoke(&self, id: LeaseId) -> Result<(), DirectoryError>;

    /// Watch the keys that begin with `prefix`: all changes with a revision of at least
    /// `from_revision`; 0 means those made after this call returns.
    ///
    /// # Errors
    /// [`DirectoryError::Compacted`] if changes since then are no longer kept.
    fn watch(&self, prefix: &str, from_revision: u64) -> Result<Box<dyn Watch>, DirectoryError>;

    /// Set a key, attached to `lease` or to none, and return the new revision.
    ///
    /// # Errors
    /// As [`Directory::transaction`].
    fn put(&self, key: &str, value: &[u8], lease: Option<LeaseId>) -> Result<u64, DirectoryError> {
        let operation = Operation::Put { key: key.to_owned(), value: value.to_vec(), lease };
        self.transaction(&Transaction { compares: Vec::new(), operations: vec![operation] })?.unconditional()
    }

    /// Delete a key if it is there. Returns the directory's revision after that.
    ///
    /// # Errors
    /// As [`Directory::transaction`].
    fn delete(&self, key: &str) -> Result<u64, DirectoryError> {
        let operation = Operation::Delete { key: key.to_owned() };
        self.transaction(&Transaction { compares: Vec::new(), operations: vec![operation] })?.unconditional()
    }
}

/// A stream of changes in the order in which they were made, none skipped.
pub trait Watch: Send + Debug {
    /// The next change, or `None` if there was none for `timeout`.
    ///
    /// A watch that failed is over. To go on, open a new one from the revision of the last event
    /// received: those of that revision come again (a transaction's changes share one), none is missed.
    ///
    /// # Errors
    /// [`DirectoryError::Compacted`] if this watcher fell so far behind that changes are no longer
    /// kept: list again, then watch from there.
    fn next(&mut self, timeout: Duration) -> Result<Option<Event>, DirectoryError>;
}
