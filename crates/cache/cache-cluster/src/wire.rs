//! Messages between servers, and between operators and servers, as `docs/formats/cache-peers.md`
//! describes them.

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
    /// The name of the cache.
    pub cache: String,
    /// The purpose of the connection.
    pub purpose: Purpose,
    /// Whether the sender requires that the frames on the connection are encrypted.
    pub encrypt: bool,
}

/// The purpose of a connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Purpose {
    /// Forwarding of requests of clients, in frames.
    Requests,
    /// Requests to the server itself: an [`Ask`] and its [`Answer`] at a time.
    Questions,
}

/// The answer to [`Hello`].
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Welcome {
    /// The connection is accepted.
    Accepted {
        /// Whether the frames on it are encrypted.
        encrypt: bool,
    },
    /// The connection is refused, for this reason.
    Refused(String),
}

/// A request to a server.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Ask {
    /// Source to target: accept the hand-over, and begin to copy the partition.
    Prepare {
        /// The hand-over.
        handover: Handover,
        /// The memory of the partition.
        offer: Offer,
    },
    /// Target to source: return the end of the runs in use. Also a keep-alive.
    Extent(Handover),
    /// Target to source: pause the partition, because nearly all of it is copied.
    Rest(Handover),
    /// Target to source: transfer the ownership, because all of the partition is copied.
    Give(Handover),
    /// Target to source: the target owns the partition.
    Received(Handover),
    /// Target to source: the target has aborted the hand-over, for this reason.
    GiveUp(Handover, String),
    /// Source to target: answer whether the target owns the partition, and refuse the hand-over for
    /// ever if not.
    Query(Handover),
    /// Returns the status of the server, for operators and for the balancer.
    Status,
    /// Moves a partition from this server to another one.
    Move {
        /// The partition.
        partition: usize,
        /// The number of the other server.
        to: u16,
    },
    /// Makes the server drain, or accept partitions again.
    Drain {
        /// Whether the server drains from now on.
        drains: bool,
    },
    /// Balances the load now.
    Balance,
}

/// A hand-over.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Handover {
    /// The partition.
    pub partition: usize,
    /// The number of the hand-over.
    pub generation: u64,
    /// Number of the source's attempt. It distinguishes attempts with the same generation, which is
    /// used again if no intent was written. 0 in a query, which concerns all attempts.
    pub attempt: u64,
    /// The source.
    pub from: Life,
    /// The target.
    pub to: Life,
}

/// Location and size of the memory of a partition, and its load.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Offer {
    /// TCP address of the source's memory target.
    pub address: SocketAddr,
    /// Boot identity of the source's machine; empty without [`Self::socket`].
    pub machine: String,
    /// Path of the socket for servers of the same machine; may be empty.
    pub socket: String,
    /// Base address and key of the region over TCP.
    pub region: (u64, u32),
    /// Base address and key of the region over shared memory.
    pub local_region: (u64, u32),
    /// Number of runs in the layout.
    pub runs: usize,
    /// Number of buckets in the layout.
    pub buckets: usize,
    /// Bytes of memory that the partition uses.
    pub bytes: u64,
    /// Requests per second to the partition.
    pub requests_per_s: f64,
}

/// The answer to an [`Ask`].
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Answer {
    /// The request is done.
    Done,
    /// The request is declined, for this reason.
    Declined(String),
    /// To [`Ask::Extent`]: the end of the runs in use.
    Extent(u32),
    /// To [`Ask::Rest`]: the source has not written its intent yet; retry.
    NotYet,
    /// To [`Ask::Rest`]: the partition is paused.
    Rests(Departure),
    /// To [`Ask::Give`]: the target owns the partition.
    Given,
    /// To [`Ask::Query`]: the target has received the partition.
    Received,
    /// To [`Ask::Query`]: the target has not received the partition, and refuses it from now on.
    NotReceived,
    /// To [`Ask::Status`].
    Status(Box<ServerStatus>),
    /// To [`Ask::Balance`]: the moves, as partition and target.
    Moves(Vec<(usize, u16)>),
}

/// The status of a server.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct ServerStatus {
    /// The number of the server.
    pub server: u16,
    /// Addresses for clients.
    pub clients: Vec<String>,
    /// Limit of the memory for items and their index, in bytes.
    pub memory_bytes: u64,
    /// Bytes of this memory that are used.
    pub used_bytes: u64,
    /// Whether the server drains.
    pub drains: bool,
    /// Partitions that the server owns.
    pub partitions: Vec<PartitionStatus>,
    /// Partitions that were handed over to other servers since the start.
    pub given: u64,
    /// Partitions that were received from other servers since the start.
    pub received: u64,
}

/// The status of a partition.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
pub struct PartitionStatus {
    /// The partition.
    pub partition: usize,
    /// Number of items.
    pub items: u64,
    /// Bytes of memory.
    pub bytes: u64,
    /// Requests per second, over the last seconds.
    pub requests_per_s: f64,
    /// Whether a hand-over of the partition is in progress.
    pub moves: bool,
}
