//! Tests of slabs with several replicas over the simulated fabric: writes, failures of nodes, and
//! reads.

use std::sync::Arc;
use std::time::Duration;

use aquifer_fabric::sim::{SimFabric, SimNodeId, SimOptions};
use aquifer_fabric::{Endpoint, EndpointError, Host, Identity, Tenant};
use aquifer_mutation::Mutations;
use aquifer_pager::{
    Allowance, BLOCK_PAGES, Connector, FETCH_PAGES_MAX, FetchError, Fetcher, Location, Mempool, MoveRate,
    Mutation, PAGE_BYTES, Sender, SlabId, SlabSet, StageOutcome, WrittenBatch, page_of,
};
use aquifer_pool::{FigureTable, NodeFigures, NodeId, NodeMemory, PoolClient, SizeClass};

const NODE_BYTES: u64 = 2 << 20;
/// Maximum number of rounds of a step, more than any step in these tests needs.
const ROUNDS_MAX: usize = 10_000;

#[derive(Clone, Debug)]
pub struct ReplicaCluster {
    pub fabric: SimFabric,
    nodes: Vec<SimNodeId>,
    figures: Arc<FigureTable>,
}

impl Connector for ReplicaCluster {
    fn connect(&self, node: NodeId) -> Result<Box<dyn Endpoint>, EndpointError> {
        self.connect_as(node, 1)
    }

    fn now(&self) -> Duration {
        Duration::from_nanos(self.fabric.now_ns())
    }
}

impl ReplicaCluster {
    fn connect_as(&self, node: NodeId, host: u16) -> Result<Box<dyn Endpoint>, EndpointError> {
        let who = Identity { host: Host(host), epoch: 1, tenant: Tenant(0) };
        self.fabric.connect(self.nodes[usize::from(node.0)], who)
    }

    pub fn pool(&self, host: u16) -> PoolClient {
        let mut pool = PoolClient::new(Host(host), Tenant(0));
        pool.set_figures(Arc::clone(&self.figures));
        for id in (0..).take(self.nodes.len()).map(NodeId) {
            pool.add_node(id, self.connect_as(id, host).unwrap()).unwrap();
        }
        pool
    }
}

pub struct ReplicaTest {
    pub cluster: ReplicaCluster,
    node_memories: Vec<NodeMemory>,
    pub slabs: Arc<SlabSet>,
    mempool: Mempool,
    pub sender: Sender,
    pub fetcher: Fetcher,
}

pub fn new_test(replicas: usize, nodes: u16) -> ReplicaTest {
    new_test_of(replicas, nodes, NODE_BYTES)
}

fn new_test_of(replicas: usize, nodes: u16, node_bytes: u64) -> ReplicaTest {
    new_test_with(replicas, &vec![node_bytes; nodes.into()])
}

/// A cluster of nodes with these sizes.
fn new_test_with(replicas: usize, node_bytes: &[u64]) -> ReplicaTest {
    let options = SimOptions { step_on_poll: true, ..SimOptions::default() };
    let fabric = SimFabric::new(7, options);
    let targets: Vec<_> = node_bytes.iter().map(|_| fabric.add_node()).collect();
    let node_memories = (0..).map(NodeId).zip(&targets).zip(node_bytes);
    let node_memories =
        node_memories.map(|((id, target), bytes)| NodeMemory::create(target, id, *bytes).unwrap()).collect();
    let nodes = targets.iter().map(aquifer_fabric::sim::SimTarget::node).collect();
    let cluster = ReplicaCluster { fabric, nodes, figures: Arc::default() };
    let slabs = Arc::new(SlabSet::with_replicas(replicas).unwrap());
    let mempool = Mempool::new(8 * BLOCK_PAGES * PAGE_BYTES).unwrap();
    let connector: Arc<dyn Connector> = Arc::new(cluster.clone());
    let mut sender = Sender::new(Arc::clone(&slabs), &mempool, Arc::clone(&connector), cluster.pool(1), 3);
    sender.set_move_rate(&Arc::new(MoveRate::new(None)));
    let fetcher = Fetcher::new(connector).unwrap();
    ReplicaTest { cluster, node_memories, slabs, mempool, sender, fetcher }
}

