//! Requests between agents and their answers. Each is one message in JSON.

use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

use super::SegmentKey;
use crate::pulling::Link;
use aquifer_ownership::{Life, Message};

/// Maximum length of a message in bytes.
pub const MESSAGE_BYTES_MAX: u32 = 8192;

/// A request.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Request {
    /// The segment.
    pub segment: SegmentKey,
    /// The sender: the source of the hand-over, or for [`Ask::Fence`] any host.
    pub from: Life,
    /// The host to which the request is addressed.
    pub to: Life,
    /// The requested action.
    pub ask: Ask,
}

/// The action that a request asks for.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Ask {
    /// Prepare for a hand-over.
    Prepare {
        /// The number of the hand-over.
        generation: u64,
        /// Length of the segment in bytes.
        bytes: u64,
        /// The segment's first address in the arena.
        address: u64,
        /// The process that is to own the segment.
        process: String,
    },
    /// Own the segment from now on.
    Transfer {
        /// The number of the hand-over.
        generation: u64,
        /// The segment's copies, the newest first.
        copies: Vec<CopyPlace>,
    },
    /// Answer whether the segment was received. If not, refuse this hand-over from now on.
    Query {
        /// The number of the hand-over.
        generation: u64,
    },
    /// [`Ask::Query`] by a host that has found that the source is dead.
    Fence {
        /// The source.
        source: Life,
        /// The number of the hand-over.
        generation: u64,
    },
    /// Answer where the copy of a generation is. Used after the agent was restarted.
    Place {
        /// The generation.
        generation: u64,
    },
    /// Free the copies of all generations up to the given one.
    Release {
        /// The generation.
        generation: u64,
    },
}

/// A copy of a segment with the addresses at which it can be read.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CopyPlace {
    /// The copy.
    pub link: Link,
    /// The address of its host.
    pub address: SocketAddr,
    /// The address and the key of its first byte.
    pub data: (u64, u32),
    /// The address and the key of the presence bits.
    pub present: (u64, u32),
}

/// The answer to a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Answer {
    /// The target is prepared.
    Accept,
    /// The target is not prepared, or the copy does not exist.
    Decline,
    /// The target has received the segment.
    Received,
    /// The target has not received the segment, and refuses it from now on.
    NotReceived,
    /// The request was carried out, or is queued.
    Done,
    /// The place of the copy.
    Place(CopyPlace),
}

impl Request {
    /// Returns the ownership protocol's message for this request; `None` if it has none.
    #[must_use]
    pub fn message(&self) -> Option<Message> {
        match self.ask {
            Ask::Prepare { generation, .. } => Some(Message::Prepare(generation)),
            Ask::Transfer { generation, .. } => Some(Message::Transfer(generation)),
            Ask::Query { generation } | Ask::Fence { generation, .. } => Some(Message::Query(generation)),
            Ask::Place { .. } | Ask::Release { .. } => None,
        }
    }
}

impl Answer {
    /// Returns the answer for a message of the ownership protocol; `None` if the message is a
    /// request.
    #[must_use]
    pub const fn of(message: Message) -> Option<Self> {
        match message {
            Message::Accept(_) => Some(Self::Accept),
            Message::Decline(_) => Some(Self::Decline),
            Message::Received(_) => Some(Self::Received),
            Message::NotReceived(_) => Some(Self::NotReceived),
            Message::Prepare(_) | Message::Transfer(_) | Message::Query(_) => None,
        }
    }

    /// Returns the ownership protocol's message for this answer; `None` if it has none.
    #[must_use]
    pub const fn message(self, generation: u64) -> Option<Message> {
        match self {
            Self::Accept => Some(Message::Accept(generation)),
            Self::Decline => Some(Message::Decline(generation)),
            Self::Received => Some(Message::Received(generation)),
            Self::NotReceived => Some(Message::NotReceived(generation)),
            Self::Done | Self::Place(_) => None,
        }
    }
}
