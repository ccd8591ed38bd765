//! A node whose data are on a disk.

use std::sync::Arc;

use aquifer_fabric::tcp::ConnectOptions;
use aquifer_fabric::{
    ClusterKey, FabricAddress, Host, Identity, LocalKey, LocalSlice, Memory, RemoteAddr, Tenant, Verb, Work,
    WorkError,
};
use aquifer_node::{ListenAddress, NodeError, NodeOptions, Shutdown, serve};
use aquifer_pool::{Extent, NodeId, PoolClient, PoolError, SizeClass};

use crate::harness::{BYTES, NodeHarness, ServingNode};
use crate::kept_memory::{self, TestKeeper};

const KEY: ClusterKey = ClusterKey([5; 32]);
const PAGE: usize = 4096;

/// Options of a node with a disk, at any port of this machine.
fn on_disk(options: NodeOptions) -> NodeOptions {
    let address = "127.0.0.1:0".parse().expect("an address");
    NodeOptions {
        listen: ListenAddress::Tcp(address, KEY, Box::default()),
        disk: Some(std::env::temp_dir()),
        ..options
    }
}

/// A client of the pool that accesses pages.
struct PageClient {
    pool: PoolClient,
    memory: Arc<Memory>,
    local: LocalKey,
}

impl PageClient {
    fn connect(node: &ServingNode, host: u16, epoch: u64) -> Self {
        let identity = Identity { host: Host(host), epoch, tenant: Tenant(u32::from(host)) };
        let address = FabricAddress::parse(&node.record.fabric, &node.record.address).expect("its address");
        let endpoint = address.connect(identity, Some(&KEY), &ConnectOptions::default()).expect("it listens");
        let mut pool = PoolClient::new(identity.host, identity.tenant);
        pool.add_node(NodeId(1), endpoint).expect("it is a node");
        let memory = Arc::new(Memory::create("pages", 16 * PAGE).expect("memory"));
        let endpoint = pool.endpoint(NodeId(1)).expect("it is connected");
        let local = endpoint.register_local(Arc::clone(&memory)).expect("room");
        Self { pool, memory, local }
    }

    fn execute(&mut self, verb: impl Fn(LocalSlice) -> Verb, len: usize) -> Result<u64, WorkError> {
        let local = LocalSlice { key: self.local, offset: 0, len: u32::try_from(len).expect("small") };
        let endpoint = self.pool.endpoint(NodeId(1)).expect("it is connected");
        endpoint.post(&[Work { id: 1, verb: verb(local), signalled: true }]).expect("room");
        let mut done = Vec::new();
        while endpoint.poll(&mut done, 1) == 0 {
            endpoint.wait(std::time::Duration::from_secs(1));
        }
        done[0].outcome
    }

    fn write(&mut self, extent: &Extent, page: usize, byte: u8) -> Result<u64, WorkError> {
        self.memory.write(0, &[byte; PAGE]);
        let remote = RemoteAddr { addr: extent.addr + (page * PAGE) as u64, key: extent.key };
        self.execute(|local| Verb::Write { local, remote }, PAGE)
    }

    fn read(&mut self, extent: &Extent, page: usize) -> Result<[u8; PAGE], WorkError> {
        let remote = RemoteAddr { addr: extent.addr + (page * PAGE) as u64, key: extent.key };
        self.execute(|local| Verb::Read { local, remote }, PAGE)?;
        let mut found = [0; PAGE];
        self.memory.read(0, &mut found);
        Ok(found)
    }

    fn allocate(&mut self) -> Extent {
        loop {
            match self.pool.allocate(NodeId(1), SizeClass::SECTION) {
                Ok(extent) => return extent,
                // The node is clearing the memory.
                Err(PoolError::Full { .. }) => std::thread::yield_now(),
                Err(error) => panic!("{error}"),
            }
        }
    }
}

#[test]
fn a_disk_node_lends_pages_like_any_other() {
    let harness = NodeHarness::new();
    let node = NodeHarness::start_with(on_disk(harness.options(1, BYTES)));
    assert!(node.record.is_disk);
    assert_eq!((node.record.memory_bytes, node.record.fabric.as_str()), (BYTES, "tcp"));
    let mut client = PageClient::connect(&node, 1, 1);
    assert!(client.pool.is_disk(NodeId(1)));
    let extents = [client.allocate(), client.allocate()];
    for (extent, byte) in extents.iter().zip([1, 2]) {
        assert_eq!(client.read(extent, 3), Ok([0; PAGE]), "it was never written");
        client.write(extent, 3, byte).expect("it is ours");
        client.write(extent, 511, byte + 10).expect("it is ours");
    }
    assert_eq!(client.read(&extents[0], 3), Ok([1; PAGE]));
    assert_eq!(client.read(&extents[1], 511), Ok([12; PAGE]));
    assert_eq!(client.read(&extents[1], 4), Ok([0; PAGE]));
    // Another tenant finds nothing in them.
    let mut other = PageClient::connect(&node, 2, 1);
    assert_eq!(other.read(&extents[0], 3), Err(WorkError::RemoteAccess));
    for extent in extents {
        client.pool.free(extent).expect("it is ours");
    }
    let mut again = [other.allocate(), other.allocate()];
    again.sort_by_key(|extent| extent.addr);
    for extent in again {
        for page in [3, 511] {
            assert_eq!(other.read(&extent, page), Ok([0; PAGE]), "page {page} was cleared");
        }
    }
    node.stop();
}

#[test]
fn a_restarted_disk_node_has_its_data() {
    let harness = NodeHarness::new();
    let keeper = TestKeeper::start(&harness);
    let lease = harness.grant_host_lease(1);
    let options = || on_disk(kept_memory::options(&harness, &keeper));
    let node = NodeHarness::start_with(options());
    let mut client = PageClient::connect(&node, 1, lease.epoch);
    let extent = client.allocate();
    client.write(&extent, 7, 77).expect("it is ours");
    let epoch = node.record.epoch;
    node.stop();
    let node = NodeHarness::start_with(options());
    assert_eq!(node.record.epoch, epoch, "the same life of the node");
    let mut client = PageClient::connect(&node, 1, lease.epoch);
    assert_eq!(client.read(&extent, 7), Ok([77; PAGE]));
    client.write(&extent, 7, 78).expect("it is ours");
    assert_eq!(client.read(&extent, 7), Ok([78; PAGE]));
    client.pool.free(extent).expect("it is ours");
    node.stop();
}

#[test]
fn wrong_options_of_a_disk_node_are_refused() {
    let harness = NodeHarness::new();
    let refused =
        |options: NodeOptions| serve(&options, &Shutdown::new(), |_| panic!("it cannot serve")).unwrap_err();
    let over_shm = NodeOptions { disk: Some(std::env::temp_dir()), ..harness.options(1, BYTES) };
    assert!(matches!(refused(over_shm), NodeError::DiskFabric));
    let keeps_free = NodeOptions { keep_free_bytes: Some(1 << 30), ..on_disk(harness.options(1, BYTES)) };
    assert!(matches!(refused(keeps_free), NodeError::DiskOptions));
    let nowhere = NodeOptions { disk: Some("/nowhere".into()), ..on_disk(harness.options(1, BYTES)) };
    let error = refused(nowhere).to_string();
    assert!(error.contains("cannot reserve 4194304 bytes in the directory /nowhere"), "{error}");
    let too_large = on_disk(harness.options(1, 1 << 39));
    assert!(matches!(refused(too_large), NodeError::Disk { .. }));
}