fn content(page: usize) -> [u8; PAGE_BYTES] {
    let mut bytes = [u8::try_from(page % 251).unwrap() + 1; PAGE_BYTES];
    bytes[..8].copy_from_slice(&(page as u64).to_le_bytes());
    bytes
}

impl ReplicaTest {
    /// Passes a batch of `pages` pages to the sender.
    fn stage(&mut self, pages: usize) {
        self.stage_again(pages, &[], None);
    }

    /// Passes a batch of pages with these clean copies to the sender, after changing one page if
    /// asked. Returns the number of pages that the sender finds unchanged.
    fn stage_again(&mut self, pages: usize, copies: &[Location], changed: Option<usize>) -> usize {
        let block = self.mempool.allocate(&self.mempool.user(0), 0).unwrap();
        for page in 0..pages {
            let mut bytes = content(page);
            bytes[PAGE_BYTES - 1] ^= u8::from(changed == Some(page));
            self.mempool.memory().write(block.slot(page).offset(), &bytes);
        }
        let copies: Vec<_> = copies.iter().copied().map(Some).collect();
        let mut found = Vec::new();
        self.sender.stage_with_clean_copies(0, block, pages, |_| true, &copies, &mut found);
        found.into_iter().filter(|what| *what == StageOutcome::Unchanged).count()
    }

    /// Advances until the batch is acknowledged, and returns the locations of its pages.
    fn finish(&mut self) -> Vec<Location> {
        let mut done: Vec<WrittenBatch> = Vec::new();
        for _ in 0..ROUNDS_MAX {
            self.sender.advance(&mut done).unwrap();
            self.cluster.fabric.step();
            if let Some(written) = done.pop() {
                self.mempool.free(&self.mempool.user(0), written.block);
                return written.locations.iter().flatten().copied().collect();
            }
        }
        panic!("the batch is not acknowledged");
    }

    pub fn write(&mut self, pages: usize) -> Vec<Location> {
        self.stage(pages);
        self.finish()
    }

    /// Advances until the healer has nothing left to do.
    pub fn heal(&mut self) {
        for _ in 0..ROUNDS_MAX {
            self.sender.probe();
            self.sender.advance(&mut Vec::new()).unwrap();
            self.cluster.fabric.step();
        }
        assert!(!self.sender.is_healing(), "healing never ends");
    }

    /// Advances the clock by `time`, and the sender in steps.
    fn advance_by(&mut self, time: Duration) {
        for _ in 0..50 {
            let now_ns = self.cluster.fabric.now_ns();
            self.cluster.fabric.advance_to(now_ns + u64::try_from(time.as_nanos() / 50).unwrap());
            self.sender.advance(&mut Vec::new()).unwrap();
        }
    }

    pub fn crash(&self, node: NodeId) {
        self.cluster.fabric.crash_node(self.cluster.nodes[usize::from(node.0)]);
    }

    pub fn nodes_of(&self, location: Location) -> Vec<NodeId> {
        self.slabs.replicas(location.slab()).iter().map(|copy| copy.node).collect()
    }

    fn assert_fetched(&self, pages: usize) {
        for page in 0..pages {
            let mut found = [0; PAGE_BYTES];
            self.fetcher.buffer().read(page * PAGE_BYTES, &mut found);
            assert_eq!(found, content(page), "page {page}");
        }
    }

    pub fn assert_readable(&mut self, locations: &[Location]) {
        let whole = self.fetcher.fetch(&self.slabs, locations).expect("the pages are readable");
        assert_eq!(whole, locations.len());
        self.assert_fetched(whole);
    }

    /// Lets a node recall all of its memory, or nothing any more.
    pub fn recall(&self, node: NodeId, is_recalled: bool) {
        let recalled_bytes = u64::from(is_recalled);
        self.cluster.figures.set(
            node,
            NodeFigures { free_bytes: NODE_BYTES, lent_bytes: NODE_BYTES, recalled_bytes, first_recalled: 0 },
        );
    }

    /// Flips a bit of a page on one node.
    fn damage(&self, location: Location, node: NodeId) {
        let copy = self.slabs.replicas(location.slab()).on(node).expect("the slab has a replica there");
        let node_memory = &self.node_memories[usize::from(node.0)];
        let base = self.cluster.connect_as(node, 9).unwrap().regions()[0].base;
        let at = usize::try_from(page_of(&copy, location.index()).addr - base).unwrap() + 100;
        let mut byte = [0];
        node_memory.memory.read(at, &mut byte);
        node_memory.memory.write(at, &[byte[0] ^ 4]);
    }
}

