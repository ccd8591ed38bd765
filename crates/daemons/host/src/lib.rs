//! What every host of the pool does in the cluster, the agent and the server of a swap device
//! alike.
//!
//! - [`membership`]: a host number under a lease, and the watch over the memory nodes.
//! - [`nodes`]: the memory nodes, and connections to them.
//! - [`node_updates`]: keeps them up to date with the directory.
//! - [`recovery`]: frees what dead hosts owned.
//! - [`leak_scan`]: frees extents of this host that no part of the host has recorded.
//! - [`cluster_access`]: what the server of a swap device gets from the agent of its machine.
//! - [`environment`]: the clock and the connections of a host, which a simulator replaces.
//! - [`client`]: requests to that agent.

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
