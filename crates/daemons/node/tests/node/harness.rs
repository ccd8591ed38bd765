//! A node over shared memory, clients, and a directory that the test can disconnect and whose clock
//! it sets.

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
use aquifer_node::{ListenAddress, NodeError, NodeOptions, Shutdown, serve};
use aquifer_pool::{Extent, NodeId, PoolClient, PoolError, SizeClass};

pub const TTL: Duration = Duration::from_millis(300);
pub const BYTES: u64 = 4 << 20;

/// A directory whose connection the test can cut.
#[derive(Debug)]
pub struct CuttableDirectory {
    pub inner: EmbeddedDirectory,
    pub is_cut: AtomicBool,
    /// Number of calls that have failed because of the cut.
    pub failed_calls: AtomicU64,
}

impl CuttableDirectory {
    fn connected(&self) -> Result<&EmbeddedDirectory, DirectoryError> {
        if self.is_cut.load(Ordering::SeqCst) {
            self.failed_calls.fetch_add(1, Ordering::SeqCst);
            let (address, cause) = ("here".to_owned(), "cut by the test".to_owned());
            return Err(DirectoryError::Unavailable { address, cause });
        }
        Ok(&self.inner)
    }
}

/// The node's connection to the directory.
#[derive(Clone, Debug)]
pub struct DirectoryHandle(Arc<CuttableDirectory>);

impl Directory for DirectoryHandle {
    fn get(&self, key: &str) -> Result<Option<DirectoryEntry>, DirectoryError> {
        self.0.connected()?.get(key)
    }
    fn list(&self, prefix: &str) -> Result<Listing, DirectoryError> {
        self.0.connected()?.list(prefix)
    }
    fn transaction(&self, transaction: &Transaction) -> Result<TransactionOutcome, DirectoryError> {
        self.0.connected()?.transaction(transaction)
    }
    fn lease_grant(&self, ttl: Duration) -> Result<Lease, DirectoryError> {
        self.0.connected()?.lease_grant(ttl)
    }
    fn lease_keep_alive(&self, id: LeaseId) -> Result<(), DirectoryError> {
        self.0.connected()?.lease_keep_alive(id)
    }
    fn lease_revoke(&self, id: LeaseId) -> Result<(), DirectoryError> {
        self.0.connected()?.lease_revoke(id)
    }
    fn watch(&self, prefix: &str, from_revision: u64) -> Result<Box<dyn Watch>, DirectoryError> {
        let inner = self.0.connected()?.watch(prefix, from_revision)?;
        Ok(Box::new(WatchHandle { inner, directory_link: Arc::clone(&self.0) }))
    }
}

#[derive(Debug)]
pub struct WatchHandle {
    pub inner: Box<dyn Watch>,
    pub directory_link: Arc<CuttableDirectory>,
}

impl Watch for WatchHandle {
    fn next(&mut self, timeout: Duration) -> Result<Option<WatchEvent>, DirectoryError> {
        self.directory_link.connected()?;
        self.inner.next(timeout)
    }
}

pub struct NodeHarness {
    pub dir: tempfile::TempDir,
    pub clock: Arc<ManualClock>,
    pub directory_link: Arc<CuttableDirectory>,
}

impl NodeHarness {
    pub fn new() -> Self {
        let dir = tempfile::tempdir().expect("a directory");
        let clock = Arc::new(ManualClock::default());
        let inner = EmbeddedDirectory::open_with_clock(&dir.path().join("db"), Arc::clone(&clock) as Arc<_>)
            .expect("a file");
        Self {
            dir,
            clock,
            directory_link: Arc::new(CuttableDirectory {
                inner,
                is_cut: AtomicBool::new(false),
                failed_calls: AtomicU64::new(0),
            }),
        }
    }

    pub fn directory(&self) -> &EmbeddedDirectory {
        &self.directory_link.inner
    }

    pub fn socket(&self) -> PathBuf {
        self.dir.path().join("node")
    }