#[test]
fn a_page_survives_the_death_of_all_but_one_of_its_nodes() {
    for replicas in 1..=3 {
        let mut test = new_test(replicas, 4);
        let locations = test.write(BLOCK_PAGES);
        let mut nodes = test.nodes_of(locations[0]);
        nodes.sort_unstable();
        nodes.dedup();
        assert_eq!(nodes.len(), replicas, "replicas must be on distinct nodes");
        assert_eq!(test.sender.stats().pages, (BLOCK_PAGES * replicas) as u64);
        for node in &nodes[1..] {
            test.crash(*node);
        }
        test.assert_readable(&locations);
        test.crash(nodes[0]);
        let error = test.fetcher.fetch(&test.slabs, &locations).unwrap_err();
        assert!(matches!(error, FetchError::NodeGone { .. } | FetchError::Refused { .. }), "{error}");
    }
}

#[test]
fn slabs_are_allocated_on_the_node_with_most_free_memory() {
    let mut test = new_test_with(1, &[4 << 20, 16 << 20]);
    let free =
        |test: &ReplicaTest| test.node_memories.iter().map(NodeMemory::free_bytes).collect::<Vec<u64>>();
    while free(&test)[0] == 4 << 20 {
        test.write(BLOCK_PAGES);
    }
    // The smaller node is chosen when the larger has no more free memory than it.
    assert!(free(&test)[1] <= 4 << 20, "{:?}", free(&test));
}

#[test]
fn unchanged_pages_are_not_written_again() {
    const CHANGED: usize = 7;
    let mut test = new_test(2, 3);
    let before = test.write(BLOCK_PAGES);
    let written = test.sender.stats().pages;
    assert_eq!(test.stage_again(BLOCK_PAGES, &before, None), BLOCK_PAGES);
    assert_eq!(test.finish(), before);
    assert_eq!(test.sender.stats().pages, written);
    assert_eq!(test.stage_again(BLOCK_PAGES, &before, Some(CHANGED)), BLOCK_PAGES - 1);
    let after = test.finish();
    assert_eq!(test.sender.stats().pages, written + 2);
    for page in 0..BLOCK_PAGES {
        assert_eq!(after[page] == before[page], page != CHANGED, "page {page}");
    }
    assert_eq!(
        test.slabs.pages(),
        BLOCK_PAGES as u64 + 1,
        "the volume releases the clean copy of the changed page"
    );
}

#[test]
fn unchanged_pages_are_written_again_if_their_clean_copy_is_lost() {
    for replicas in [1, 2] {
        for is_loss_known in [false, true] {
            let mut test = new_test(replicas, 3);
            let before = test.write(BLOCK_PAGES);
            let homes = test.nodes_of(before[0]);
            test.crash(homes[0]);
            if is_loss_known {
                test.write(BLOCK_PAGES);
            }
            test.stage_again(BLOCK_PAGES, &before, None);
            let after = test.finish();
            test.assert_readable(&after);
            let is_elsewhere = after.iter().all(|location| !test.nodes_of(*location).contains(&homes[0]));
            assert!(is_elsewhere, "{replicas} replicas");
            assert!(replicas == 1 || after == before, "one replica is sufficient");
        }
    }
}

#[test]
fn a_replica_that_dies_during_a_write_is_replaced() {
    let mut test = new_test(2, 3);
    test.stage(BLOCK_PAGES);
    test.sender.advance(&mut Vec::new()).unwrap();
    let first = test.nodes_of(Location::new(SlabId(0), 0))[0];
    test.crash(first);
    let locations = test.finish();
    test.assert_readable(&locations);
    test.heal();
    let stats = test.sender.stats();
    assert_eq!(stats.degraded_slabs, 0);
    assert!(stats.copied_slabs > 0);
    let second = test.nodes_of(locations[0]);
    assert!(second.len() == 2 && !second.contains(&first));
    test.crash(second[0]);
    test.assert_readable(&locations);
}

