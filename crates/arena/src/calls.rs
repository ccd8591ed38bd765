//! What a program asks of its agent about segments, and the answers, as JSON.
//!
//! Format: `docs/formats/segments.md`.

use serde::{Deserialize, Serialize};

use crate::copies::CopyRecord;

/// A request.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Call {
    /// Gives this process a name in its tenant. The first request of a connection. When the
    /// connection ends, the process has ended.
    Open {
        /// The name.
        process: String,
        /// The segments that it got from an agent whose process has ended, and their tenures.
        #[serde(default)]
        held: Vec<(u64, Tenure)>,
    },
    /// Makes this connection one for [`Call::Receive`] and [`Call::Serve`], of a process that is
    /// open. The first request of a connection.
    Attend {
        /// The name.
        process: String,
    },
    /// Answered at once, as often as it is asked: the process may have its segments. The first and
    /// only request of a connection.
    Pulse,
    /// Allocates a segment.
    Allocate {
        /// Its number in the tenant.
        id: u64,
        /// Its length: whole pages.
        bytes: u64,
    },
    /// Frees a segment. The process has no access any more.
    Deallocate {
        /// Its number.
        id: u64,
        /// Whether an agent that has ended did not answer the same call.
        #[serde(default)]
        is_repeated: bool,
    },
    /// Gives a segment up that has copies, which stay. The process has no access any more.
    GiveUp {
        /// Its number.
        id: u64,
    },
    /// Prepares a hand-over.
    Connect {
        /// The number of the segment.
        id: u64,
        /// The name of the process that is to have it.
        process: String,
    },
    /// Takes [`Call::Connect`] back, or [`Call::Restore`].
    Abort {
        /// The number of the segment.
        id: u64,
    },
    /// Hands a segment over. The process has no access any more.
    Transfer {
        /// Its number.
        id: u64,
        /// The tenure that ends.
        tenure: Tenure,
        /// Whether an agent that has ended did not answer the same call.
        #[serde(default)]
        is_repeated: bool,
    },
    /// Waits for a segment.
    Receive {
        /// How long, in milliseconds.
        timeout_ms: u64,
        /// Whether also for a request to hand one over.
        #[serde(default)]
        requests: bool,
    },
    /// Carries the userfaultfd of the mapping of a segment that was received and is partial. There
    /// is no answer; an agent that cannot serve it closes the connection.
    Serve {
        /// Its number.
        id: u64,
        /// Whether pages are pulled that the program touches, and ahead of it. Otherwise only
        /// those that it asks for.
        pulls: bool,
    },
    /// Pulls pages that are not here.
    Pull {
        /// The number of the segment.
        id: u64,
        /// The first byte, in the segment.
        offset: u64,
        /// The number of bytes.
        bytes: u64,
    },
    /// Pulls all that is not here, so that no other host has a part in the segment.
    Close {
        /// The number of the segment.
        id: u64,
    },
    /// Gives up all that is not here, so that no other host has a part in the segment.
    Discard {
        /// The number of the segment.
        id: u64,
    },
    /// The segments of this host that the caller may see, the first [`LISTED_MAX`] after one, and
    /// what the host has done. The only request of a connection.
    Report {
        /// The user and the number of that segment.
        above: Option<(u32, u64)>,
    },
    /// The copies of segments on memory nodes that the caller may see, the first [`LISTED_MAX`]
    /// after one. The only request of a connection.
    ReportCopies {
        /// The user and the number of that segment.
        above: Option<(u32, u64)>,
    },
    /// Requests the owner of a segment to hand it over. The only request of a connection.
    Move {
        /// The user.
        user: u32,
        /// The number of the segment.
        id: u64,
        /// The name of the process that is to have it.
        process: String,
    },
    /// Frees a segment whose process has ended. The only request of a connection.
    Free {
        /// The user.
        user: u32,
        /// The number of the segment.
        id: u64,
    },
    /// Where the copies of a segment are, and where there could be some. Of a segment that the
    /// process owns; or that no live host owns, then the call may be the first one of a connection.
    Copies {
        /// The number of the segment.
        id: u64,
    },
    /// Records where the copies of a segment are, as for [`Call::Copies`].
    SetCopies {
        /// The number of the segment.
        id: u64,
        /// The revision of the record that is replaced; 0 if there is none.
        revision: u64,
        /// The record, with the next revision; `None` if there are no copies.
        record: Option<CopyRecord>,
    },
    /// Begins to restore a segment that no live host owns from its copies.
    Restore {
        /// The number of the segment.
        id: u64,
    },
    /// The memory has the bytes of the copy: the process owns the segment from now on.
    Restored {
        /// The number of the segment.
        id: u64,
        /// Whether an agent that has ended did not answer the same call.
        #[serde(default)]
        is_repeated: bool,
    },
    /// Lists segments of the tenant that processes of this host own, the first
    /// [`LISTED_MAX`] with greater numbers.
    List {
        /// The number.
        above: Option<u64>,
    },
}

