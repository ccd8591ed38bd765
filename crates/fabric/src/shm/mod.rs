//! Provider for two processes of one machine and one user: the initiator maps the target's
//! regions, and does the copying and the atomics itself. No system call on the data path.
//!
//! A mapping cannot be revoked, so both ends belong to one trust domain: the checks guard against
//! mistakes and against lateness (stale keys, lost leases), not against a hostile peer.
//! The bytes are described in `docs/formats/fabric-shm.md`.
//!
//! An endpoint must not be used in a child after `fork`: parent and child would share its slot.

mod acceptor;
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

use crate::limits::{ENDPOINTS_LIMIT, Limits, OutOfBounds, check_options};
use crate::target::TargetError;

/// How a target is set up. Every number is a limit that endpoints are told of when they connect.
#[derive(Clone, Debug)]
pub struct Options {
    /// Endpoints, at most [`ENDPOINTS_LIMIT`].
    pub endpoints_max: usize,
    /// Regions, at most [`crate::REGIONS_LIMIT`].
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
            regions_max: crate::REGIONS_LIMIT,
            windows_max: 65_536,
            limits: Limits::default(),
            peer_uid: rustix::process::getuid().as_raw(),
        }
    }
}

impl Options {
    fn check(&self) -> Result<(), TargetError> {
        let fault = OutOfBounds::first(&[
            ("endpoints_max", self.endpoints_max, ENDPOINTS_LIMIT),
            ("regions_max", self.regions_max, crate::REGIONS_LIMIT),
            ("windows_max", self.windows_max, crate::WINDOWS_LIMIT),
        ]);
        let fault = fault.or_else(|| self.limits.fault()).map(|fault| fault.to_string());
        check_options("cannot set up a shared-memory target", fault)
    }
}
