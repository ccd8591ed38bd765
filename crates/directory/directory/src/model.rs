//! The data types of the interface, and their limits.

use crate::DirectoryError;

/// The limits of the directory.
///
/// A call over a limit returns [`crate::DirectoryError::Limit`] and changes nothing.
pub mod limits {
    use std::time::Duration;

    /// Most bytes of a key or prefix.
    pub const KEY_BYTES_MAX: usize = 256;
    /// Most bytes of a value.
    pub const VALUE_BYTES_MAX: usize = 64 << 10;
    /// Most entries of a listing.
    pub const LIST_ENTRIES_MAX: usize = 4096;
    /// Most bytes of keys and values in a listing.
    pub const LIST_BYTES_MAX: usize = 768 << 10;
    /// Most compares and operations together in a transaction; etcd has the same limit.
    pub const TRANSACTION_PARTS_MAX: usize = 128;
    /// Most bytes of keys and values in a transaction.
    pub const TRANSACTION_BYTES_MAX: usize = 512 << 10;
    /// Most keys in the directory.
    pub const KEYS_MAX: usize = 65_536;
    /// Most bytes of keys and values in the directory.
    pub const STORE_BYTES_MAX: usize = 64 << 20;
    /// Most leases at a time.
    pub const LEASES_MAX: usize = 8192;
    /// Shortest time to live of a lease.
    pub const TTL_MIN: Duration = Duration::from_millis(100);
    /// Longest time to live of a lease.
    pub const TTL_MAX: Duration = Duration::from_secs(3600);
    /// Most past changes kept for watches.
    pub const HISTORY_EVENTS_MAX: usize = 16_384;
    /// Most bytes of past changes kept for watches.
    pub const HISTORY_BYTES_MAX: usize = 16 << 20;
}

/// The number of a lease.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct LeaseId(pub u64);

impl std::fmt::Display for LeaseId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// A lease that was granted.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Lease {
    /// The lease's number.
    pub id: LeaseId,
    /// Fencing epoch: greater than that of every lease granted before.
    pub epoch: u64,
}

/// A key with its value, version and lease.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DirectoryEntry {
    /// The key.
    pub key: String,
    /// The value.
    pub value: Vec<u8>,
    /// Revision of the key's last change. Never 0, which stands for an absent key in a [`Compare`].
    pub version: u64,
    /// The lease with whose end the key is deleted.
    pub lease: Option<LeaseId>,
}

/// The entries under a prefix, at one revision.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Listing {
    /// The directory's revision at the time of the listing.
    pub revision: u64,
    /// The entries, in the order of their keys.
    pub entries: Vec<DirectoryEntry>,
}

/// A condition of a transaction: the key has this version.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Compare {
    /// The key.
    pub key: String,
    /// The version that the key must have; 0 if the key must be absent.
    pub version: u64,
}

impl Compare {
    /// Creates the condition that the key is absent.
    #[must_use]
    pub fn absent(key: impl Into<String>) -> Self {
        Self { key: key.into(), version: 0 }
    }

    /// Creates the condition that the key has this version.
    #[must_use]
    pub fn version(key: impl Into<String>, version: u64) -> Self {
        Self { key: key.into(), version }
    }
}

/// A change that a transaction makes to one key.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum KeyOperation {
    /// Sets the key.
    Put {
        /// The key.
        key: String,
        /// The new value.
        value: Vec<u8>,
        /// The lease that the key is attached to from now on.
        lease: Option<LeaseId>,
    },
    /// Deletes the key; no effect if the key is absent.
    Delete {
        /// The key.
        key: String,
    },
}

impl KeyOperation {
    /// Creates an operation that sets a key.
    #[must_use]
    pub fn put(key: impl Into<String>, value: impl Into<Vec<u8>>, lease: Option<LeaseId>) -> Self {
        Self::Put { key: key.into(), value: value.into(), lease }
    }

    /// Creates an operation that deletes a key.
    #[must_use]
    pub fn delete(key: impl Into<String>) -> Self {
        Self::Delete { key: key.into() }
    }

    /// The key that the operation changes.
    #[must_use]
    pub fn key(&self) -> &str {
        match self {
            Self::Put { key, .. } | Self::Delete { key } => key,
        }
    }
}

/// Operations that are applied all or not at all, if all compares hold.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Transaction {
    /// The conditions.
    pub compares: Vec<Compare>,
    /// The changes. No two may change the same key.
    pub operations: Vec<KeyOperation>,
}

/// The result of a transaction.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum TransactionOutcome {
    /// All operations were applied.
    Committed {
        /// The revision of all changes; the directory's present revision if nothing changed.
        revision: u64,
    },
    /// A compare did not hold, and no operation was applied.
    Conflict {
        /// Key of the first compare that did not hold.
        key: String,
        /// The version that this key has; 0 if the key is absent.
        version: u64,
    },
}

impl TransactionOutcome {
    /// Whether the operations were applied.
    #[must_use]
    pub fn is_committed(&self) -> bool {
        matches!(self, Self::Committed { .. })
    }

    /// The revision of a transaction without compares, in which a conflict is an error.
    pub(crate) fn unconditional(self) -> Result<u64, DirectoryError> {
        match self {
            Self::Committed { revision } => Ok(revision),
            Self::Conflict { key, .. } => Err(DirectoryError::Protocol {
                why: format!("a conflict on \"{key}\", which was not compared"),
            }),
        }
    }
}

/// The kind of a change of a key.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum WatchEventKind {
    /// The key was set.
    Put {
        /// The value.
        value: Vec<u8>,
        /// The lease that the key is attached to.
        lease: Option<LeaseId>,
    },
    /// The key was deleted, or its lease ended.
    Delete,
}

/// A change of a key, as a watch reports it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct WatchEvent {
    /// The revision of the change.
    pub revision: u64,
    /// The key.
    pub key: String,
    /// The kind of the change.
    pub kind: WatchEventKind,
}
