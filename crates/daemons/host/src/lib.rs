//! The parts of a host of the pool that the agent and the server of a swap device share.
//!
//! - [`membership`]: a host number under a lease, and the watch over the memory nodes.
//! - [`nodes`]: the memory nodes, and connections to them.
//! - [`node_updates`]: keeps the nodes up to date with the directory.
//! - [`recovery`]: frees what dead hosts owned.
//! - [`leak_scan`]: frees extents of this host that no part of the host has recorded.
//! - [`cluster_access`]: access to the cluster that the server of a swap device requests from the
//!   agent of its machine.
//! - [`environment`]: the clock and the connections of a host, which a simulator replaces.
//! - [`client`]: requests to the agent of this machine.

#![forbid(unsafe_code)]

pub mod client;
pub mod cluster_access;
pub mod environment;
#[cfg(test)]
mod golden_tests;
pub mod leak_scan;
pub mod membership;
mod mutation;
pub mod node_updates;
pub mod nodes;
pub mod recovery;

pub use mutation::Mutation;
