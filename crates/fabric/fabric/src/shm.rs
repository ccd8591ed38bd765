//! Provider for processes of one user on one machine. The initiator maps the target's regions, and
//! does the copies and atomics itself. The data path has no system call.
//!
//! A mapping cannot be revoked, so both ends belong to one trust domain. The checks detect
//! mistakes, stale keys and ended leases; they do not stop a hostile peer. The format is in
//! `docs/formats/fabric-shm.md`.
//!
//! An endpoint must not be used in a child after `fork`, because parent and child would share its
//! slot.

mod acceptor;
mod endpoint;
#[cfg(debug_assertions)]
#[doc(hidden)]
pub mod fuzz_target;
#[cfg(test)]
mod golden_tests;
pub mod handshake;
mod inboxes;
mod mailbox;
mod regions;
mod retire;
mod socket;
mod target;
mod watch;

pub use endpoint::{ShmEndpoint, connect};
pub use retire::retire;
pub use target::ShmTarget;

use crate::keys::REGIONS_DEFAULT;
use crate::limits::{ENDPOINTS_DEFAULT, ENDPOINTS_LIMIT, Limits, OutOfBounds, check_options};
use crate::target::TargetError;

/// The options of a target. Endpoints learn the limits when they connect.
#[derive(Clone, Debug)]
pub struct ShmOptions {
    /// Greatest number of endpoints, at most [`ENDPOINTS_LIMIT`].
    pub endpoints_max: usize,
    /// Greatest number of endpoints of one tenant, at most [`ENDPOINTS_LIMIT`].
    pub endpoints_per_tenant_max: usize,
    /// Greatest number of regions, at most [`crate::REGIONS_LIMIT`].
    pub regions_max: usize,
    /// Greatest number of windows, at most [`crate::WINDOWS_LIMIT`].
    pub windows_max: usize,
    /// The limits of one endpoint.
    pub limits: Limits,
    /// The only user id that may connect. The default is that of the target's process.
    pub peer_uid: u32,
}

impl Default for ShmOptions {
    fn default() -> Self {
        Self {
            endpoints_max: ENDPOINTS_DEFAULT,
            endpoints_per_tenant_max: ENDPOINTS_LIMIT,
            regions_max: REGIONS_DEFAULT,
            windows_max: 65_536,
            limits: Limits::default(),
            peer_uid: rustix::process::getuid().as_raw(),
        }
    }
}

impl ShmOptions {
    fn check(&self) -> Result<(), TargetError> {
        let fault = OutOfBounds::first(&[
            ("endpoints_max", self.endpoints_max, ENDPOINTS_LIMIT),
            ("endpoints_per_tenant_max", self.endpoints_per_tenant_max, ENDPOINTS_LIMIT),
            ("regions_max", self.regions_max, crate::REGIONS_LIMIT),
            ("windows_max", self.windows_max, crate::WINDOWS_LIMIT),
        ]);
        let fault = fault.or_else(|| self.limits.fault()).map(|fault| fault.to_string());
        check_options("cannot set up a shared-memory target", fault)
    }
}
