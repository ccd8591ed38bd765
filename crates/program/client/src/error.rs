//! Errors of the client. The texts are sentences for the user of the program.

use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

use aquifer_channel::ReceiveError;
use aquifer_ipc::ring::{CorruptRing, RingStatus};

use crate::session::MAX_EXTENT_BYTES;

/// No agent listens at a socket.
#[derive(Debug, thiserror::Error)]
#[error(
    "no agent of Aquifer answers at {path} ({source}): start a cluster with `aquifer up`, \
     or name the agent's socket in AQUIFER_AGENT",
    path = path.display()
)]
pub struct NoAgent {
    /// The agent's socket.
    pub path: PathBuf,
    /// The error of the system call.
    pub source: io::Error,
}

/// Connects to an agent.
pub(crate) fn connect(path: &Path) -> Result<OwnedFd, NoAgent> {
    aquifer_channel::connect(path).map_err(|source| NoAgent { path: path.to_owned(), source })
}

/// Connects to an agent. No call on the connection waits longer than `timeout`.
pub(crate) fn connect_with_timeout(path: &Path, timeout: Duration) -> Result<OwnedFd, NoAgent> {
    aquifer_channel::connect_with_timeout(path, timeout)
        .map_err(|source| NoAgent { path: path.to_owned(), source })
}

/// The error of a call on a session.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// No agent listens at the socket.
    #[error(transparent)]
    NoAgent(#[from] NoAgent),
    /// The agent refused to open a session, for this reason.
    #[error("the agent refused to open a session: {0}")]
    Refused(String),
    /// The agent's answer to the request for a session is not a frame.
    #[error("the agent's answer is invalid: {0}")]
    Protocol(#[from] ReceiveError),
    /// A system call failed while the session was opened.
    #[error("cannot set up the session: {0}")]
    Io(#[from] io::Error),
    /// The agent ended the session, or one side wrote invalid values into the shared memory. Its
    /// extents are freed.
    #[error("the session has ended: {0}")]
    SessionEnded(String),
    /// The agent is gone, and no other agent took over within the grace time.
    #[error(
        "the agent is gone, and the extents of this session with it: open another session when an agent runs"
    )]
    AgentGone,
    /// The process is a forked child of the process that opened the session.
    #[error("the session belongs to the process that this one was forked from: open another session")]
    Forked,
    /// No extent has this size. Nothing was done.
    #[error("an extent has 1 to {MAX_EXTENT_BYTES} bytes, and {bytes} were requested")]
    Size {
        /// The requested size.
        bytes: u64,
    },
    /// The range is not inside the extent. Nothing was done for it.
    #[error("{len} bytes at {offset} are not inside an extent of {bytes} bytes")]
    OutOfRange {
        /// First byte of the range.
        offset: u64,
        /// Length of the range.
        len: usize,
        /// Size of the extent.
        bytes: u64,
    },
    /// No node has room. Nothing was done.
    #[error(
        "no memory node has enough contiguous free memory: \
         free something, request smaller extents, or add a node"
    )]
    PoolFull,
    /// The user's quota is used up. Nothing was done.
    #[error(
        "the quota of this user is used up: \
         free something, or raise the quota (aquifer agent --extents-per-user)"
    )]
    QuotaExceeded,
    /// The session has the maximum number of extents. Nothing was done.
    #[error("a session holds at most 1048576 extents: free some, use larger ones, or open another session")]
    TooManyExtents,
    /// The key opens nothing: the extent was freed, or belongs to another user or session.
    #[error("the extent was freed before, or does not belong to this user")]
    AccessDenied,
    /// The key was not tried, because the session or its user has used too many wrong keys. The
    /// session may try another key in a second.
    #[error("this session or this user has used too many wrong keys of extents: try again in a second")]
    TooManyWrongKeys,
    /// The data of the extent is lost. Other extents are not affected.
    #[error("the memory node that held the extent is gone, and the data with it")]
    DataLost,
    /// The agent failed for another reason.
    #[error("the agent could not carry out the request; its log has the reason")]
    Failed,
}

impl Error {
    /// The error for the status of an answer; `None` for success.
    pub(crate) fn of(status: RingStatus) -> Option<Self> {
        Some(match status {
            RingStatus::Done => return None,
            RingStatus::Full => Self::PoolFull,
            RingStatus::Quota => Self::QuotaExceeded,
            RingStatus::Refused => Self::AccessDenied,
            RingStatus::KeyNotTried => Self::TooManyWrongKeys,
            RingStatus::NodeGone => Self::DataLost,
            RingStatus::TooMany => Self::TooManyExtents,
            RingStatus::BadRequest | RingStatus::Failed => Self::Failed,
        })
    }
}

impl From<CorruptRing> for Error {
    fn from(corrupt: CorruptRing) -> Self {
        Self::SessionEnded(corrupt.to_string())
    }
}