#[test]
fn empty_slabs_are_kept_while_the_run_writes_and_freed_when_it_does_not() {
    let mut test = new_test_of(1, 1, 16 << 20);
    let locations: Vec<Location> = (0..16).flat_map(|_| test.write(BLOCK_PAGES)).collect();
    let pages = test.slabs.pages();
    let emptied: Vec<Location> =
        locations.iter().copied().filter(|location| location.slab() == locations[0].slab()).collect();
    emptied.iter().for_each(|location| test.slabs.release(*location));
    test.advance_by(Duration::from_millis(100));
    let held_pages = test.slabs.bytes().0 / PAGE_BYTES as u64;
    assert!(held_pages >= pages, "{held_pages} pages are held: the empty slabs were not kept");
    test.advance_by(Duration::from_secs(5));
    let held_pages = test.slabs.bytes().0 / PAGE_BYTES as u64;
    assert!(held_pages < pages, "{held_pages} pages are still held");
}

#[test]
fn without_another_node_slabs_stay_degraded() {
    let mut test = new_test(2, 2);
    let before = test.write(8);
    test.crash(NodeId(1));
    test.heal();
    assert!(test.sender.stats().degraded_slabs > 0);
    let after = test.write(BLOCK_PAGES);
    assert_eq!(test.nodes_of(after[0]), [NodeId(0)]);
    test.assert_readable(&before);
    test.assert_readable(&after);
}

/// Programs of a user that gets no memory keep no clean copies, so they write pages again. Others
/// are not affected.
#[test]
fn a_user_at_its_quota_makes_no_other_user_short() {
    let mut test = new_test(1, 1);
    let (refused, other) = (test.mempool.user(7), test.mempool.user(8));
    test.sender.set_mempool_user(&refused);
    test.sender.set_allowance(Allowance { bytes_max: 0, ..Allowance::ALL });
    test.stage(1);
    test.sender.advance(&mut Vec::new()).unwrap_err();
    assert!(refused.is_pool_short() && !other.is_pool_short() && !test.mempool.is_pool_short());
    test.sender.set_allowance(Allowance::ALL);
    test.finish();
    assert!(!refused.is_pool_short());
}

#[test]
fn a_slab_whose_last_node_is_gone_is_not_written() {
    let mut test = new_test(2, 3);
    let location = test.write(1)[0];
    let nodes = test.nodes_of(location);
    test.slabs.release(location);
    test.crash(nodes[0]);
    test.heal();
    assert_eq!(test.nodes_of(location), nodes[1..], "an empty slab needs no new replica");
    // The sender finds this during the search for free pages, when it has already chosen the slab
    // because there are not two nodes.
    test.crash(nodes[1]);
    let locations = test.write(1);
    test.assert_readable(&locations);
}

#[test]
fn a_missing_replica_is_made_when_there_is_free_memory() {
    let mut test = new_test(2, 2);
    let mut other_host = test.cluster.pool(5);
    let class = SizeClass::new(0).unwrap();
    let taken: Vec<_> = std::iter::from_fn(|| other_host.allocate(NodeId(1), class).ok()).collect();
    let locations = test.write(BLOCK_PAGES);
    assert_eq!(test.nodes_of(locations[0]), [NodeId(0)]);
    assert!(test.sender.stats().degraded_slabs > 0);
    test.heal();
    assert!(test.sender.stats().degraded_slabs > 0, "there is no free memory yet");
    taken.into_iter().for_each(|extent| other_host.free(extent).unwrap());
    test.sender.pool().refresh(NodeId(1)).unwrap();
    test.heal();
    assert_eq!(test.sender.stats().degraded_slabs, 0);
    test.crash(NodeId(0));
    test.assert_readable(&locations);
}

#[test]
fn a_damaged_replica_is_skipped_and_repaired() {
    let mut test = new_test(2, 2);
    let locations = test.write(BLOCK_PAGES);
    let nodes = test.nodes_of(locations[5]);
    let asked = nodes[locations[5].slab().0 as usize % 2];
    test.damage(locations[5], asked);
    test.assert_readable(&locations);
    assert_eq!(test.fetcher.damaged_pages(), 1);
    test.heal();
    assert_eq!(test.sender.stats().repaired_pages, 1);
    nodes.iter().filter(|node| **node != asked).for_each(|node| test.crash(*node));
    test.assert_readable(&locations);
    assert_eq!(test.fetcher.damaged_pages(), 1, "the page was repaired");
}

