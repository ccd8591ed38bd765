//! What can go wrong, each a sentence for the person who reads it.

use std::io;
use std::path::PathBuf;

use aquifer_channel::ReceiveError;
use aquifer_ipc::ring::{CorruptRing, ExtentStatus};

use crate::session::MAX_EXTENT_BYTES;

/// Why a call failed. Those that say so leave the session as it was.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// No agent.
    #[error("no agent of Aquifer answers at {path} ({source}): start a cluster with `aquifer up`, or name the agent's socket in AQUIFER_AGENT", path = path.display())]
    NoAgent {
        /// Where it was looked for.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The agent opens no session.
    #[error("the agent refuses: {0}")]
    Refused(String),
    /// The agent did not answer as it should.
    #[error("the agent does not answer as it should: {0}")]
    Answer(#[from] ReceiveError),
    /// The system refused something.
    #[error("no memory for the session: {0}")]
    System(#[from] io::Error),
    /// The agent ended the session, and has taken back what it had.
    #[error("the session was ended by the agent: {0}")]
    Ended(String),
    /// The agent is gone and none came in its place in time.
    #[error("the agent is gone, and with it what this session had: open another when an agent is there")]
    AgentGone,
    /// The process was forked since.
    #[error("the session belongs to the process that this one was forked from: open one of your own")]
    Forked,
    /// No such size. The session is as it was.
    #[error("an extent has 1 to {MAX_EXTENT_BYTES} bytes, and {bytes} were asked for")]
    Size {
        /// Bytes asked for.
        bytes: u64,
    },
    /// Outside of the extent. Nothing was done.
    #[error("{len} bytes at {offset} are not inside an extent of {bytes} bytes")]
    OutOfRange {
        /// From where.
        offset: u64,
        /// How many.
        len: usize,
        /// The extent's.
        bytes: u64,
    },
    /// The pool is full. The session is as it was.
    #[error(
        "no memory node has room for it in one piece: free something, ask for less at a time, or add a node"
    )]
    Full,
    /// The user has as much as it may have. The session is as it was.
    #[error(
        "this user has as much of the pool as it may have: free something, or ask for more (aquifer agent --extents-per-user)"
    )]
    Quota,
    /// The session holds as many extents as it can. It is as it was.
    #[error("a session holds at most 1048576 extents: free some, use larger ones, or open another session")]
    TooMany,
    /// The key opens nothing: the extent was given back, or was never this user's.
    #[error("the extent was given back before, or belongs to somebody else")]
    NotYours,
    /// What was there is lost. Other extents are as they were.
    #[error("the memory node that held the extent is gone, and the data with it")]
    Lost,
    /// The agent's log knows more.
    #[error("the agent could not do it; its log says why")]
    Failed,
}

impl Error {
    /// The error that an answer tells; `None` if it is none.
    pub(crate) fn of(status: ExtentStatus) -> Option<Self> {
        Some(match status {
            ExtentStatus::Done => return None,
            ExtentStatus::Full => Self::Full,
            ExtentStatus::Quota => Self::Quota,
            ExtentStatus::Refused => Self::NotYours,
            ExtentStatus::NodeGone => Self::Lost,
            ExtentStatus::TooMany => Self::TooMany,
            ExtentStatus::BadRequest | ExtentStatus::Failed => Self::Failed,
        })
    }
}

impl From<CorruptRing> for Error {
    fn from(broken: CorruptRing) -> Self {
        Self::Ended(broken.to_string())
    }
}
