//! The extent service: programs ask the agent of their host for remote memory, and read and write it, over a ring in shared memory (DESIGN §5). They never
//! see the pool's metadata, and never have more than their user may have.
//!
//! - [`Sessions`]: the threads, one for each program, and what the next agent needs to go on.
//! - `session`: what is done for one program, written down in a `book` before it is answered. `stock` is what it keeps ready.
//! - `account`: what a user has and may have, and how often it may try keys.
//! - `cluster`: the pool, over endpoints of the user.
//!
//! This crate does not know how programs find the agent, nor what they keep in their extents.

mod account;
mod book;
mod cluster;
#[cfg(test)]
mod golden_tests;
#[cfg(test)]
mod model_tests;
mod serve;
mod session;
mod stock;

pub use account::UserReport;
pub use cluster::Reach;
pub use serve::{Keep, Left, SessionReport, Sessions};
