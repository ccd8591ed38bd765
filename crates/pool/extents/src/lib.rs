//! The extent service: the agent's side of sessions.
//!
//! A program requests extents of the pool, and reads and writes them, over a ring in shared memory
//! (DESIGN §5, §12). It sees no metadata of the pool and cannot exceed its user's quota.
//!
//! - [`SessionService`]: one thread for each session, and resumption after a restart of the agent.
//! - `core`: the state machine of a session, without I/O. `core::stock` has the extents that are
//!   kept ready, `core::account` the quota of a user.
//! - `book`: the record of a session's extents, in memory that outlives the agent.
//! - `pool`: the pool, over endpoints of the user.
//!
//! The way in which programs find the agent, and the contents of extents, are unknown to this
//! crate.

#![forbid(unsafe_code)]

mod book;
mod core;
#[cfg(debug_assertions)]
#[doc(hidden)]
pub mod fuzz_target;
#[cfg(test)]
mod golden_tests;
#[cfg(test)]
mod model_tests;
mod mutation;
mod pool;
mod serve;

pub use book::InvalidBook;
pub use mutation::Mutation;
pub use pool::NodeConnector;
pub use serve::{InheritError, InheritedSession, OpenSessionError, SessionService};
