//! The machine of a simulated host: its clock, and its connections to nodes.

use std::collections::BTreeMap;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use aquifer_fabric::sim::{SimFabric, SimTarget};
use aquifer_fabric::{Endpoint, EndpointError, FabricAddress, Identity};
use aquifer_host::environment::HostEnvironment;
use aquifer_pool::NodeClass;

/// The targets of the processes of nodes, by their addresses.
#[derive(Clone, Debug, Default)]
pub struct Acceptors(Arc<Mutex<BTreeMap<String, SimTarget>>>);

impl Acceptors {
    /// Replaces the process at an address by a new one.
    pub fn open(&self, address: String, target: SimTarget) {
        self.lock().insert(address, target);
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, BTreeMap<String, SimTarget>> {
        self.0.lock().expect("no thread panics while it holds the lock")
    }
}

/// A machine with a monotonic clock.
#[derive(Debug)]
pub struct SimMachine {
    fabric: SimFabric,
    acceptors: Acceptors,
    started: Instant,
    now_ms: AtomicU64,
}

impl SimMachine {
    pub fn new(fabric: &SimFabric, acceptors: &Acceptors) -> Arc<Self> {
        Arc::new(Self {
            fabric: fabric.clone(),
            acceptors: acceptors.clone(),
            started: Instant::now(),
            now_ms: AtomicU64::new(0),
        })
    }

    pub fn advance(&self, ms: u64) {
        self.now_ms.fetch_add(ms, Relaxed);
    }

    /// The time since the start of the machine, without the time of suspensions.
    pub fn uptime(&self) -> Duration {
        Duration::from_millis(self.now_ms.load(Relaxed))
    }
}

impl HostEnvironment for SimMachine {
    fn now(&self) -> Instant {
        self.started + self.uptime()
    }

    fn connect(
        &self,
        address: &FabricAddress,
        _class: NodeClass,
        identity: Identity,
    ) -> Result<Box<dyn Endpoint>, EndpointError> {
        let acceptors = self.acceptors.lock();
        let Some(target) = acceptors.get(&address.address()) else {
            let source = io::ErrorKind::ConnectionRefused.into();
            return Err(EndpointError::Unreachable { address: address.address(), source });
        };
        self.fabric.connect(target.node(), identity)
    }

    fn is_blocking(&self) -> bool {
        false
    }
}
