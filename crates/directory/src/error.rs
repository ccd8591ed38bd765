//! What can go wrong, in sentences for the person who reads them.

use crate::LeaseId;
use crate::model::limits;

/// A limit that a call may run into.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Bound {
    /// Length of a key or prefix.
    KeyBytes,
    /// Length of a value.
    ValueBytes,
    /// Entries of a listing.
    ListEntries,
    /// Bytes of a listing.
    ListBytes,
    /// Compares and operations of a transaction.
    TransactionParts,
    /// Bytes of a transaction.
    TransactionBytes,
    /// Keys in the directory.
    Keys,
    /// Bytes in the directory.
    StoreBytes,
    /// Leases in the directory.
    Leases,
    /// A lease's life, at least.
    TtlMin,
    /// A lease's life, at most.
    TtlMax,
}

impl Bound {
    /// All of them, in the order of their numbers on the wire.
    pub(crate) const ALL: [Self; 11] = [
        Self::KeyBytes,
        Self::ValueBytes,
        Self::ListEntries,
        Self::ListBytes,
        Self::TransactionParts,
        Self::TransactionBytes,
        Self::Keys,
        Self::StoreBytes,
        Self::Leases,
        Self::TtlMin,
        Self::TtlMax,
    ];

    fn sentence(self) -> String {
        match self {
            Self::KeyBytes => format!("a key has at most {} bytes", limits::KEY_BYTES_MAX),
            Self::ValueBytes => format!("a value has at most {} bytes", limits::VALUE_BYTES_MAX),
            Self::ListEntries => {
                format!(
                    "a listing has at most {} entries; ask for a narrower prefix",
                    limits::LIST_ENTRIES_MAX
                )
            }
            Self::ListBytes => {
                format!("a listing has at most {} bytes; ask for a narrower prefix", limits::LIST_BYTES_MAX)
            }
            Self::TransactionParts => {
                format!("a transaction has at most {} compares and operations", limits::TRANSACTION_PARTS_MAX)
            }
            Self::TransactionBytes => {
                format!("a transaction has at most {} bytes", limits::TRANSACTION_BYTES_MAX)
            }
            Self::Keys => format!("the directory holds at most {} keys; delete some", limits::KEYS_MAX),
            Self::StoreBytes => {
                format!("the directory holds at most {} bytes; delete some", limits::STORE_BYTES_MAX)
            }
            Self::Leases => {
                format!("the directory grants at most {} leases; revoke some", limits::LEASES_MAX)
            }
            Self::TtlMin => format!("a lease lives at least {} ms", limits::TTL_MIN.as_millis()),
            Self::TtlMax => format!("a lease lives at most {} ms", limits::TTL_MAX.as_millis()),
        }
    }
}

/// Why the directory did not do what was asked.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum DirectoryError {
    /// It cannot be reached, or the connection ended before the answer.
    #[error("the directory at {address} cannot be reached: {cause}; is the cluster up?")]
    Unavailable {
        /// Where it is.
        address: String,
        /// What happened.
        cause: String,
    },
    /// It was reached and will not serve this caller.
    #[error("the directory at {address} refused the connection: {why}")]
    Refused {
        /// Where it is.
        address: String,
        /// The reason.
        why: String,
    },
    /// The lease ended.
    #[error("lease {0} is gone: it expired or was revoked; ask for a new one")]
    LeaseGone(LeaseId),
    /// The changes that a watcher asks for are no longer kept.
    #[error("changes are kept from revision {oldest} on, not from {asked}: list again and watch from there")]
    Compacted {
        /// The revision from which changes were asked.
        asked: u64,
        /// The oldest revision whose changes are all kept.
        oldest: u64,
    },
    /// A limit was reached.
    #[error("{got} is out of bounds: {}", bound.sentence())]
    Limit {
        /// Which.
        bound: Bound,
        /// What was asked for.
        got: u64,
    },
    /// The key cannot be one.
    #[error("{key:?} cannot be a key: {why}")]
    InvalidKey {
        /// The key.
        key: String,
        /// The reason.
        why: String,
    },
    /// A transaction changes a key twice.
    #[error("the transaction changes \"{key}\" twice; let one operation say what it shall be")]
    ChangedTwice {
        /// The key.
        key: String,
    },
    /// The file is not a directory of this version.
    #[error("{path} cannot be used as a directory: {why}")]
    Format {
        /// The file.
        path: String,
        /// What is wrong with it, and what to do.
        why: String,
    },
    /// The file could not be read or written.
    #[error("the directory's file {path} failed: {cause}")]
    Storage {
        /// The file.
        path: String,
        /// What the system said.
        cause: String,
    },
    /// The peer does not keep to the protocol.
    #[error("the directory's answer makes no sense: {why}; are both programs of one version?")]
    Protocol {
        /// What it did.
        why: String,
    },
    /// The name is taken.
    #[error("\"{key}\" is taken by another that is alive; stop it, or choose another name")]
    Taken {
        /// The key.
        key: String,
    },
}
