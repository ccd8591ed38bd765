//! The words of the interface: entries, leases, transactions, events, and their limits.

use crate::DirectoryError;

/// Every limit of the directory. At a limit a call gets [`crate::DirectoryError::Limit`] and changes nothing.
pub mod limits {
    use std::time::Duration;

    /// Longest key or prefix, in bytes.
    pub const KEY_BYTES_MAX: usize = 256;
    /// Longest value, in bytes.
    pub const VALUE_BYTES_MAX: usize = 64 << 10;
    /// Most entries in one listing.
    pub const LIST_ENTRIES_MAX: usize = 4096;
    /// Most bytes of keys and values in one listing.
    pub const LIST_BYTES_MAX: usize = 768 << 10;
    /// Most compares and operations together in one transaction (etcd's limit too).
    pub const TRANSACTION_PARTS_MAX: usize = 128;
    /// Most bytes of keys and values in one transaction.
    pub const TRANSACTION_BYTES_MAX: usize = 512 << 10;
    /// Most keys in the directory.
    pub const KEYS_MAX: usize = 65_536;
    /// Most bytes of keys and values in the directory.
    pub const STORE_BYTES_MAX: usize = 64 << 20;
    /// Most leases at a time.
    pub const LEASES_MAX: usize = 8192;
    /// Shortest life of a lease.
    pub const TTL_MIN: Duration = Duration::from_millis(100);
    /// Longest life of a lease.
    pub const TTL_MAX: Duration = Duration::from_secs(3600);
    /// Most past changes kept for watchers.
    pub const HISTORY_EVENTS_MAX: usize = 16_384;
    /// Most bytes of past changes kept for watchers.
    pub const HISTORY_BYTES_MAX: usize = 16 << 20;
}

/// A lease's name.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct LeaseId(pub u64);

impl std::fmt::Display for LeaseId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// A lease as it was granted.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Lease {
    /// Its name.
    pub id: LeaseId,
    /// Fencing epoch: greater than that of every lease granted before.
    pub epoch: u64,
}

/// A key and what it holds.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Entry {
    /// The key.
    pub key: String,
    /// The value.
    pub value: Vec<u8>,
    /// Revision of its last change. Never 0: in a [`Compare`] that stands for an absent key.
    pub version: u64,
    /// The lease it ends with.
    pub lease: Option<LeaseId>,
}

/// The entries under a prefix, at one revision.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Listing {
    /// The directory's revision when the list was made.
    pub revision: u64,
    /// In the order of their keys.
    pub entries: Vec<Entry>,
}

/// A condition of a transaction: the key is at this version.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Compare {
    /// The key.
    pub key: String,
    /// The version it must have; 0 = it must be absent.
    pub version: u64,
}

impl Compare {
    /// The key must be absent.
    #[must_use]
    pub fn absent(key: impl Into<String>) -> Self {
        Self { key: key.into(), version: 0 }
    }

    /// The key must be at this version.
    #[must_use]
    pub fn version(key: impl Into<String>, version: u64) -> Self {
        Self { key: key.into(), version }
    }
}

/// A change that a transaction makes.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Operation {
    /// Set a key.
    Put {
        /// The key.
        key: String,
        /// Its new value.
        value: Vec<u8>,
        /// The lease that it is attached to from now on.
        lease: Option<LeaseId>,
    },
    /// Delete a key; nothing happens if it is absent.
    Delete {
        /// The key.
        key: String,
    },
}

impl Operation {
    /// Set a key.
    #[must_use]
    pub fn put(key: impl Into<String>, value: impl Into<Vec<u8>>, lease: Option<LeaseId>) -> Self {
        Self::Put { key: key.into(), value: value.into(), lease }
    }

    /// Delete a key.
    #[must_use]
    pub fn delete(key: impl Into<String>) -> Self {
        Self::Delete { key: key.into() }
    }

    /// The key that it changes.
    #[must_use]
    pub fn key(&self) -> &str {
        match self {
            Self::Put { key, .. } | Self::Delete { key } => key,
        }
    }
}

/// Operations that happen all or not at all, if all compares hold.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Transaction {
    /// What must hold.
    pub compares: Vec<Compare>,
    /// What is done then. No two may change the same key.
    pub operations: Vec<Operation>,
}

/// What became of a transaction.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum TransactionOutcome {
    /// Done; all its changes have this revision. One that changed nothing returns the revision as it is.
    Committed {
        /// The directory's revision.
        revision: u64,
    },
    /// A compare did not hold and nothing was done.
    Conflict {
        /// Key of the first compare that did not hold.
        key: String,
        /// The version that this key has; 0 = it is absent.
        version: u64,
    },
}

impl TransactionOutcome {
    /// Whether it was done.
    #[must_use]
    pub fn is_committed(&self) -> bool {
        matches!(self, Self::Committed { .. })
    }

    /// The revision of a transaction that compared nothing.
    pub(crate) fn unconditional(self) -> Result<u64, DirectoryError> {
        match self {
            Self::Committed { revision } => Ok(revision),
            Self::Conflict { key, .. } => Err(DirectoryError::Protocol {
                why: format!("it reports a conflict on \"{key}\", which was not compared"),
            }),
        }
    }
}

/// What happened to a key.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum EventKind {
    /// It was set.
    Put {
        /// The value.
        value: Vec<u8>,
        /// The lease that it is attached to.
        lease: Option<LeaseId>,
    },
    /// It was deleted, or its lease ended.
    Delete,
}

/// A change.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Event {
    /// The revision of the change.
    pub revision: u64,
    /// The key.
    pub key: String,
    /// What happened to it.
    pub kind: EventKind,
}
