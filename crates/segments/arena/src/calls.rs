//! Calls of a program to its agent about segments, and the answers, as JSON.
//!
//! Format: `docs/formats/segments.md`.

use serde::{Deserialize, Serialize};

use crate::copies::CopyRecord;

/// A call of a program to its agent.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Call {
    /// Registers this process under a name in its tenant. The first call of a connection. When the
    /// connection closes, the process counts as ended.
    Open {
        /// The name.
        process: String,
        /// The segments that the process has from an agent that has ended, and their tenures.
        #[serde(default)]
        held: Vec<(u64, Tenure)>,
    },
    /// Reserves this connection of an open process for [`Call::Receive`] and [`Call::Serve`]. The
    /// first call of a connection.
    Attend {
        /// The name of the process.
        process: String,
    },
    /// Keep-alive: the answer means that the agent runs, so the process may use its segments. A
    /// connection with this call carries no other call.
    #[serde(rename = "pulse")]
    KeepAlive,
    /// Allocates a segment.
    Allocate {
        /// The number of the segment in the tenant.
        id: u64,
        /// The length in bytes: whole pages.
        bytes: u64,
    },
    /// Frees a segment. The process has no access any more.
    Deallocate {
        /// The number of the segment.
        id: u64,
        /// Whether this call is a retry: an agent that has ended did not answer it.
        #[serde(default)]
        is_repeated: bool,
    },
    /// Releases a segment that has copies, and keeps the copies. The process has no access any
    /// more.
    GiveUp {
        /// The number of the segment.
        id: u64,
    },
    /// Prepares a hand-over.
    Connect {
        /// The number of the segment.
        id: u64,
        /// The name of the process that is to receive it.
        process: String,
    },
    /// Cancels [`Call::Connect`] or [`Call::Restore`].
    Abort {
        /// The number of the segment.
        id: u64,
    },
    /// Hands a segment over. The process has no access any more.
    Transfer {
        /// The number of the segment.
        id: u64,
        /// The tenure that ends.
        tenure: Tenure,
        /// Whether this call is a retry: an agent that has ended did not answer it.
        #[serde(default)]
        is_repeated: bool,
    },
    /// Waits for a segment.
    Receive {
        /// The longest wait, in milliseconds.
        timeout_ms: u64,
        /// Whether a request to hand a segment over also ends the wait.
        #[serde(default)]
        requests: bool,
    },
    /// Carries the userfaultfd of the mapping of a segment that was received and is partial. There
    /// is no answer; an agent that cannot serve it closes the connection.
    Serve {
        /// The number of the segment.
        id: u64,
        /// Whether the agent pulls pages on touch and ahead of the program. Otherwise it pulls only
        /// the pages of [`Call::Pull`].
        pulls: bool,
    },
    /// Pulls missing pages.
    Pull {
        /// The number of the segment.
        id: u64,
        /// The first byte, in the segment.
        offset: u64,
        /// The number of bytes.
        bytes: u64,
    },
    /// Pulls all missing pages, so that the segment needs no other host.
    Close {
        /// The number of the segment.
        id: u64,
    },
    /// Discards all missing pages, so that the segment needs no other host.
    Discard {
        /// The number of the segment.
        id: u64,
    },
    /// Lists the next [`LISTED_MAX`] segments of this host that the caller may see, with the totals
    /// of the host. The only call of a connection.
    Report {
        /// The user and the number after which the list begins.
        above: Option<(u32, u64)>,
    },
    /// Lists the copies on memory nodes of the next [`LISTED_MAX`] segments that the caller may
    /// see. The only call of a connection.
    ReportCopies {
        /// The user and the number after which the list begins.
        above: Option<(u32, u64)>,
    },
    /// Requests the owner of a segment to hand it over. The only call of a connection.
    Move {
        /// The user of the segment.
        user: u32,
        /// The number of the segment.
        id: u64,
        /// The name of the process that is to receive it.
        process: String,
    },
    /// Frees a segment whose process has ended. The only call of a connection.
    Free {
        /// The user of the segment.
        user: u32,
        /// The number of the segment.
        id: u64,
    },
    /// Returns the record of a segment's copies, and the nodes that could store copies. The process
    /// owns the segment; or no live host does, then this may be the first call of a connection.
    Copies {
        /// The number of the segment.
        id: u64,
    },
    /// Replaces the record of a segment's copies. Allowed for the segments of [`Call::Copies`]; of
    /// one that no live host owns, the change may only free copies.
    SetCopies {
        /// The number of the segment.
        id: u64,
        /// The revision of the record that is replaced; 0 if there is none.
        revision: u64,
        /// The record, with the next revision; `None` if there are no copies.
        record: Option<CopyRecord>,
    },
    /// Begins to restore a segment from its copies. No live host owns it.
    Restore {
        /// The number of the segment.
        id: u64,
    },
    /// Completes [`Call::Restore`]: the memory has the bytes of the copy. The process owns the
    /// segment from now on.
    Restored {
        /// The number of the segment.
        id: u64,
        /// Whether this call is a retry: an agent that has ended did not answer it.
        #[serde(default)]
        is_repeated: bool,
    },
    /// Lists the next [`LISTED_MAX`] segments of the tenant that processes of this host own.
    List {
        /// The number after which the list begins.
        above: Option<u64>,
    },
}

