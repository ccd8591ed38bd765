//! The pool: memory of the nodes, taken and given back by the hosts themselves with one-sided
//! operations. `docs/formats/pool.md` is the format and the protocol, step by step.
//!
//! - [`word`]: pure functions on the two kinds of control words, each with its inline log.
//! - [`layout`]: where everything lies in a node's region, and the header that says so.
//! - [`op`]: the state machines that take and give back extents. They do no I/O; the simulator and
//!   [`PoolClient`] drive the same ones.
//! - [`donor`]: the owner's side, which lays the memory out and opens it.
//! - [`custody`]: who on a host knows of what it has, and gives back what nobody knows of.
//! - [`client`]: the edge, which runs the machines over fabric endpoints.
//!
//! This crate does not know what an extent is used for, nor who serves the node's memory.

pub mod cache;
pub mod client;
pub mod custody;
pub mod donor;
mod error;
#[cfg(test)]
mod golden_tests;
pub mod layout;
mod link;
pub mod op;
pub mod size;
pub mod word;

pub use client::{Extent, NodeId, POOL_WORK_ID, PoolClient, Stretch, recover_node};
pub use custody::{Custody, Ledger, Pause, UnderWay};
pub use donor::{Donation, donate, donate_again, donate_of};
pub use error::{FormatError, PoolError};
pub use size::SizeClass;
