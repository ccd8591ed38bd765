//! Why a volume did not do what it was asked to.

use std::time::Duration;

use aquifer_pager::FetchError;

/// Why a volume did not do what it was asked to.
#[derive(Debug, thiserror::Error)]
pub enum BlockError {
    /// Outside.
    #[error("bytes {offset} to {offset} + {len} are not all within the volume's {bytes}")]
    OutOfRange {
        /// The first byte.
        offset: u64,
        /// How many.
        len: usize,
        /// The volume's size.
        bytes: u64,
    },
    /// The only copy of a page is gone.
    #[error("the page at byte {offset} of the volume cannot be read back: {cause}")]
    Lost {
        /// Where the page begins.
        offset: u64,
        /// Why.
        cause: FetchError,
    },
    /// It had been lost before.
    #[error("the page at byte {offset} of the volume is lost")]
    StillLost {
        /// Where the page begins.
        offset: u64,
    },
    /// Memory nodes take nothing any more.
    #[error("a write found no room for {waited_s} s: {reason}", waited_s = waited.as_secs())]
    NoRoom {
        /// For how long.
        waited: Duration,
        /// What the pool said last.
        reason: String,
    },
    /// The volume has ended.
    #[error("the volume has ended")]
    Closed,
}
