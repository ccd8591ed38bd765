//! What a provider must offer to be tested, and a client that makes tests short.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use aquifer_fabric::shm::{self, ShmTarget};
use aquifer_fabric::sim::{SimFabric, SimOptions, SimTarget};
use aquifer_fabric::tcp::{self, ClusterKey, ConnectOptions, TcpTarget};
use aquifer_fabric::verbs::{self, VerbsTarget};
use aquifer_fabric::{
    Access, Completion, Endpoint, EndpointError, Host, Identity, Key, Limits, LocalKey, LocalSlice, Memory,
    Region, RemoteAddr, Scope, Target, Tenant, Verb, Work, WorkError,
};

pub const HOST: Host = Host(7);
pub const WHO: Identity = Identity { host: HOST, epoch: 5, tenant: Tenant(70) };
pub const REGION_BYTES: usize = 1 << 20;

/// Small enough that tests reach every limit.
pub const LIMITS: Limits = Limits {
    queue_depth: 16,
    transfer_bytes_max: 256 << 10,
    message_bytes_max: 512,
    receive_depth: 4,
    local_regions_max: 3,
};
pub const ENDPOINTS_MAX: usize = 5;
pub const REGIONS_MAX: usize = 4;
pub const WINDOWS_MAX: usize = 6;

/// A provider with one target.
pub trait Harness: Sized {
    fn start() -> Self;
    fn target(&self) -> &dyn Target;
    fn connect(&self, who: Identity) -> Result<Box<dyn Endpoint>, EndpointError>;
    /// Let time pass.
    fn settle(&self);
    fn kill_target(&mut self);

    fn region(&self, access: Access, scope: Scope) -> (Arc<Memory>, Region) {
        let memory = Arc::new(Memory::create("region", REGION_BYTES).unwrap());
        let region = self.target().register(Arc::clone(&memory), access, scope).unwrap();
        (memory, region)
    }

    fn client(&self, who: Identity) -> Client<'_, Self> {
        self.client_of(self.connect(who).unwrap())
    }

    fn client_of(&self, mut endpoint: Box<dyn Endpoint>) -> Client<'_, Self> {
        let memory = Arc::new(Memory::create("local", REGION_BYTES).unwrap());
        let local = endpoint.register_local(Arc::clone(&memory)).unwrap();
        Client { harness: self, endpoint, memory, local }
    }
}

pub struct ShmHarness {
    target: Option<ShmTarget>,
    folder: tempfile::TempDir,
}

impl Harness for ShmHarness {
    fn start() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let options = shm::Options {
            endpoints_max: ENDPOINTS_MAX,
            regions_max: REGIONS_MAX,
            windows_max: WINDOWS_MAX,
            limits: LIMITS,
            ..shm::Options::default()
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

    fn settle(&self) {
        std::thread::yield_now();
    }

    fn kill_target(&mut self) {
        self.target = None;
    }
}

/// Over TCP, as `SEALED` says: encrypted or not.
pub struct TcpHarness<const SEALED: bool> {
    target: Option<TcpTarget>,
    address: std::net::SocketAddr,
}

const KEY: ClusterKey = ClusterKey([7; 32]);

impl<const SEALED: bool> Harness for TcpHarness<SEALED> {
    fn start() -> Self {
        let options = tcp::Options {
            endpoints_max: ENDPOINTS_MAX,
            regions_max: REGIONS_MAX,
            windows_max: WINDOWS_MAX,
            limits: LIMITS,
            threads: 2,
            ..tcp::Options::default()
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

    fn settle(&self) {
        std::thread::yield_now();
    }

    fn kill_target(&mut self) {
        self.target = None;
    }
}

/// Over the RDMA device with the address that the environment names.
pub struct VerbsHarness {
    target: Option<VerbsTarget>,
    address: std::net::SocketAddr,
}

impl Harness for VerbsHarness {
    fn start() -> Self {
        let options = verbs::Options {
            endpoints_max: ENDPOINTS_MAX,
            regions_max: REGIONS_MAX,
            windows_max: WINDOWS_MAX,
            limits: LIMITS,
        };
        let address =
            std::env::var("AQUIFER_VERBS_ADDRESS").expect("AQUIFER_VERBS_ADDRESS is that of an RDMA device");
        let address = std::net::SocketAddr::new(address.parse().expect("an IP address"), 0);
        let target = VerbsTarget::listen(address, &KEY, options).unwrap();
        Self { address: target.address(), target: Some(target) }
    }

    fn target(&self) -> &dyn Target {
        self.target.as_ref().unwrap()
    }

    fn connect(&self, who: Identity) -> Result<Box<dyn Endpoint>, EndpointError> {
        verbs::connect(self.address, &KEY, who)
    }

    fn settle(&self) {
        std::thread::yield_now();
    }

    fn kill_target(&mut self) {
        self.target = None;
    }
}

pub struct SimHarness {
    fabric: SimFabric,
    target: SimTarget,
}

/// Each test of the simulation runs under a seed of its own.
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

    fn settle(&self) {
        self.fabric.step();
    }

    fn kill_target(&mut self) {
        self.fabric.crash_node(self.target.node());
    }
}

/// An endpoint with local memory.
pub struct Client<'a, H: Harness> {
    harness: &'a H,
    pub endpoint: Box<dyn Endpoint>,
    pub memory: Arc<Memory>,
    pub local: LocalKey,
}

impl<H: Harness> Client<'_, H> {
    /// Post all of a signalled batch and wait for as many completions.
    pub fn run(&mut self, batch: &[Work]) -> Vec<Completion> {
        self.endpoint.post(batch).unwrap();
        self.wait(batch.len())
    }

    /// Wait for so many completions.
    pub fn wait(&mut self, count: usize) -> Vec<Completion> {
        let mut done = Vec::new();
        while done.len() < count {
            self.endpoint.poll(&mut done, count);
            self.harness.settle();
        }
        done
    }

    pub fn one(&mut self, verb: Verb) -> Result<u64, WorkError> {
        let done = self.run(&[Work { id: 99, verb, signalled: true }]);
        assert_eq!((done.len(), done[0].id), (1, 99));
        done[0].outcome
    }

    pub fn slice(&self, offset: u64, len: u32) -> LocalSlice {
        LocalSlice { key: self.local, offset, len }
    }

    pub fn read(&mut self, addr: u64, key: Key, len: u32) -> Result<u64, WorkError> {
        let local = self.slice(0, len);
        self.one(Verb::Read { local, remote: RemoteAddr { addr, key } })
    }

    pub fn write(&mut self, addr: u64, key: Key, len: u32) -> Result<u64, WorkError> {
        let local = self.slice(0, len);
        self.one(Verb::Write { local, remote: RemoteAddr { addr, key } })
    }

    pub fn add(&mut self, addr: u64, key: Key, add: u64) -> Result<u64, WorkError> {
        self.one(Verb::FetchAdd { remote: RemoteAddr { addr, key }, add })
    }

    pub fn swap(&mut self, addr: u64, key: Key, old: u64, new: u64) -> Result<u64, WorkError> {
        let remote = RemoteAddr { addr, key };
        self.one(Verb::CompareSwap { remote, expected: old, desired: new })
    }

    pub fn send(&mut self, message: &[u8]) -> Result<u64, WorkError> {
        self.memory.write(0, message);
        let local = self.slice(0, u32::try_from(message.len()).unwrap());
        self.one(Verb::Send { local })
    }
}

pub fn signalled(id: u64, verb: Verb) -> Work {
    Work { id, verb, signalled: true }
}
