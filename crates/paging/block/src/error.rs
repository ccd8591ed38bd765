//! Errors of a block volume.

use std::time::Duration;

use aquifer_pager::FetchError;

/// Why a volume could not do what was requested.
#[derive(Debug, thiserror::Error)]
pub enum BlockError {
    /// The range is not inside the volume.
    #[error("bytes {offset} to {offset} + {len} are not inside the volume of {bytes} bytes")]
    OutOfRange {
        /// The first byte.
        offset: u64,
        /// The number of bytes.
        len: usize,
        /// The size of the volume.
        bytes: u64,
    },
    /// The last readable replica of a page is gone.
    #[error("the page at byte {offset} of the volume cannot be read back: {cause}")]
    Lost {
        /// The first byte of the page.
        offset: u64,
        /// Why the page could not be read.
        cause: FetchError,
    },
    /// The page was lost before.
    #[error("the page at byte {offset} of the volume is lost")]
    StillLost {
        /// The first byte of the page.
        offset: u64,
    },
    /// No room for a write within the timeout of the volume.
    #[error("a write found no room for {waited_s} s: {reason}", waited_s = waited.as_secs())]
    NoRoom {
        /// The time for which the write waited.
        waited: Duration,
        /// The last error of the pool.
        reason: String,
    },
    /// The volume is closed.
    #[error("the volume is closed")]
    Closed,
}
