//! What every host of the pool does in the cluster, whether it is the agent or the server of a swap device.
//!
//! - [`membership`]: a host number under a lease.
//! - [`nodes`]: which memory nodes there are and how to reach them.
//! - [`recovery`]: frees what dead hosts held; [`audit`]: what this host holds without a local owner.
//! - [`lent`]: what a host of its own gets from the agent of its machine.
//! - [`client`]: queries to that agent; [`report`]: the JSON of its answers.

#![forbid(unsafe_code)]

pub mod audit;
pub mod client;
#[cfg(test)]
mod golden_tests;
pub mod lent;
pub mod membership;
pub mod nodes;
pub mod recovery;
pub mod report;
