//! How both ends of a connection over a network prove that they have the cluster's key, and what they tell each other first.
//!
//! `docs/formats/fabric-tcp.md` has the bytes.

#[cfg(test)]
mod golden_tests;
pub mod hello;
pub mod secure;

pub use secure::ClusterKey;
