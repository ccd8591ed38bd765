//! The segments of a host, as its agent serves them: their memory, and the hand-overs with other
//! agents.
//!
//! - [`registry`] reads and writes the records of segments and hosts in the directory.
//! - [`ranges`] grants the addresses that segments have in all processes of their tenant.
//! - [`copy_records`] has the records of copies on memory nodes. [`copies`] and `copy_calls` serve
//!   the calls of programs about them.
//! - [`memory`] is a copy of a segment, which other hosts read, with its `journal`. The keeper
//!   holds both ([`kept`]), and the next process of the agent resumes from them (`restore`).
//! - `memories` allocates the memory within the limits of each user. `numbers` limits the numbers
//!   of segments that a user can use over time.
//! - `segment_table` has the segments that this host knows, and `restores` those that programs are
//!   restoring from copies. `shared` has the lock order.
//! - [`wire`] has the messages between agents, and `peer` and `peers` the connections to them.
//! - [`programs`] serves the programs of this host. `processes` opens and closes them, `arrivals`
//!   queues the segments that have arrived for them, and `served` serves their page faults.
//! - `precedence` delays pages that are pulled ahead of programs while threads wait for pages, and
//!   `pull_rate_limiter` limits the rate of these pages.
//! - [`statistics`] counts hand-overs and pulled pages.
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
mod peer;
mod peers;
mod precedence;
mod processes;
pub mod programs;
mod pull_rate_limiter;
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