/// The time for which a process has a segment, told from an earlier or a later one: it may have got
/// the segment back.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Tenure {
    /// The hand-over by which its host got it.
    pub generation: u64,
    /// How often it was passed on between processes of that host.
    pub passes: u64,
}

/// Most segments in an answer.
pub const LISTED_MAX: usize = 128;

/// An answer.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Answer {
    /// It is done.
    Done,
    /// The process is open.
    Opened {
        /// The segments that it still has, of those that it named.
        held: Vec<u64>,
        /// Those whose hand-over is under way: it is to ask for the outcome.
        awaited: Vec<u64>,
        /// How long it may have segments after the agent has ended, in milliseconds.
        grace_ms: u64,
    },
    /// The segment is still owned by the process, for this reason.
    Kept(String),
    /// Nothing has changed, for this reason.
    Failed(String),
    /// A segment, which is the process's now. Carries its descriptor.
    Segment {
        /// Its number.
        id: u64,
        /// Its first address.
        address: u64,
        /// Its length.
        bytes: u64,
        /// Whether pages are elsewhere.
        is_partial: bool,
        /// The tenure that begins.
        tenure: Tenure,
    },
    /// Where the copies of a segment are. Carries its memory if the process owns it.
    Copies {
        /// The record.
        record: Option<CopyRecord>,
        /// The nodes of other machines that could have copies, the best ones first.
        nodes: Vec<u16>,
        /// Those of this machine.
        nodes_here: Vec<u16>,
    },
    /// What is to be restored. Carries memory of zeros for it.
    Restoring {
        /// The first address.
        address: u64,
        /// Where the copies are.
        record: CopyRecord,
    },
    /// Nothing has arrived in time.
    Nothing,
    /// The process is wanted to hand a segment over.
    Asked {
        /// Its number.
        id: u64,
        /// The process that is to have it.
        process: String,
    },
    /// The segments of this host, and what it has done.
    Report {
        /// The segments.
        segments: Vec<SegmentStatus>,
        /// What it has done.
        totals: Totals,
    },
    /// The copies.
    ReportCopies(Vec<CopiesStatus>),
    /// The segments.
    List(Vec<SegmentStatus>),
}

/// Copies of a segment on memory nodes.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CopiesStatus {
    /// Its user.
    pub user: u32,
    /// Its number in the tenant.
    pub id: u64,
    /// Its length.
    pub bytes: u64,
    /// The number of the last sync.
    pub version: u64,
    /// When that was, in seconds since 1970.
    pub synced_at_s: u64,
    /// The nodes; none if the copies were freed, but not on all nodes.
    pub nodes: Vec<u16>,
    /// Nodes that have something of them that is to be freed.
    pub left_on: Vec<u16>,
    /// Whether a host has the segment. Otherwise it can be restored.
    pub has_owner: bool,
}

/// A segment that a process of this host owns.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SegmentStatus {
    /// Its user.
    pub user: u32,
    /// Its number in the tenant.
    pub id: u64,
    /// Its first address.
    pub address: u64,
    /// Its length.
    pub bytes: u64,
    /// Bytes of pages that are elsewhere.
    pub missing_bytes: u64,
    /// The name of its process.
    pub process: String,
    /// Whether that process is open. Otherwise the next one of its name gets the segment.
    pub is_open: bool,
    /// The process to which it is prepared to be handed over.
    pub target: Option<String>,
}

/// What a host has done with segments since its agent started.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Totals {
    /// Segments that were handed over to other hosts.
    pub handed_over: u64,
    /// Segments that were received from other hosts.
    pub received: u64,
    /// Hand-overs that the target has declined.
    pub declined: u64,
    /// Pages that were pulled when a thread waited for them.
    pub pages_on_touch: u64,
    /// Pages that were pulled ahead of the program.
    pub pages_ahead: u64,
    /// The pause of writers and readers for a hand-over: from the request to its end.
    pub transfers: Times,
    /// The pause of threads that touch pages which are elsewhere.
    pub waits: Times,
}

/// Times of one kind.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Times {
    /// How many.
    pub count: u64,
    /// The median, in µs.
    pub p50_us: u64,
    /// In µs.
    pub p99_us: u64,
    /// In µs.
    pub longest_us: u64,
}
