//! The errors of a host's segments.

use aquifer_channel::HoldRefused;
use aquifer_channel::descriptor_shares::ShareExceeded;
use aquifer_directory::DirectoryError;
use aquifer_fabric::TargetError;

use super::SegmentKey;
use super::ranges::SEGMENTS_MAX;
use crate::pulling::lineage::LINKS_MAX;

/// Maximum length of the name of a process, in bytes.
pub(super) const PROCESS_NAME_MAX: usize = 64;

/// The reason why a call failed. Its text is the answer to the program.
#[derive(Debug, thiserror::Error)]
pub enum SegmentError {
    /// A segment with this key exists.
    #[error("segment {0} exists already")]
    Exists(SegmentKey),
    /// A lost segment with this key has copies.
    #[error(
        "segment {0} has copies on memory nodes, and no process: restore it, or free it with «aquifer \
         segment free»"
    )]
    HasCopies(SegmentKey),
    /// The segment has no copies.
    #[error("segment {0} has no copies: its owner has never synced it")]
    NoCopies(SegmentKey),
    /// The process has not begun to restore the segment.
    #[error("segment {0} is not being restored: the agent was restarted meanwhile")]
    NotRestoring(SegmentKey),
    /// The record of the copies was changed since the caller read it.
    #[error("the copies of segment {0} were changed by another process meanwhile: try again")]
    CopiesChanged(SegmentKey),
    /// The record of the copies is not valid.
    #[error("the record of the copies of segment {0} is not valid")]
    CopyRecord(SegmentKey),
    /// The process or the host does not own the segment.
    #[error("segment {0} is not here: it was handed over, or there is none")]
    NotOwned(SegmentKey),
    /// The length is not valid.
    #[error("a segment of {0} bytes is not possible: give whole pages of 4096 bytes")]
    Length(u64),
    /// The name of a process is not valid.
    #[error("{0:?} is no valid name of a process: use 1 to {PROCESS_NAME_MAX} of a-z, A-Z, 0-9 and ._-")]
    Name(String),
    /// Another process has the name.
    #[error("another process of this user has the name {0:?} already: choose another")]
    NameTaken(String),
    /// The tenant has no other process with this name.
    #[error("no other process of this user has the name {0:?}: it must open its segments first")]
    NoProcess(String),
    /// The process is on a host that has no address for segments.
    #[error(
        "process {0:?} is on a host whose agent accepts no segments of other hosts: start that agent with \
         --segment-listen ADDRESS:PORT"
    )]
    Unreachable(String),
    /// The tenant has no addresses left, or the maximum number of segments.
    #[error(
        "this user has no addresses left for segments: at most {SEGMENTS_MAX}, and 4 TiB in all; \
         deallocate some"
    )]
    Full,
    /// The segment is being handed over, or each attempt of a transaction failed because another
    /// host changed the same records.
    #[error("segment {0} is busy: try again")]
    Busy(SegmentKey),
    /// The tenant's segments would exceed the limit.
    #[error(
        "this user's segments on this host would have more than the limit of {limit} bytes: deallocate \
         some, or start the agent with a larger --segment-memory"
    )]
    Limit {
        /// The limit, in bytes.
        limit: u64,
    },
    /// The agent would have to remember too many segments of the tenant.
    #[error("this user has used {max} numbers of segments on this host: reuse those of deallocated segments")]
    TooManyNumbers {
        /// The limit.
        max: usize,
    },
    /// No hand-over is prepared, or the target has declined it.
    #[error(
        "the target does not accept segment {0}: the owner has not called connect before transfer, or the \
         target is away or busy with it"
    )]
    Declined(SegmentKey),
    /// The segment has the maximum number of copies.
    #[error("segment {0} has moved {LINKS_MAX} times before all of it was pulled: pull it first")]
    Scattered(SegmentKey),
    /// The outcome of a hand-over is not known yet.
    #[error("whether segment {0} has arrived is not known yet; the agent checks it in the background")]
    Unknown(SegmentKey),
    /// A page was at a host that has died.
    #[error("page {page} of segment {segment} is lost: the host that had it has died")]
    Lost {
        /// The segment.
        segment: SegmentKey,
        /// The page.
        page: u32,
    },
    /// The range is not inside the segment.
    #[error("{bytes} bytes at {offset} are not inside segment {segment}")]
    Range {
        /// The segment.
        segment: SegmentKey,
        /// The first byte.
        offset: u64,
        /// The number of bytes.
        bytes: u64,
    },
    /// The keeper has refused to hold the segment's memory.
    #[error("the keeper has refused to hold the segment's memory: {0}")]
    Keeper(#[from] HoldRefused),
    /// The segment's process is open or still runs.
    #[error("segment {segment} is in use by process {process:?}: end that first")]
    InUse {
        /// The segment.
        segment: SegmentKey,
        /// The name of the process.
        process: String,
    },
    /// The tenant has used up its share of the agent's descriptors.
    #[error(transparent)]
    Share(#[from] ShareExceeded),
    /// The descriptor of a segment's memory could not be duplicated.
    #[error("cannot duplicate the descriptor of a segment's memory: {0}")]
    Descriptor(std::io::Error),
    /// The faults of a segment cannot be served.
    #[error("cannot serve the faults of a segment: {0}")]
    Thread(std::io::Error),
    /// The directory failed.
    #[error(transparent)]
    Directory(#[from] DirectoryError),
    /// The fabric or the system failed.
    #[error(transparent)]
    Target(#[from] TargetError),
}
