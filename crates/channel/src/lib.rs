//! Transport between a program and the agent of its host.
//!
//! - [`frames`]: frames with descriptors over sequenced-packet Unix sockets.
//! - [`socket`]: listening, accepting and waiting at sockets.
//! - [`RingMapping`]: the memory of a session's ring, mapped into a program.
//! - [`wakeup`]: waiting for the other side of a ring, and waking it.
//! - [`paths`]: the path of the agent's socket.
//!
//! This crate does not know what the frames mean.

pub mod frames;
#[cfg(test)]
mod golden_tests;
pub mod paths;
mod ring_mapping;
pub mod socket;
pub mod wakeup;

pub use frames::{ReceiveError, RestoredItem, connect, receive_frame, send_frame, try_send_frame};
pub use ring_mapping::RingMapping;
