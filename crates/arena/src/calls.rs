//! What a program asks of its agent about segments, and the answers, as JSON.
//!
//! Format: `docs/formats/segments.md`.

use serde::{Deserialize, Serialize};

/// A request.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Call {
    /// Gives this process a name in its tenant. The first request of a connection. When the
    /// connection ends, the process has ended.
    Open {
        /// The name.
        process: String,
        /// The segments that it got from an agent whose process has ended.
        #[serde(default)]
        held: Vec<u64>,
    },
    /// Makes this connection one for [`Call::Receive`] and [`Call::Serve`], of a process that is open. The first
    /// request of a connection.
    Attend {
        /// The name.
        process: String,
    },
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
    },
    /// Prepares a hand-over.
    Connect {
        /// The number of the segment.
        id: u64,
        /// The name of the process that is to have it.
        process: String,
    },
    /// Takes [`Call::Connect`] back.
    Abort {
        /// The number of the segment.
        id: u64,
    },
    /// Hands a segment over. The process has no access any more.
    Transfer {
        /// Its number.
        id: u64,
        /// Whether an agent that has ended did not answer the same call.
        #[serde(default)]
        is_repeated: bool,
    },
    /// Waits for a segment.
    Receive {
        /// How long, in milliseconds.
        timeout_ms: u64,
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
    /// Lists segments of the tenant that processes of this host own, the first
    /// [`LISTED_MAX`] with greater numbers.
    List {
        /// The number.
        above: Option<u64>,
    },
}

/// Most segments in an answer.
pub const LISTED_MAX: usize = 256;

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
    },
    /// Nothing has arrived in time.
    Nothing,
    /// The segments.
    List(Vec<SegmentStatus>),
}

/// A segment that a process of this host owns.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SegmentStatus {
    /// Its number in the tenant.
    pub id: u64,
    /// Its first address.
    pub address: u64,
    /// Its length.
    pub bytes: u64,
    /// Bytes of pages that are elsewhere.
    pub missing_bytes: u64,
    /// The name of its process, which may have ended.
    pub process: String,
}
