//! Provider for two processes of one machine and one user: the initiator maps the target's
//! regions, and does the copying and the atomics itself. No system call on the data path.
//!
//! A mapping cannot be revoked, so both ends belong to one trust domain: the checks guard against
//! mistakes and against lateness (stale keys, lost leases), not against a hostile peer.
//! The bytes are described in `docs/formats/fabric-shm.md`.
//!
//! An endpoint must not be used in a child after `fork`: parent and child would share its slot.

mod door;
mod endpoint;
#[cfg(test)]
mod golden_tests;
pub mod handshake;
mod mailbox;
mod retire;
mod socket;
mod target;
mod watch;

pub use endpoint::{ShmEndpoint, connect};
pub use retire::retire;
pub use target::ShmTarget;

use std::time::Duration;

use crate::work::Limits;

/// Endpoints of one target, at most.
pub const ENDPOINTS_LIMIT: usize = 256;
/// Regions of one target, at most: their descriptors must fit one message.
pub const REGIONS_LIMIT: usize = crate::REGIONS_LIMIT;
/// Posted and not yet polled operations of one endpoint, at most.
pub const QUEUE_DEPTH_LIMIT: usize = 65_536;
/// Bytes of one message, at most.
pub const MESSAGE_BYTES_LIMIT: u32 = 65_536;
/// Messages waiting in one direction of one endpoint, at most.
pub const RECEIVE_DEPTH_LIMIT: usize = 4096;
/// Pieces of local memory of one endpoint, at most.
pub const LOCAL_REGIONS_LIMIT: usize = 65_536;
/// Connections that have not yet said who they are; more wait in the socket's backlog.
pub const PENDING_LIMIT: usize = 64;
/// A connection that has not said who it is by then is closed.
pub const HANDSHAKE_TIME: Duration = Duration::from_secs(5);

/// How a target is set up. Every number is a limit that endpoints are told of when they connect.
#[derive(Clone, Debug)]
pub struct Options {
    /// Endpoints, at most [`ENDPOINTS_LIMIT`].
    pub endpoints_max: usize,
    /// Regions, at most [`REGIONS_LIMIT`].
    pub regions_max: usize,
    /// Windows, at most [`crate::WINDOWS_LIMIT`].
    pub windows_max: usize,
    /// What one endpoint can bear.
    pub limits: Limits,
    /// The only user who may connect; by default the one who runs the target.
    pub peer_uid: u32,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            endpoints_max: ENDPOINTS_LIMIT,
            regions_max: REGIONS_LIMIT,
            windows_max: 65_536,
            limits: Limits::default(),
            peer_uid: rustix::process::getuid().as_raw(),
        }
    }
}

impl Options {
    /// The first number that is out of bounds, as a sentence.
    fn fault(&self) -> Option<String> {
        let limits = &self.limits;
        let message_bytes = usize::try_from(limits.message_bytes_max).unwrap_or(usize::MAX);
        let message_limit = usize::try_from(MESSAGE_BYTES_LIMIT).unwrap_or(usize::MAX);
        let bounds = [
            ("endpoints_max", self.endpoints_max, ENDPOINTS_LIMIT),
            ("regions_max", self.regions_max, REGIONS_LIMIT),
            ("windows_max", self.windows_max, crate::WINDOWS_LIMIT),
            ("queue_depth", limits.queue_depth, QUEUE_DEPTH_LIMIT),
            ("message_bytes_max", message_bytes, message_limit),
            ("receive_depth", limits.receive_depth, RECEIVE_DEPTH_LIMIT),
            ("local_regions_max", limits.local_regions_max, LOCAL_REGIONS_LIMIT),
        ];
        bounds
            .into_iter()
            .find(|&(_, value, limit)| value == 0 || value > limit)
            .map(|(name, value, limit)| format!("{name} is {value}, it must be between 1 and {limit}"))
    }
}
