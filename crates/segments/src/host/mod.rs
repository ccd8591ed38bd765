//! The segments of a host, as its agent serves them: their memory, and the hand-overs with other
//! agents.
//!
//! - [`registry`] has the records of segments and hosts in the directory.
//! - [`memory`] is a copy of a segment, which other hosts read.
//! - [`wire`] has the messages between agents, and `peer` the connections to them.
//! - [`faults`] serves a program that touches pages that are elsewhere.
//! - [`service`] is the interface. `outputs` and `pulls` carry out what the state machines of
//!   [`crate::ownership`] and [`crate::pulling`] decide, and `answers` answers other agents.

mod answers;
pub mod faults;
pub mod memory;
mod outputs;
mod peer;
mod pulls;
pub mod registry;
pub mod service;
mod shared;
pub mod wire;

pub use registry::SegmentKey;
pub use service::{SegmentError, SegmentHost};
