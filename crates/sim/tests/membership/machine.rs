//! The machine of a host of the simulation: its clock, and its connections to nodes.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use aquifer_directory::Directory;
use aquifer_directory::names::{self, AgentRecord};
use aquifer_directory::sim::SimDirectory;
use aquifer_fabric::sim::{SimFabric, SimTarget};
use aquifer_fabric::{Endpoint, EndpointError, FabricAddress, Host, Identity, Target};
use aquifer_host::environment::HostEnvironment;

/// The processes of nodes, by their addresses.
#[derive(Clone, Debug, Default)]
pub struct Acceptors(Arc<Mutex<BTreeMap<String, Acceptor>>>);

/// The process of a node that accepts connections of hosts.
#[derive(Debug)]
struct Acceptor {
    target: SimTarget,
    directory: SimDirectory,
    /// Hosts whose latest epoch the process knows.
    known: BTreeSet<Host>,
}

impl Acceptors {
    /// Replaces the process at an address by a new one that knows these hosts.
    pub fn open(&self, address: String, target: SimTarget, directory: SimDirectory, known: BTreeSet<Host>) {
        self.lock().insert(address, Acceptor { target, directory, known });
    }

    /// Notes hosts that the process at an address knows now.
    pub fn note(&self, address: &str, hosts: impl Iterator<Item = Host>) {
        if let Some(acceptor) = self.lock().get_mut(address) {
            acceptor.known.extend(hosts);
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, BTreeMap<String, Acceptor>> {
        self.0.lock().expect("no thread panics while it holds the lock")
    }
}

impl Acceptor {
    /// Asks the directory about a host that the process does not know: it may have been recovered
    /// before the node came.
    fn admit(&mut self, identity: Identity) -> Result<(), EndpointError> {
        let Identity { host, epoch, .. } = identity;
        if self.known.contains(&host) {
            return Ok(());
        }
        let refuse =
            |error: io::Error| EndpointError::Unreachable { address: "a node".into(), source: error };
        match self.directory.get(&names::agent_key(host.0)) {
            Ok(entry) => {
                let record = entry.map(|entry| names::decode::<AgentRecord>(&entry).expect("it is valid"));
                let fenced = record.map_or(epoch, |record| record.epoch - 1);
                self.target.fence(host, fenced);
                self.known.insert(host);
                Ok(())
            }
            // It does not say that the node has ended.
            Err(_) => Err(refuse(io::Error::from_raw_os_error(libc::ENOBUFS))),
        }
    }
}

/// A machine.
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

    /// The time since the machine was started, without those times when it was suspended.
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
        identity: Identity,
    ) -> Result<Box<dyn Endpoint>, EndpointError> {
        let mut acceptors = self.acceptors.lock();
        let Some(acceptor) = acceptors.get_mut(&address.address()) else {
            let source = io::ErrorKind::ConnectionRefused.into();
            return Err(EndpointError::Unreachable { address: address.address(), source });
        };
        drop(self.fabric.connect(acceptor.target.node(), identity)?);
        acceptor.admit(identity)?;
        self.fabric.connect(acceptor.target.node(), identity)
    }

    fn is_blocking(&self) -> bool {
        false
    }
}
