//! A node on shared memory, a directory whose connection can be cut and whose clock the test moves, and clients.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::Duration;

use aquifer_directory::clock::ManualClock;
use aquifer_directory::embedded::EmbeddedDirectory;
use aquifer_directory::names::{self, AgentRecord, NodeRecord};
use aquifer_directory::{
    Directory, DirectoryEntry, DirectoryError, Lease, LeaseId, Listing, Transaction, TransactionOutcome,
    Watch, WatchEvent,
};
use aquifer_fabric::{
    Host, Identity, LocalKey, LocalSlice, Memory, RemoteAddr, Tenant, Verb, Work, WorkError, shm,
};
use aquifer_node::{Listen, NodeError, NodeOptions, Ready, Shutdown, serve};
use aquifer_pool::{Extent, NodeId, PoolClient, PoolError, SizeClass};

pub const TTL: Duration = Duration::from_millis(300);
pub const BYTES: u64 = 4 << 20;

/// A directory whose connection can be cut.
#[derive(Debug)]
pub struct Wire {
    pub inner: EmbeddedDirectory,
    pub cut: AtomicBool,
    /// Calls that the cut has failed.
    pub failed: AtomicU64,
}

impl Wire {
    fn through(&self) -> Result<&EmbeddedDirectory, DirectoryError> {
        if self.cut.load(Ordering::SeqCst) {
            self.failed.fetch_add(1, Ordering::SeqCst);
            let (address, cause) = ("here".to_owned(), "cut by the test".to_owned());
            return Err(DirectoryError::Unavailable { address, cause });
        }
        Ok(&self.inner)
    }
}

/// A handle to it, as the node gets one.
#[derive(Clone, Debug)]
pub struct Wired(Arc<Wire>);

impl Directory for Wired {
    fn get(&self, key: &str) -> Result<Option<DirectoryEntry>, DirectoryError> {
        self.0.through()?.get(key)
    }
    fn list(&self, prefix: &str) -> Result<Listing, DirectoryError> {
        self.0.through()?.list(prefix)
    }
    fn transaction(&self, transaction: &Transaction) -> Result<TransactionOutcome, DirectoryError> {
        self.0.through()?.transaction(transaction)
    }
    fn lease_grant(&self, ttl: Duration) -> Result<Lease, DirectoryError> {
        self.0.through()?.lease_grant(ttl)
    }
    fn lease_keep_alive(&self, id: LeaseId) -> Result<(), DirectoryError> {
        self.0.through()?.lease_keep_alive(id)
    }
    fn lease_revoke(&self, id: LeaseId) -> Result<(), DirectoryError> {
        self.0.through()?.lease_revoke(id)
    }
    fn watch(&self, prefix: &str, from_revision: u64) -> Result<Box<dyn Watch>, DirectoryError> {
        let inner = self.0.through()?.watch(prefix, from_revision)?;
        Ok(Box::new(WiredWatch { inner, wire: Arc::clone(&self.0) }))
    }
}

#[derive(Debug)]
pub struct WiredWatch {
    pub inner: Box<dyn Watch>,
    pub wire: Arc<Wire>,
}

impl Watch for WiredWatch {
    fn next(&mut self, timeout: Duration) -> Result<Option<WatchEvent>, DirectoryError> {
        self.wire.through()?;
        self.inner.next(timeout)
    }
}

pub struct Bed {
    pub dir: tempfile::TempDir,
    pub clock: Arc<ManualClock>,
    pub wire: Arc<Wire>,
}

impl Bed {
    pub fn new() -> Self {
        let dir = tempfile::tempdir().expect("a directory");
        let clock = Arc::new(ManualClock::default());
        let inner = EmbeddedDirectory::open_with_clock(&dir.path().join("db"), Arc::clone(&clock) as Arc<_>)
            .expect("a file");
        Self {
            dir,
            clock,
            wire: Arc::new(Wire { inner, cut: AtomicBool::new(false), failed: AtomicU64::new(0) }),
        }
    }

    pub fn directory(&self) -> &EmbeddedDirectory {
        &self.wire.inner
    }

    pub fn socket(&self) -> PathBuf {
        self.dir.path().join("node")
    }

    pub fn options(&self, id: u16, bytes: u64) -> NodeOptions {
        let wire = Arc::clone(&self.wire);
        let connect = Box::new(move || {
            wire.through()?;
            Ok(Arc::new(Wired(Arc::clone(&wire))) as Arc<dyn Directory>)
        });
        let mut options =
            NodeOptions::new(id, bytes, Listen::Shm(self.socket(), shm::Options::default()), connect);
        options.lease_ttl = TTL;
        options
    }

