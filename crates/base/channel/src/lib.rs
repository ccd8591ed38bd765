//! Transport between a program and the agent of its host.
//!
//! - [`frames`]: frames with descriptors over sequenced-packet Unix sockets.
//! - [`socket`]: listening, accepting and waiting at sockets.
//! - [`RingMapping`]: the memory of a session's ring, mapped into a program.
//! - [`wakeup`]: waiting for the other side of a ring, and waking it.
//! - [`peer`]: the process at the other end of a socket.
//! - [`passrights`]: sockets that accept no descriptors.
//! - [`descriptor_shares`]: descriptors and threads, shared out to users.
//! - [`owners`]: the user that has a subordinate user id.
//! - [`exiting`]: processes that were killed and have not ended.
//! - [`start_time`]: the start time of a process, which identifies it with its id.
//! - [`answer_deadline`]: the deadline of a process whose agent does not answer.
//! - [`kill`]: ending a process with the rights of its user.
//! - [`paths`]: the path of the agent's socket.
//!
//! The crate `ipc` defines the frames; this crate only transports them.

pub mod answer_deadline;
pub mod boot_time;
pub mod descriptor_shares;
pub mod exiting;
pub mod frames;
#[cfg(test)]
mod golden_tests;
pub mod kill;
mod mutation;
pub mod owners;
pub mod passrights;
pub mod paths;
pub mod peer;
mod process;
mod ring_mapping;
pub mod socket;
pub mod wakeup;

pub use frames::{
    HoldRefused, ReceiveError, RestoredItem, connect, connect_with_timeout, frame_socket, receive_frame,
    send_frame, set_timeout, try_send_frame,
};
pub use mutation::Mutation;
pub use process::start_time;
pub use ring_mapping::RingMapping;