#[test]
fn a_page_damaged_in_all_replicas_is_an_error() {
    let mut test = new_test(2, 2);
    let locations = test.write(4);
    test.damage(locations[2], NodeId(0));
    test.damage(locations[2], NodeId(1));
    assert_eq!(test.fetcher.fetch(&test.slabs, &locations).unwrap(), 2, "the pages before it are whole");
    let error = test.fetcher.fetch(&test.slabs, &locations[2..]).unwrap_err();
    assert!(matches!(error, FetchError::Damaged { .. }), "{error}");
}

#[test]
fn a_late_read_is_replaced_and_does_not_overwrite_a_buffer_in_use() {
    let mut test = new_test(2, 2);
    let locations = test.write(FETCH_PAGES_MAX);
    test.assert_readable(&locations);
    for node in test.cluster.nodes.clone() {
        test.cluster.fabric.slow_node(node, 100_000);
        let buffer = Arc::clone(test.fetcher.buffer());
        test.assert_readable(&locations);
        if test.fetcher.late_reads() > 0 {
            assert!(!Arc::ptr_eq(&buffer, test.fetcher.buffer()), "the late READ keeps its buffer");
        }
        test.cluster.fabric.slow_node(node, 1);
        let others: Vec<_> = locations.iter().rev().copied().collect();
        test.fetcher.fetch(&test.slabs, &others).unwrap();
        test.cluster.fabric.run();
        let mut found = [0; PAGE_BYTES];
        test.fetcher.buffer().read(0, &mut found);
        assert_eq!(found, content(FETCH_PAGES_MAX - 1), "a late READ wrote to a buffer in use");
        test.assert_readable(&locations);
        assert_eq!(test.fetcher.late_reads(), 0, "the late READ has completed");
    }
}

#[test]
fn all_replicas_are_freed() {
    let mut test = new_test(3, 3);
    let locations = test.write(BLOCK_PAGES);
    assert_eq!(test.slabs.bytes().0 % 3, 0);
    locations.into_iter().for_each(|location| test.slabs.release(location));
    test.heal();
    test.sender.stop_healing();
    test.sender.close();
    assert_eq!(test.slabs.bytes().0, 0);
    let mut pool = test.cluster.pool(6);
    for node in (0..3).map(NodeId) {
        pool.refresh(node).unwrap();
        assert_eq!(pool.free_bytes(node), pool.total_bytes(node));
    }
}

/// A probe reads by a slab's key, which is dead as soon as the slab is freed.
#[test]
fn a_slab_that_is_freed_while_its_node_is_probed_does_not_drop_the_node() {
    let mut test = new_test_of(2, 2, 4 * NODE_BYTES);
    let mut held = test.write(BLOCK_PAGES);
    let mut freed_slabs = 0;
    while freed_slabs < 50 {
        let locations = test.write(BLOCK_PAGES);
        let is_new = locations[0].slab() != held[0].slab();
        if is_new {
            test.sender.probe();
            held.drain(..).for_each(|location| test.slabs.release(location));
            freed_slabs += 1;
        }
        held.extend(locations);
        for location in &held {
            assert_eq!(test.nodes_of(*location).len(), 2, "after {freed_slabs} freed slabs");
        }
        for _ in 0..10 {
            test.sender.advance(&mut Vec::new()).unwrap();
            test.cluster.fabric.step();
        }
    }
}

/// Whether the sender adds a node that died and returned while it copies that node's slabs.
fn is_added_while_healing() -> bool {
    let mut test = new_test(2, 3);
    let locations = test.write(BLOCK_PAGES);
    let node = test.nodes_of(locations[0])[0];
    test.crash(node);
    for _ in 0..ROUNDS_MAX {
        test.sender.probe();
        test.sender.advance(&mut Vec::new()).unwrap();
        if test.sender.is_healing() {
            break;
        }
        test.cluster.fabric.step();
    }
    assert!(test.sender.is_healing() && !test.sender.uses_node(node));
    test.cluster.fabric.restart_node(test.cluster.nodes[usize::from(node.0)]);
    test.sender.add_node(node, test.cluster.connect(node).unwrap()).unwrap();
    test.sender.uses_node(node)
}

#[test]
fn a_returned_node_is_added_only_when_nothing_is_in_flight() {
    assert!(!is_added_while_healing());
    assert!(Mutation::AddBusyNode.while_active(is_added_while_healing));
}
