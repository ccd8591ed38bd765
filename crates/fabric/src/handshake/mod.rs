//! How both ends of a connection over a network prove that they have the cluster's key, and what they tell each other first.
//!
//! `docs/formats/fabric-tcp.md` has the bytes.

pub(crate) mod common;
#[cfg(test)]
mod golden_tests;
pub mod hello;
pub mod secure;

pub use secure::ClusterKey;

use std::time::Duration;

/// A connection that has not said and proved who it is by then is closed.
pub const HANDSHAKE_TIME: Duration = Duration::from_secs(5);
/// Connections that have not yet said and proved who they are, at most; more wait in the socket's backlog.
pub const PENDING_LIMIT: usize = 64;
/// A target keeps the session of a broken connection for so long.
pub const LINGER_TIME: Duration = Duration::from_secs(5);

/// What a target says that ends.
pub(crate) const LEAVING: &str = "the target is going away";
/// What a target says whose end of the broken connection is still open.
pub(crate) const TRY_AGAIN: &str = "try again: the old connection is being closed";
