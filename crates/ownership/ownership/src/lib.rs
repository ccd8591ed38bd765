//! Ownership of segments and of partitions of a cache, through hand-overs, crashes and the ends of
//! leases.
//!
//! In this crate, *segment* stands for both. A hand-over has numbered steps, which
//! `docs/formats/segments.md` lists. The source asks the target to prepare, and writes its intent
//! to the directory. From then on the message [`Message::Transfer`] alone moves the segment: the
//! source owns the segment until it sends the message, and the target from the receipt on. Each
//! hand-over has a number, its *generation*. The number of an intent is never used again.
//!
//! - [`record`] is the directory's record of a segment, with its transactions.
//! - [`holder`] is the state of a segment at a host, as a state machine.
//! - [`transaction`] carries out a transaction in the directory.

#![forbid(unsafe_code)]

pub mod holder;
mod mutation;
pub mod record;
pub mod transaction;

pub use holder::{Holder, Holding, Input, Message, Output, Stage};
pub use mutation::Mutation;
pub use record::{Change, Evidence, Retraction, SegmentRecord};

use serde::{Deserialize, Serialize};

/// One lifetime of an agent or cache server as an owner.
///
/// For segments, a life begins when an agent claims a host number. It continues over restarts of
/// the agent, and ends when the number is freed or other hosts recover the host. For partitions of
/// a cache, a life is one lease of a server.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub struct Life {
    /// The number of the host or cache server.
    pub host: u16,
    /// The epoch of the lease under which the host number was claimed, or of the server's lease.
    pub epoch: u64,
}
