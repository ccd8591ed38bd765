//! Provider for machines joined by a network: a software RNIC in the target.
//!
//! Threads of the target serve one-sided operations and never wake the application. They check the
//! key of every access, as a network card would. Both ends first prove that they hold the cluster
//! key. The format is in `docs/formats/fabric-tcp.md`.
//!
//! A broken connection is re-established, and its session resumes. The target remembers the answers
//! of each session, so the outcome of every posted operation is known unless the target itself is
//! gone.
//!
//! - `endpoint`, `stream`: the initiator's end.
//! - `session`: the target's end of a session, a state machine over bytes that does no I/O.
//! - `serve`: the threads that serve connections, each of which is a `connection`.
//! - `acceptor`: accepts initiators. `target`: the owner's end. `regions`: regions without a lock.
//! - `busy_poll`: both ends poll before they sleep.
//! - [`wire`]: the bytes that follow the messages of [`crate::handshake`].

mod acceptor;
mod busy_poll;
mod connection;
mod counters;
mod endpoint;
#[cfg(debug_assertions)]
#[doc(hidden)]
pub mod fuzz_target;
mod pending;
mod rate;
mod regions;
mod reply;
mod serve;
mod session;
mod stream;
mod target;
pub mod wire;

pub use endpoint::{TcpEndpoint, connect, connect_with_ticket};
pub use stream::{avoid_pacing, connect_unpaced};
pub use target::TcpTarget;

use std::time::Duration;

use crate::handshake::{Admission, UnixClock, hello};
use crate::keys::REGIONS_DEFAULT;
use crate::limits::{ENDPOINTS_DEFAULT, ENDPOINTS_LIMIT, Limits, OutOfBounds, check_options};
use crate::sessions::SessionLimits;
use crate::target::TargetError;

/// Bound of the threads of one target.
pub const THREADS_LIMIT: usize = 64;
/// The default time to poll before sleeping: a few round trips of a fast network.
const SPIN_TIME: Duration = Duration::from_micros(100);

/// The options of a target. Endpoints learn the limits when they connect.
#[derive(Clone, Debug)]
pub struct TcpOptions {
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
    /// Number of serving threads, at most [`THREADS_LIMIT`].
    pub threads: usize,
    /// Whether the target requires encryption of all traffic. Traffic is plain only if neither end
    /// requires it, and then a peer on the network path can read and change memory.
    pub encrypt: bool,
    /// The limit of each tenant's rate.
    pub rate: Rate,
    /// The time for which a thread polls for the next request before it sleeps. Polling uses a
    /// processor under load; zero disables it.
    pub spin_time: Duration,
    /// The initiators that are admitted.
    pub admission: Admission,
    /// The clock by which tickets expire.
    pub clock: UnixClock,
}

/// The limit of one tenant's rate at a target, for all its endpoints together. Requests above it
/// are delayed. Bursts of up to 100 ms of the rate pass.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Rate {
    /// Bytes read and written per second.
    pub bytes_per_s: Option<u64>,
    /// Operations per second.
    pub operations_per_s: Option<u64>,
}

impl Default for TcpOptions {
    fn default() -> Self {
        Self {
            endpoints_max: ENDPOINTS_DEFAULT,
            endpoints_per_tenant_max: ENDPOINTS_LIMIT,
            regions_max: REGIONS_DEFAULT,
            windows_max: 65_536,
            limits: Limits::default(),
            threads: 1,
            encrypt: true,
            rate: Rate::default(),
            spin_time: SPIN_TIME,
            admission: Admission::default(),
            clock: UnixClock::default(),
        }
    }
}

impl TcpOptions {
    fn session_limits(&self) -> SessionLimits {
        let Self { endpoints_max, endpoints_per_tenant_max, .. } = *self;
        SessionLimits { endpoints_max, endpoints_per_tenant_max }
    }

    fn check(&self) -> Result<(), TargetError> {
        let fault = OutOfBounds::first(&[
            ("endpoints_max", self.endpoints_max, ENDPOINTS_LIMIT),
            ("endpoints_per_tenant_max", self.endpoints_per_tenant_max, ENDPOINTS_LIMIT),
            ("regions_max", self.regions_max, crate::REGIONS_LIMIT),
            ("windows_max", self.windows_max, crate::WINDOWS_LIMIT),
            ("threads", self.threads, THREADS_LIMIT),
        ]);
        let of_limits = || hello::limits_fault(&self.limits).map(|name| format!("{name} is out of bounds"));
        check_options("cannot set up a TCP target", fault.map(|fault| fault.to_string()).or_else(of_limits))
    }
}

/// The options of an initiator.
#[derive(Clone, Debug)]
pub struct ConnectOptions {
    /// Whether the initiator requires encryption of all traffic. See [`TcpOptions::encrypt`].
    pub encrypt: bool,
    /// The timeout of an operation, after which the endpoint is broken. The last tenth is counted
    /// from when this process observed the end of the rest, because it may have been suspended.
    pub operation_time: Duration,
    /// The time for which a broken connection is re-established. A refusal ends the attempts at
    /// once.
    pub reconnect_time: Duration,
    /// The time for which a wait polls for an answer before it sleeps.
    pub spin_time: Duration,
}

impl Default for ConnectOptions {
    fn default() -> Self {
        Self {
            encrypt: true,
            operation_time: Duration::from_secs(10),
            reconnect_time: Duration::from_secs(2),
            spin_time: SPIN_TIME,
        }
    }
}
