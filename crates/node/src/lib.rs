//! The memory node: lends this machine's memory to the cluster.
//!
//! It creates the memory, lays it out as a pool, opens it to its peers through the fabric and
//! says so in the directory, under a lease. After that the hosts do everything by themselves, with
//! one-sided operations; the node only watches their leases, and fences a host whose lease is gone,
//! so that it cannot change metadata any more, clears what goes from one tenant to another, and lends more or less when it is asked to.
//!
//! If it is told to, a keeper holds the memory when the node's process ends, and the next process goes on with it.
//!
//! It takes no part in taking and giving back: what it clears or withdraws it takes as a host does. This crate does not know what is in an extent.

#![forbid(unsafe_code)]

mod caretaker;
mod clearer;
mod epochs;
mod error;
mod fences;
mod keeping;
mod lending;
mod member;
pub mod memory;
mod metrics;
mod own;
mod resizer;
mod serve;
mod shutdown;

pub use error::NodeError;
pub use fences::{Fence, Fences};
pub use keeping::Keep;
pub use serve::{Connect, LEASE_TTL, Listen, NodeOptions, Ready, serve};
pub use shutdown::Shutdown;
