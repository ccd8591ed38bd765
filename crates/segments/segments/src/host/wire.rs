//! Requests of one agent to another, and their answers: one message each, as JSON.

use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

use super::SegmentKey;
use crate::pulling::Link;
use aquifer_ownership::{Life, Message};

/// Longest message.
pub const MESSAGE_BYTES_MAX: u32 = 8192;

/// A request.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Request {
    /// The segment.
    pub segment: SegmentKey,
    /// The source; for [`Ask::Fence`], the host that asks.
    pub from: Life,
    /// The target.
    pub to: Life,
    /// What is to be done.
    pub ask: Ask,
}

/// What is to be done.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Ask {
    /// To be prepared for a hand-over.
    Prepare {
        /// The number of the hand-over.
        generation: u64,
        /// Length of the segment in bytes.
        bytes: u64,
        /// Its first address in the arena.
        address: u64,
        /// The process that is to own it.
        process: String,
    },
    /// To own the segment from now on.
    Transfer {
        /// The number of the hand-over.
        generation: u64,
        /// Its copies, the newest first.
        copies: Vec<CopyPlace>,
    },
    /// To say whether it was received, and not to accept it any more if not.
    Query {
        /// The number of the hand-over.
        generation: u64,
    },
    /// As [`Ask::Query`], by a host that finds the source dead.
    Fence {
        /// The source.
        source: Life,
        /// The number of the hand-over.
        generation: u64,
    },
    /// To say where its copy of a generation is, after its agent was restarted.
    Place {
        /// The generation.
        generation: u64,
    },
    /// To give up copies of generations up to this one.
    Release {
        /// The generation.
        generation: u64,
    },
}

/// A copy, and where it can be read.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CopyPlace {
    /// The copy.
    pub link: Link,
    /// The address of its host.
    pub address: SocketAddr,
    /// The address and the key of its first byte.
    pub data: (u64, u32),
    /// The address and the key of the words with a bit for each page that is present.
    pub present: (u64, u32),
}

/// The answer.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Answer {
    /// It is prepared.
    Accept,
    /// It is not.
    Decline,
    /// It has received the segment.
    Received,
    /// It has not, and will not.
    NotReceived,
    /// It is done.
    Done,
    /// The copy is here.
    Place(CopyPlace),
}

impl Request {
    /// The message in the protocol of ownership; `None` if it is none of them.
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
    /// The answer that a message is; `None` if it is a request.
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

    /// The message in the protocol of ownership; `None` if it is none of them.
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
