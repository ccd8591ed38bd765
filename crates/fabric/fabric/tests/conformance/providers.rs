//! Harnesses of the providers that need no device.

use std::sync::atomic::{AtomicU64, Ordering};

use aquifer_fabric::multiplex::{MultiplexedEndpoint, Multiplexer};
use aquifer_fabric::shm::{self, ShmTarget};
use aquifer_fabric::sim::{SimFabric, SimOptions, SimTarget};
use aquifer_fabric::tcp::{self, ConnectOptions, TcpTarget};
use aquifer_fabric::{Endpoint, EndpointError, Identity, Limits, PostError, Target, Work, forward_endpoint};

use super::harness::{ENDPOINTS_MAX, Harness, KEY, LIMITS, REGIONS_MAX, WINDOWS_MAX};

pub struct ShmHarness {
    target: Option<ShmTarget>,
    folder: tempfile::TempDir,
}

impl Harness for ShmHarness {
    fn start() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let options = shm::ShmOptions {
            endpoints_max: ENDPOINTS_MAX,
            regions_max: REGIONS_MAX,
            windows_max: WINDOWS_MAX,
            limits: LIMITS,
            ..shm::ShmOptions::default()
        };
        let target = ShmTarget::listen(&folder.path().join("node"), options).unwrap();
        Self { target: Some(target), folder }
    }

    fn target(&self) -> &dyn Target {
        self.target.as_ref().unwrap()
    }

    fn connect(&self, who: Identity) -> Result<Box<dyn Endpoint>, EndpointError> {
        shm::connect(&self.folder.path().join("node"), who)
    }

    fn kill_target(&mut self) {
        self.target = None;
    }
}

/// Harness of TCP, encrypted if `SEALED`.
pub struct TcpHarness<const SEALED: bool> {
    target: Option<TcpTarget>,
    address: std::net::SocketAddr,
}

impl<const SEALED: bool> Harness for TcpHarness<SEALED> {
    fn start() -> Self {
        let options = tcp::TcpOptions {
            endpoints_max: ENDPOINTS_MAX,
            regions_max: REGIONS_MAX,
            windows_max: WINDOWS_MAX,
            limits: LIMITS,
            threads: 2,
            encrypt: false,
            ..tcp::TcpOptions::default()
        };
        let target = TcpTarget::listen("127.0.0.1:0".parse().unwrap(), &KEY, options).unwrap();
        Self { address: target.address(), target: Some(target) }
    }

    fn target(&self) -> &dyn Target {
        self.target.as_ref().unwrap()
    }

    fn connect(&self, who: Identity) -> Result<Box<dyn Endpoint>, EndpointError> {
        let options = ConnectOptions { encrypt: SEALED, ..ConnectOptions::default() };
        tcp::connect(self.address, &KEY, who, options)
    }

    fn kill_target(&mut self) {
        self.target = None;
    }
}

/// Harness of multiplexed endpoints over TCP.
pub struct MultiplexedHarness {
    target: Option<TcpTarget>,
    address: std::net::SocketAddr,
}

/// Number of users of one endpoint.
const USERS: usize = 2;

/// An endpoint of one user, and that of another user of the same multiplexer.
#[derive(Debug)]
struct Neighbours {
    endpoint: MultiplexedEndpoint,
    _neighbour: MultiplexedEndpoint,
    _multiplexer: Multiplexer,
}

impl Endpoint for Neighbours {
    forward_endpoint!(
        endpoint: poll, wait, poll_fd, register_local, receive, regions, limits, is_broken, is_away,
        drain_handle
    );

    fn post(&mut self, batch: &[Work]) -> Result<(), PostError> {
        self.endpoint.post(batch)
    }
}

impl Harness for MultiplexedHarness {
    fn start() -> Self {
        let options = tcp::TcpOptions {
            endpoints_max: ENDPOINTS_MAX,
            regions_max: REGIONS_MAX,
            windows_max: WINDOWS_MAX,
            limits: Limits {
                queue_depth: USERS * LIMITS.queue_depth,
                local_regions_max: USERS * LIMITS.local_regions_max,
                ..LIMITS
            },
            encrypt: false,
            ..tcp::TcpOptions::default()
        };
        let target = TcpTarget::listen("127.0.0.1:0".parse().unwrap(), &KEY, options).unwrap();
        Self { address: target.address(), target: Some(target) }
    }

    fn target(&self) -> &dyn Target {
        self.target.as_ref().unwrap()
    }

    fn connect(&self, who: Identity) -> Result<Box<dyn Endpoint>, EndpointError> {
        let options = ConnectOptions { encrypt: false, ..ConnectOptions::default() };
        let endpoint = tcp::connect(self.address, &KEY, who, options)?;
        let multiplexer = Multiplexer::new(endpoint, USERS).unwrap();
        let user = || multiplexer.add_user().expect("there is room for two");
        let (endpoint, neighbour) = (user(), user());
        assert!(multiplexer.add_user().is_none(), "and for no more");
        Ok(Box::new(Neighbours { endpoint, _neighbour: neighbour, _multiplexer: multiplexer }))
    }

    fn kill_target(&mut self) {
        self.target = None;
    }
}

pub struct SimHarness {
    fabric: SimFabric,
    target: SimTarget,
}

/// Each test of the simulation has its own seed.
static NEXT_SEED: AtomicU64 = AtomicU64::new(1);

impl Harness for SimHarness {
    fn start() -> Self {
        let options = SimOptions {
            endpoints_max: ENDPOINTS_MAX,
            regions_max: REGIONS_MAX,
            windows_max: WINDOWS_MAX,
            limits: LIMITS,
            ..SimOptions::default()
        };
        let fabric = SimFabric::new(NEXT_SEED.fetch_add(1, Ordering::Relaxed), options);
        let target = fabric.add_node();
        Self { fabric, target }
    }

    fn target(&self) -> &dyn Target {
        &self.target
    }

    fn connect(&self, who: Identity) -> Result<Box<dyn Endpoint>, EndpointError> {
        self.fabric.connect(self.target.node(), who)
    }

    fn pass_time(&self) {
        self.fabric.step();
    }

    fn kill_target(&mut self) {
        self.fabric.crash_node(self.target.node());
    }
}