    pub fn record(&self, id: u16) -> Option<NodeRecord> {
        let entry = self.directory().get(&names::node_key(id)).expect("the directory answers")?;
        Some(names::decode(&entry).expect("a record"))
    }

    pub fn start(&self, id: u16) -> Serving {
        Self::start_with(self.options(id, BYTES))
    }

    pub fn start_with(options: NodeOptions) -> Serving {
        let shutdown = Shutdown::new();
        let theirs = shutdown.clone();
        let (tell, told) = mpsc::channel();
        let thread = std::thread::spawn(move || {
            serve(&options, &theirs, |ready: &Ready| tell.send(ready.clone()).expect("the test waits"))
        });
        let ready = told.recv().expect("it serves");
        Serving { shutdown, thread, ready }
    }

    /// A host with a lease.
    pub fn enrol(&self, host: u16) -> Lease {
        let lease = self.directory().lease_grant(Duration::from_secs(1000)).expect("a lease");
        let record = AgentRecord {
            host,
            address: "there".to_owned(),
            epoch: lease.epoch,
            claim_epoch: lease.epoch,
            is_recovery: false,
        };
        self.directory().put(&names::agent_key(host), &names::encode(&record), Some(lease.id)).expect("room");
        lease
    }

    pub fn client(&self, host: u16, epoch: u64) -> Result<PoolClient, String> {
        self.client_of(host, epoch, Tenant(0))
    }

    pub fn client_of(&self, host: u16, epoch: u64, tenant: Tenant) -> Result<PoolClient, String> {
        let who = Identity { host: Host(host), epoch, tenant };
        let endpoint = shm::connect(&self.socket(), who).map_err(|error| error.to_string())?;
        let mut client = PoolClient::new(Host(host), tenant);
        client.add_node(NodeId(1), endpoint).map_err(|error| error.to_string())?;
        Ok(client)
    }
}

pub struct Serving {
    pub shutdown: Shutdown,
    pub thread: JoinHandle<Result<(), NodeError>>,
    pub ready: Ready,
}

impl Serving {
    pub fn stop(self) {
        self.shutdown.request();
        self.thread.join().expect("no panic").expect("a clean end");
    }
}

pub fn use_it(client: &mut PoolClient) -> Result<(), PoolError> {
    let extent = client.allocate(NodeId(1), SizeClass::SPAN)?;
    client.free(extent)
}

/// Use the node until it shuts us out.
pub fn until_fenced(client: &mut PoolClient) {
    loop {
        match use_it(client) {
            Ok(()) => std::thread::yield_now(),
            Err(PoolError::NodeGone { cause: WorkError::Fenced, .. }) => return,
            Err(error) => panic!("{error}"),
        }
    }
}

/// A section's worth of a client's own memory, to read and write extents with.
pub struct Stamp {
    memory: Arc<Memory>,
    key: LocalKey,
}

impl Stamp {
    pub fn new(client: &mut PoolClient) -> Self {
        let memory = Arc::new(Memory::create("stamps", 2 << 20).expect("memory"));
        let endpoint = client.endpoint(NodeId(1)).expect("it is connected");
        let key = endpoint.register_local(Arc::clone(&memory)).expect("room");
        Self { memory, key }
    }

    /// Write something all over a section.
    pub fn write(&self, client: &mut PoolClient, extent: &Extent) {
        self.memory.write(0, &[7; 2 << 20]);
        let (local, remote) = self.ends(extent);
        execute(client, Verb::Write { local, remote });
    }

    /// Whether a section is zero from end to end.
    pub fn finds_zeros(&self, client: &mut PoolClient, extent: &Extent) -> bool {
        self.finds(client, extent, 0)
    }

    /// Whether a section has this byte from end to end.
    pub fn finds(&self, client: &mut PoolClient, extent: &Extent, byte: u8) -> bool {
        let mut found = vec![!byte; 2 << 20];
        self.memory.write(0, &found);
        let (local, remote) = self.ends(extent);
        execute(client, Verb::Read { local, remote });
        self.memory.read(0, &mut found);
        found.iter().all(|found| *found == byte)
    }

    fn ends(&self, extent: &Extent) -> (LocalSlice, RemoteAddr) {
        let local = LocalSlice { key: self.key, offset: 0, len: 2 << 20 };
        (local, RemoteAddr { addr: extent.addr, key: extent.key })
    }
}

fn execute(client: &mut PoolClient, verb: Verb) {
    let endpoint = client.endpoint(NodeId(1)).expect("it is connected");
    endpoint.post(&[Work { id: 1, verb, signalled: true }]).expect("room");
    let mut done = Vec::new();
    while endpoint.poll(&mut done, 1) == 0 {
        std::thread::yield_now();
    }
    assert_eq!(done.pop().map(|done| done.outcome), Some(Ok(2 << 20)));
}
