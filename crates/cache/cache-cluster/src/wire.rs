//! What servers, and operators, ask each other. `docs/formats/cache-peers.md` has the messages.

use std::net::SocketAddr;

use aquifer_cache::store::partition::Departure;
use aquifer_ownership::Life;
use serde::{Deserialize, Serialize};

/// The version of the protocol between servers.
pub const VERSION: u32 = 4;

/// The first message of a connection, after the handshake.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Hello {
    /// The version of the protocol.
    pub version: u32,
    /// The cache.
    pub cache: String,
    /// What the connection is for.
    pub purpose: Purpose,
    /// Whether all that follows is to be encrypted.
    pub encrypt: bool,
}

/// What a connection is for.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Purpose {
    /// Requests of clients are forwarded.
    Requests,
    /// Questions.
    Questions,
}

/// The answer to [`Hello`].
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Welcome {
    /// The connection is accepted, and what follows is encrypted or not.
    Accepted {
        /// Whether it is.
        encrypt: bool,
    },
    /// It is refused, for this reason.
    Refused(String),
}

/// A question.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Ask {
    /// To the target of a hand-over: be prepared, and copy the partition.
    Prepare {
        /// The hand-over.
        handover: Handover,
        /// Where the partition is.
        offer: Offer,
    },
    /// To the source: how far do the runs in use go?
    Extent(Handover),
    /// To the source: the partition is copied up to what is being written. Let it rest.
    Rest(Handover),
    /// To the source: all is copied. Give the partition.
    Give(Handover),
    /// To the source: the target has the partition.
    Received(Handover),
    /// To the source: the target gives up, for this reason.
    GiveUp(Handover, String),
    /// To the target: answer whether it has the partition, and refuse it from now on if not.
    Query(Handover),
    /// How the server is, for operators and for the balancer.
    Status,
    /// To have a partition moved to another server.
    Move {
        /// The partition.
        partition: usize,
        /// The number of the server.
        to: u16,
    },
    /// To have the server drain, or to have partitions again.
    Drain {
        /// Whether it is to drain.
        drains: bool,
    },
    /// To balance the load now.
    Balance,
}

/// A hand-over.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Handover {
    /// The partition.
    pub partition: usize,
    /// The number of the hand-over.
    pub generation: u64,
    /// Tells attempts of the source with the same number apart: a number is used again if no intent
    /// was written. 0 in a query, which is about all of them.
    pub attempt: u64,
    /// The source.
    pub from: Life,
    /// The target.
    pub to: Life,
}

/// Where the memory of a partition is.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Offer {
    /// The TCP address.
    pub address: SocketAddr,
    /// The machine, and the socket for servers on the same one.
    pub machine: String,
    /// See [`Self::machine`].
    pub socket: String,
    /// First address and key, over TCP.
    pub region: (u64, u32),
    /// First address and key, over shared memory.
    pub local_region: (u64, u32),
    /// Runs of the layout.
    pub runs: usize,
    /// Buckets of the layout.
    pub buckets: usize,
    /// Bytes of memory that the partition has.
    pub bytes: u64,
    /// Requests per second.
    pub requests_per_s: f64,
}

/// An answer.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Answer {
    /// It is done.
    Done,
    /// It is declined, for this reason.
    Declined(String),
    /// To [`Ask::Extent`]: the end of the runs that are in use.
    Extent(u32),
    /// To [`Ask::Rest`]: not yet; ask again.
    NotYet,
    /// To [`Ask::Rest`]: the partition rests.
    Rests(Departure),
    /// To [`Ask::Give`]: the partition is the target's.
    Given,
    /// To [`Ask::Query`]: it has it.
    Received,
    /// To [`Ask::Query`]: it has not, and will not.
    NotReceived,
    /// To [`Ask::Status`].
    Status(Box<ServerStatus>),
    /// To [`Ask::Balance`]: what was begun.
    Moves(Vec<(usize, u16)>),
}

/// How a server is.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct ServerStatus {
    /// The number of the server.
    pub server: u16,
    /// Where clients reach it.
    pub clients: Vec<String>,
    /// Bytes of memory for items and their index, and how many are used.
    pub memory_bytes: u64,
    /// See [`Self::memory_bytes`].
    pub used_bytes: u64,
    /// Whether it is to have no partitions.
    pub drains: bool,
    /// Its partitions.
    pub partitions: Vec<PartitionStatus>,
    /// Partitions that were given to other servers since it started, and that were received.
    pub given: u64,
    /// See [`Self::given`].
    pub received: u64,
}

/// How a partition is.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
pub struct PartitionStatus {
    /// The partition.
    pub partition: usize,
    /// Items.
    pub items: u64,
    /// Bytes of memory.
    pub bytes: u64,
    /// Requests per second, over the last seconds.
    pub requests_per_s: f64,
    /// Whether it is moving.
    pub moves: bool,
}
