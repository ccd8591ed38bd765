//! The way between a program and the agent of its host.
//!
//! - [`frames`]: messages over Unix sockets that keep their boundaries, with descriptors.
//! - [`socket`]: the sockets themselves: listening, accepting, waiting.
//! - [`Mapping`]: the memory of a session's ring, where a program has it mapped.
//! - [`place`]: where the agent is found.
//! - [`bell`]: waiting for the other side of a ring, and waking it.
//!
//! This crate does not know what is said.

pub mod bell;
pub mod frames;
#[cfg(test)]
mod golden_tests;
mod mapping;
pub mod place;
pub mod socket;

pub use frames::{Kept, ReceiveError, connect, receive_frame, send_frame, try_send_frame};
pub use mapping::Mapping;