/// Identifies one period in which a process has a segment. A process that hands a segment over and
/// gets it back begins a new tenure, so a late call of the first one has no effect.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Tenure {
    /// The number of the hand-over by which the host received the segment.
    pub generation: u64,
    /// The number of times that the segment was passed on between processes of that host.
    pub passes: u64,
}

/// Maximum number of segments in one answer.
pub const LISTED_MAX: usize = 128;

/// An answer of the agent to a [`Call`].
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Answer {
    /// The call succeeded.
    Done,
    /// The process is open.
    Opened {
        /// The segments that the process still has, of those that it named.
        held: Vec<u64>,
        /// The segments whose hand-over is in progress: the process must request the outcome.
        awaited: Vec<u64>,
        /// The time for which the process may use segments after the agent has ended, in
        /// milliseconds.
        grace_ms: u64,
    },
    /// The call failed for this reason, and the process still owns the segment.
    Kept(String),
    /// The call failed for this reason, and changed nothing.
    Failed(String),
    /// A segment that the process owns from now on. Carries its descriptor.
    Segment {
        /// The number of the segment.
        id: u64,
        /// The first address.
        address: u64,
        /// The length in bytes.
        bytes: u64,
        /// Whether pages are missing.
        is_partial: bool,
        /// The tenure that begins.
        tenure: Tenure,
    },
    /// The record of a segment's copies. Carries the memory if the process owns the segment.
    Copies {
        /// The record; `None` if there are no copies.
        record: Option<CopyRecord>,
        /// The nodes of other machines that could store copies, the best ones first.
        nodes: Vec<u16>,
        /// The nodes of this machine that could store copies, the best ones first.
        nodes_here: Vec<u16>,
    },
    /// The copies from which the caller is to restore a segment. Carries memory of zeros for it.
    Restoring {
        /// The first address.
        address: u64,
        /// The record of the copies.
        record: CopyRecord,
    },
    /// No segment and no request arrived in time.
    Nothing,
    /// A request to hand a segment over.
    Asked {
        /// The number of the segment.
        id: u64,
        /// The name of the process that is to receive it.
        process: String,
    },
    /// The segments and totals of this host.
    Report {
        /// The segments.
        segments: Vec<SegmentStatus>,
        /// The totals since the agent started.
        totals: SegmentTotals,
    },
    /// The copies on memory nodes.
    ReportCopies(Vec<CopiesStatus>),
    /// The segments of the tenant on this host.
    List(Vec<SegmentStatus>),
}

/// The copies of a segment on memory nodes.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CopiesStatus {
    /// The user of the segment.
    pub user: u32,
    /// The number of the segment in the tenant.
    pub id: u64,
    /// The length of the segment in bytes.
    pub bytes: u64,
    /// The number of the last sync.
    pub version: u64,
    /// The time of the last sync, in seconds since 1970.
    pub synced_at_s: u64,
    /// The nodes with a copy; empty if the copies were freed, but not on all nodes.
    pub nodes: Vec<u16>,
    /// The nodes with obsolete objects of the copies, which are to be freed.
    pub left_on: Vec<u16>,
    /// Whether a host has the segment. Otherwise it can be restored.
    pub has_owner: bool,
}

/// A segment that a process of this host owns.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SegmentStatus {
    /// The user of the segment.
    pub user: u32,
    /// The number of the segment in the tenant.
    pub id: u64,
    /// The first address.
    pub address: u64,
    /// The length in bytes.
    pub bytes: u64,
    /// Bytes of missing pages.
    pub missing_bytes: u64,
    /// The name of the process that owns the segment.
    pub process: String,
    /// Whether that process is open. Otherwise the next one of its name receives the segment.
    pub is_open: bool,
    /// The process to which a hand-over is prepared.
    pub target: Option<String>,
}

/// Counts and times of a host's segments since its agent started.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SegmentTotals {
    /// Segments that were handed over to other hosts.
    pub handed_over: u64,
    /// Segments that were received from other hosts.
    pub received: u64,
    /// Hand-overs that did not take place: the target declined them, or they were retracted.
    pub declined: u64,
    /// Pages that were pulled because a thread waited for them.
    pub pages_on_touch: u64,
    /// Pages that were pulled ahead of the program.
    pub pages_ahead: u64,
    /// Durations of hand-overs, from the request to the end. The program has no access meanwhile.
    pub transfers: TimeSummary,
    /// Durations for which threads waited for missing pages.
    pub waits: TimeSummary,
}

/// A summary of recorded durations.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TimeSummary {
    /// The number of recorded durations.
    pub count: u64,
    /// The median, in µs.
    pub p50_us: u64,
    /// The 99th percentile, in µs.
    pub p99_us: u64,
    /// The longest duration, in µs.
    pub longest_us: u64,
}