    pub fn options(&self, id: u16, bytes: u64) -> NodeOptions {
        let directory_link = Arc::clone(&self.directory_link);
        let connect = Box::new(move || {
            directory_link.connected()?;
            Ok(Arc::new(DirectoryHandle(Arc::clone(&directory_link))) as Arc<dyn Directory>)
        });
        let mut options = NodeOptions::new(
            id,
            bytes,
            ListenAddress::Shm(self.socket(), shm::ShmOptions::default()),
            connect,
        );
        options.lease_ttl = TTL;
        options
    }

    pub fn record(&self, id: u16) -> Option<NodeRecord> {
        let entry = self.directory().get(&names::node_key(id)).expect("the directory answers")?;
        Some(names::decode(&entry).expect("a record"))
    }

    pub fn start(&self, id: u16) -> ServingNode {
        Self::start_with(self.options(id, BYTES))
    }

    pub fn start_with(options: NodeOptions) -> ServingNode {
        let shutdown = Shutdown::new();
        let node_shutdown = shutdown.clone();
        let (sender, receiver) = mpsc::channel();
        let thread = std::thread::spawn(move || {
            serve(&options, &node_shutdown, |record| sender.send(record.clone()).expect("the test waits"))
        });
        let record = receiver.recv().expect("it serves");
        ServingNode { shutdown, thread, record }
    }

    /// Grants a lease to a host, and puts the host's record into the directory.
    pub fn grant_host_lease(&self, host: u16) -> Lease {
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
        self.client_of_tenant(host, epoch, Tenant(0))
    }

    pub fn client_of_tenant(&self, host: u16, epoch: u64, tenant: Tenant) -> Result<PoolClient, String> {
        let identity = Identity { host: Host(host), epoch, tenant };
        let endpoint = shm::connect(&self.socket(), identity).map_err(|error| error.to_string())?;
        let mut client = PoolClient::new(Host(host), tenant);
        client.add_node(NodeId(1), endpoint).map_err(|error| error.to_string())?;
        Ok(client)
    }
}

pub struct ServingNode {
    pub shutdown: Shutdown,
    pub thread: JoinHandle<Result<(), NodeError>>,
    /// The node's first record.
    pub record: NodeRecord,
}

impl ServingNode {
    pub fn stop(self) {
        self.shutdown.request();
        self.thread.join().expect("no panic").expect("a clean end");
    }
}

pub fn allocate_and_free(client: &mut PoolClient) -> Result<(), PoolError> {
    let extent = client.allocate(NodeId(1), SizeClass::SPAN)?;
    client.free(extent)
}

/// Allocates and frees until the node has fenced the client's host.
pub fn wait_until_fenced(client: &mut PoolClient) {
    loop {
        match allocate_and_free(client) {
            Ok(()) => std::thread::yield_now(),
            Err(PoolError::NodeGone { cause: WorkError::Fenced, .. }) => return,
            Err(error) => panic!("{error}"),
        }
    }
}

/// Local memory of the size of a section, to read and write extents.
pub struct SectionBuffer {
    memory: Arc<Memory>,
    key: LocalKey,
}

impl SectionBuffer {
    pub fn new(client: &mut PoolClient) -> Self {
        let memory = Arc::new(Memory::create("buffers", 2 << 20).expect("memory"));
        let endpoint = client.endpoint(NodeId(1)).expect("it is connected");
        let key = endpoint.register_local(Arc::clone(&memory)).expect("room");
        Self { memory, key }
    }

    /// Fills a section with the byte 7.
    pub fn write(&self, client: &mut PoolClient, extent: &Extent) {
        self.memory.write(0, &[7; 2 << 20]);
        let (local, remote) = self.ends(extent);
        execute(client, Verb::Write { local, remote });
    }

    /// True if all bytes of a section are zero.
    pub fn is_zero(&self, client: &mut PoolClient, extent: &Extent) -> bool {
        self.is_filled_with(client, extent, 0)
    }

    /// True if all bytes of a section are `byte`.
    pub fn is_filled_with(&self, client: &mut PoolClient, extent: &Extent, byte: u8) -> bool {
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
