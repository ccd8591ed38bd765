//! The segments of a host, as its agent serves them: their memory, and the hand-overs with other
//! agents.
//!
//! - [`registry`] has the records of segments and hosts in the directory.
//! - [`ranges`] has the addresses that segments have in all processes of their tenant.
//! - [`copy_records`] has where the copies of segments on memory nodes are, and [`copies`] and
//!   `copy_calls` what programs ask about them.
//! - [`memory`] is a copy of a segment, which other hosts read, and its `journal`. The keeper holds
//!   both ([`kept`]), and the next process of the agent goes on from there (`restore`).
//! - `memories` allocates the memory within the limits of each user, and `numbers` bounds how many
//!   segments a user can use, one after the other.
//! - `segment_table` has the segments that this host knows, and `restores` those that programs are
//!   restoring from copies. `shared` has the lock order.
//! - [`wire`] has the messages between agents, and `peer` and `peers` the connections to them.
//! - [`programs`] serves the programs of this host. `processes` opens and closes them, `arrivals`
//!   has the segments that have arrived for them, and `served` serves their touches of pages that
//!   are elsewhere.
//! - [`statistics`] has what was done.
//! - [`service`] is the interface. `outputs` and `pulls` carry out what the state machines of
//!   [`aquifer_ownership`] and [`crate::pulling`] decide, and `answers` answers other agents.

mod answers;
mod arrivals;
pub mod copies;
mod copy_calls;
pub mod copy_records;
mod error;
mod held_bytes;
mod jobs;
mod journal;
pub mod kept;
mod memories;
pub mod memory;
mod numbers;
mod open_processes;
mod outputs;
mod pace;
mod peer;
mod peers;
mod precedence;
mod processes;
pub mod programs;
mod pulls;
pub mod ranges;
pub mod registry;
mod restore;
mod restores;
mod segment_table;
mod served;
pub mod service;
mod shared;
pub mod statistics;
pub mod wire;

pub use aquifer_arena::calls::SegmentStatus;
pub use error::SegmentError;
pub use kept::{HostLease, KeptSegment};
pub use programs::ProcessIdentity;
pub use registry::SegmentKey;
pub use service::{SegmentHost, SegmentOptions};
pub use shared::Arrival;
