//! Provider for machines joined by a network: a software RNIC in the target. Its threads serve one-sided work from the wire and never
//! wake the application; keys are checked on every access, as a NIC would.
//!
//! Both ends prove that they have the cluster's key before anything else is said (Noise). The bytes are described in
//! `docs/formats/fabric-tcp.md`.
//!
//! A connection that breaks is made anew and goes on where it was: the target remembers what it has done of each session, so the fate of
//! every posted operation is known. Only if the target itself is gone is it unknown.
//!
//! - `endpoint`, `stream`: the initiator's end. `session`: the target's, a state machine over bytes that does no I/O.
//! - `serve`: the threads that turn sessions. `door`: lets initiators in. `target`: what the memory's owner holds.
//! - `spin`: both ends go on looking for a moment before they sleep.
//! - [`wire`]: the bytes, after those of [`crate::handshake`].

mod acceptor;
mod busy_poll;
mod counters;
mod endpoint;
mod rate;
mod reply;
mod serve;
mod session;
mod stream;
mod target;
pub mod wire;

pub use endpoint::{TcpEndpoint, connect};
pub use stream::{avoid_pacing, connect_unpaced};
pub use target::TcpTarget;

use std::time::Duration;

use crate::handshake::hello;
use crate::limits::{ENDPOINTS_LIMIT, Limits, OutOfBounds, check_options};
use crate::target::TargetError;

/// Threads of one target, at most.
pub const THREADS_LIMIT: usize = 64;
/// Within this time an answer or the next request comes, where looking for it pays: a few round trips of a fast network.
const SPIN_TIME: Duration = Duration::from_micros(100);

/// How a target is set up. Limits are told to endpoints when they connect.
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
    /// Threads that serve, at most [`THREADS_LIMIT`].
    pub threads: usize,
    /// Whether everything is encrypted, whatever the endpoint wants.
    pub encrypt: bool,
    /// What each tenant may take.
    pub rate: Rate,
    /// How long a thread looks for the next request before it sleeps, while that pays. Takes a processor under load; zero takes none.
    pub spin_time: Duration,
}

/// What a tenant may take of one target, all its endpoints together; more waits. Bursts of a tenth of a second pass.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Rate {
    /// Bytes read and written.
    pub bytes_per_s: Option<u64>,
    /// Operations.
    pub operations_per_s: Option<u64>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            endpoints_max: ENDPOINTS_LIMIT,
            regions_max: crate::REGIONS_LIMIT,
            windows_max: 65_536,
            limits: Limits::default(),
            threads: 1,
            encrypt: false,
            rate: Rate::default(),
            spin_time: SPIN_TIME,
        }
    }
}

impl Options {
    fn check(&self) -> Result<(), TargetError> {
        let fault = OutOfBounds::first(&[
            ("endpoints_max", self.endpoints_max, ENDPOINTS_LIMIT),
            ("regions_max", self.regions_max, crate::REGIONS_LIMIT),
            ("windows_max", self.windows_max, crate::WINDOWS_LIMIT),
            ("threads", self.threads, THREADS_LIMIT),
        ]);
        let of_limits = || hello::limits_fault(&self.limits).map(|name| format!("{name} is out of bounds"));
        check_options("cannot set up a TCP target", fault.map(|fault| fault.to_string()).or_else(of_limits))
    }
}

/// How an initiator connects.
#[derive(Clone, Debug)]
pub struct ConnectOptions {
    /// Whether everything is encrypted, whatever the target wants.
    pub encrypt: bool,
    /// An operation that has no answer for so long breaks the endpoint.
    pub operation_time: Duration,
    /// A broken connection is tried again for so long. A target that refuses is gone at once.
    pub reconnect_time: Duration,
    /// How long a wait looks for the answer before it sleeps, while that pays.
    pub spin_time: Duration,
}

impl Default for ConnectOptions {
    fn default() -> Self {
        Self {
            encrypt: false,
            operation_time: Duration::from_secs(10),
            reconnect_time: Duration::from_secs(2),
            spin_time: SPIN_TIME,
        }
    }
}
