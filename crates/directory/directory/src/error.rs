//! The errors of the directory.

use crate::LeaseId;
use crate::model::limits;

/// A limit of the directory; [`limits`] has the values.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum LimitKind {
    /// Bytes of a key or prefix.
    KeyBytes,
    /// Bytes of a value.
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
    /// Shortest time to live of a lease.
    TtlMin,
    /// Longest time to live of a lease.
    TtlMax,
}

impl LimitKind {
    /// All limits, in the order of their numbers in the protocol.
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

    fn description(self) -> String {
        match self {
            Self::KeyBytes => format!("a key has at most {} bytes", limits::KEY_BYTES_MAX),
            Self::ValueBytes => format!("a value has at most {} bytes", limits::VALUE_BYTES_MAX),
            Self::ListEntries => {
                format!(
                    "a listing has at most {} entries; request a narrower prefix",
                    limits::LIST_ENTRIES_MAX
                )
            }
            Self::ListBytes => {
                format!("a listing has at most {} bytes; request a narrower prefix", limits::LIST_BYTES_MAX)
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
            Self::TtlMin => format!("a lease lasts at least {} ms", limits::TTL_MIN.as_millis()),
            Self::TtlMax => format!("a lease lasts at most {} ms", limits::TTL_MAX.as_millis()),
        }
    }
}

/// Why a call of the directory failed.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum DirectoryError {
    /// The directory cannot be reached, or the connection broke before the answer.
    ///
    /// The change may or may not have been made.
    #[error("the directory at {address} cannot be reached: {cause}; check that it runs")]
    Unavailable {
        /// The directory's address.
        address: String,
        /// The cause.
        cause: String,
    },
    /// The directory refuses to serve this process.
    #[error("the directory at {address} refused the connection: {why}")]
    Refused {
        /// The directory's address.
        address: String,
        /// The reason.
        why: String,
    },
    /// The lease has ended.
    #[error("lease {0} is gone: it expired or was revoked; request a new one")]
    LeaseGone(LeaseId),
    /// The changes from which a watch is to start are no longer kept.
    #[error("changes are kept from revision {oldest}, not from {asked}: list again and watch from there")]
    Compacted {
        /// The requested first revision.
        asked: u64,
        /// The oldest revision whose changes are all kept.
        oldest: u64,
    },
    /// A value is over a limit, or below one.
    #[error("{got} is not within the limits: {}", kind.description())]
    Limit {
        /// The limit.
        kind: LimitKind,
        /// The value.
        got: u64,
    },
    /// The text is not a valid key.
    #[error("{key:?} is not a valid key: {why}")]
    InvalidKey {
        /// The key.
        key: String,
        /// The reason.
        why: String,
    },
    /// A transaction changes a key twice.
    #[error("the transaction changes \"{key}\" twice; use one operation for each key")]
    ChangedTwice {
        /// The key.
        key: String,
    },
    /// The file is damaged, of another version, or of another program.
    #[error("{path} cannot be used as a directory: {why}")]
    Format {
        /// The file.
        path: String,
        /// The reason, and what to do.
        why: String,
    },
    /// The file could not be read or written, or etcd has no space.
    ///
    /// The change may or may not have been made.
    #[error("the directory's file {path} failed: {cause}")]
    Storage {
        /// The file.
        path: String,
        /// The cause.
        cause: String,
    },
    /// The peer violates the protocol, or a value is not a valid record.
    ///
    /// The change may or may not have been made.
    #[error("protocol error of the directory: {why}; check that all programs have the same version")]
    Protocol {
        /// The violation.
        why: String,
    },
    /// Another process holds the key.
    #[error("\"{key}\" is held by another process; stop that process, or choose another number")]
    Taken {
        /// The key.
        key: String,
    },
}
