//! Ownership of what moves between hosts: segments, and partitions of a cache, through hand-overs,
//! crashes and the ends of leases.
//!
//! A hand-over has numbered steps, which `docs/formats/segments.md` lists. The source's agent asks
//! the target's whether it is prepared, and writes its intent to the directory. From then on the
//! message [`Message::Transfer`] alone moves the segment: the source owns until it sends the
//! message, and the target from receipt. Each hand-over has a *generation*, which is never used
//! again.
//!
//! - [`record`] is the directory's record of a segment, with its transactions.
//! - [`holder`] is the state of a segment at an agent, as a state machine.
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

/// An agent for the time of one lease.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub struct Life {
    /// The number of the host.
    pub host: u16,
    /// The epoch of the lease.
    pub epoch: u64,
}
