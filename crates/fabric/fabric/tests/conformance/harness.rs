//! The interface by which the suite tests a provider, and a client that keeps tests short.

use std::sync::Arc;

use aquifer_fabric::ClusterKey;
use aquifer_fabric::{
    Access, Completion, Endpoint, EndpointError, Host, Identity, Key, Limits, LocalKey, LocalSlice, Memory,
    Region, RemoteAddr, Scope, Target, Tenant, Verb, Work, WorkError,
};

pub const KEY: ClusterKey = ClusterKey([7; 32]);
pub const HOST: Host = Host(7);
pub const WHO: Identity = Identity { host: HOST, epoch: 5, tenant: Tenant(70) };
pub const REGION_BYTES: usize = 1 << 20;

/// Limits small enough that tests reach each of them.
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
    /// Waits, or plays an event of the simulation.
    fn pass_time(&self) {
        std::thread::yield_now();
    }
    fn kill_target(&mut self);

    fn region(&self, access: Access, scope: Scope) -> (Arc<Memory>, Region) {
        let memory = Arc::new(Memory::create("region", REGION_BYTES).unwrap());
        let region = self.target().register(Arc::clone(&memory), access, scope).unwrap();
        (memory, region)
    }

    fn client(&self, who: Identity) -> SuiteClient<'_, Self> {
        self.client_of(self.connect(who).unwrap())
    }

    fn client_of(&self, mut endpoint: Box<dyn Endpoint>) -> SuiteClient<'_, Self> {
        let memory = Arc::new(Memory::create("local", REGION_BYTES).unwrap());
        let local = endpoint.register_local(Arc::clone(&memory)).unwrap();
        SuiteClient { harness: self, endpoint, memory, local }
    }
}

/// An endpoint with local memory.
pub struct SuiteClient<'a, H: Harness> {
    harness: &'a H,
    pub endpoint: Box<dyn Endpoint>,
    pub memory: Arc<Memory>,
    pub local: LocalKey,
}

impl<H: Harness> SuiteClient<'_, H> {
    /// Posts a signalled batch and waits for its completions.
    pub fn run(&mut self, batch: &[Work]) -> Vec<Completion> {
        self.endpoint.post(batch).unwrap();
        self.wait(batch.len())
    }

    /// Waits for `count` completions.
    pub fn wait(&mut self, count: usize) -> Vec<Completion> {
        let mut done = Vec::new();
        while done.len() < count {
            let wanted = count - done.len();
            self.endpoint.poll(&mut done, wanted);
            self.harness.pass_time();
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
