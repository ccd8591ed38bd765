//! Kills an agent before and after each single operation of its sender. Another agent takes over,
//! and must find all memory of the pool free at the end.

use std::panic::{AssertUnwindSafe, catch_unwind, panic_any};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use aquifer_fabric::sim::{SimFabric, SimNodeId, SimOptions};
use aquifer_fabric::{
    Completion, Endpoint, EndpointError, Host, Identity, PostError, Tenant, Work, forward_endpoint,
};
use aquifer_pager::{
    BLOCK_PAGES, Connector, CopyPolicy, Memory, Mempool, MoveRate, PAGE_BYTES, Sender, SlabSet, WrittenBatch,
};
use aquifer_pool::{
    Extent, FigureTable, LeakDetector, NodeFigures, NodeId, NodeMemory, PoolClient, ScanProgress, SizeClass,
};

const HOST: Host = Host(1);
const NODES: u16 = 3;
const REPLICAS: usize = 2;
const NODE_BYTES: u64 = 4 << 20;
const ROUNDS: usize = 200;

/// The payload of the panic of an agent that is killed.
struct Killed;

/// An agent that is killed after a number of operations on its endpoints.
#[derive(Debug)]
struct KillableAgent {
    fabric: SimFabric,
    nodes: Vec<SimNodeId>,
    epoch: AtomicU64,
    /// The figures of the nodes: what they recall.
    figures: Arc<FigureTable>,
    /// Operations until the agent is killed.
    left: AtomicU64,
}

#[derive(Debug)]
struct CountingEndpoint {
    inner: Box<dyn Endpoint>,
    agent: Arc<KillableAgent>,
}

impl KillableAgent {
    fn use_once(&self) {
        if self.left.fetch_sub(1, Relaxed) == 1 {
            panic_any(Killed);
        }
    }

    fn pool(self: &Arc<Self>) -> PoolClient {
        self.pool_of(HOST, &Arc::default())
    }

    fn pool_of(self: &Arc<Self>, host: Host, leak_detector: &Arc<LeakDetector>) -> PoolClient {
        let mut pool = PoolClient::with_leak_detector(host, Tenant(0), Arc::clone(leak_detector));
        pool.set_figures(Arc::clone(&self.figures));
        for node in (0..NODES).map(NodeId) {
            if let Ok(endpoint) = self.connect_as(host, node) {
                pool.add_node(node, endpoint).unwrap();
            }
        }
        pool
    }

    fn connect_as(self: &Arc<Self>, host: Host, node: NodeId) -> Result<Box<dyn Endpoint>, EndpointError> {
        let who = Identity { host, epoch: self.epoch.load(Relaxed), tenant: Tenant(0) };
        let inner = self.fabric.connect(self.nodes[usize::from(node.0)], who)?;
        Ok(Box::new(CountingEndpoint { inner, agent: Arc::clone(self) }))
    }

    /// Begins the next agent, which is not killed. The previous one never uses its endpoints again.
    fn next(&self) {
        self.epoch.fetch_add(1, Relaxed);
        self.left.store(u64::MAX, Relaxed);
    }
}

#[derive(Debug)]
struct AgentConnector(Arc<KillableAgent>);

impl Connector for AgentConnector {
    fn connect(&self, node: NodeId) -> Result<Box<dyn Endpoint>, EndpointError> {
        self.0.connect_as(HOST, node)
    }

    fn now(&self) -> Duration {
        Duration::from_nanos(self.0.fabric.now_ns())
    }
}

impl Endpoint for CountingEndpoint {
    fn post(&mut self, batch: &[Work]) -> Result<(), PostError> {
        self.agent.use_once();
        self.inner.post(batch)
    }

    fn poll(&mut self, out: &mut Vec<Completion>, max: usize) -> usize {
        let before = out.len();
        let polled = self.inner.poll(out, max);
        if out.len() > before {
            // The operation is complete, but its completion is not handled yet.
            self.agent.use_once();
        }
        polled
    }

    forward_endpoint!(
        inner: wait, poll_fd, register_local, receive, regions, limits, is_broken, drain_handle
    );
}

fn run(sender: &mut Sender, agent: &KillableAgent) -> Vec<WrittenBatch> {
    let mut done = Vec::new();
    for _ in 0..ROUNDS {
        sender.probe();
        sender.advance(&mut done).unwrap();
        agent.fabric.step();
    }
    done
}

/// An event in the life of a run, after its writes.
type Event = fn(&mut Sender, &KillableAgent);

/// A node dies, and new replicas are made.
fn lose_node(sender: &mut Sender, agent: &KillableAgent) {
    agent.fabric.crash_node(agent.nodes[0]);
    run(sender, agent);
    assert!(sender.stats().copied_slabs > 0);
}

/// A node recalls all its memory, to which replicas are moved, and dies when it has none.
fn empty_node(sender: &mut Sender, agent: &KillableAgent) {
    sender.set_move_rate(&Arc::new(MoveRate::new(None)));
    let figures =
        NodeFigures { free_bytes: 0, lent_bytes: NODE_BYTES, recalled_bytes: NODE_BYTES, first_recalled: 0 };
    agent.figures.set(NodeId(0), figures);
    run(sender, agent);
    assert!(sender.stats().moved_slabs > 0);
    assert!(sender.recalled().is_empty(), "all replicas are moved: {:?}", sender.recalled());
    agent.fabric.crash_node(agent.nodes[0]);
    agent.figures.forget(NodeId(0));
    run(sender, agent);
    assert_eq!(sender.stats().copied_slabs, 0, "nothing was on the node");
}

/// A run that writes, releases pages, sees an event, and ends.
fn live(agent: &Arc<KillableAgent>, slabs: &Arc<SlabSet>, mempool: &Mempool, event: Event) {
    let connector: Arc<dyn Connector> = Arc::new(AgentConnector(Arc::clone(agent)));
    let mut sender = Sender::new(Arc::clone(slabs), mempool, connector, agent.pool(), 3);
    let block = mempool.allocate(&mempool.user(0), 0).unwrap();
    for page in 0..BLOCK_PAGES {
        mempool.memory().write(block.slot(page).offset(), &[7; PAGE_BYTES]);
    }
    for _ in 0..2 {
        sender.stage(0, block, BLOCK_PAGES, |_| true, &mut Vec::new());
    }
    let locations: Vec<_> =
        run(&mut sender, agent).iter().flat_map(|written| written.locations).flatten().collect();
    assert_eq!(locations.len(), 2 * BLOCK_PAGES);
    let (early, late) = locations.split_at(BLOCK_PAGES);
    early.iter().for_each(|location| slabs.release(*location));
    run(&mut sender, agent);
    event(&mut sender, agent);
    late.iter().for_each(|location| slabs.release(*location));
    sender.stop_healing();
    sender.close();
}

/// Frees what the killed agent allocated and did not record.
fn scan_for_leaks(agent: &Arc<KillableAgent>, leak_detector: &LeakDetector) {
    let mut pool = agent.pool();
    let at_once = |pause| pause == ScanProgress::NextPart;
    for node in pool.nodes().collect::<Vec<_>>() {
        let found = leak_detector.scan(&mut pool, node, at_once).unwrap();
        assert_eq!(found.expect("no other thread uses the pool").unowned, 0);
    }
}

/// Takes over the recorded slabs and ends the run. No page table refers to any page.
fn adopt_recovered(agent: &Arc<KillableAgent>, slabs: &SlabSet, mempool: &Mempool) {
    let fd = slabs.memory().fd().try_clone_to_owned().unwrap();
    let memory = Memory::from_fd(fd, slabs.memory().len()).unwrap();
    let slabs = Arc::new(SlabSet::recover(memory, CopyPolicy::in_memory(REPLICAS)));
    let leak_detector = Arc::new(LeakDetector::default());
    leak_detector.register_ledger(&slabs);
    slabs.finish_recovery();
    scan_for_leaks(agent, &leak_detector);
    let connector: Arc<dyn Connector> = Arc::new(AgentConnector(Arc::clone(agent)));
    let mut sender =
        Sender::new(Arc::clone(&slabs), mempool, connector, agent.pool_of(HOST, &leak_detector), 4);
    run(&mut sender, agent);
    sender.stop_healing();
    sender.close();
    assert_eq!(slabs.bytes().0, 0);
    // A free of several extents with one control word may be complete or not.
    if leak_detector.has_suspects() {
        scan_for_leaks(agent, &leak_detector);
    }
}

/// Allocates all free memory for another host, in extents of a span each.
fn allocate_rest(agent: &Arc<KillableAgent>) -> (PoolClient, Vec<Extent>) {
    let mut pool = agent.pool_of(Host(2), &Arc::default());
    let class = SizeClass::SPAN;
    let mut taken = Vec::new();
    for node in pool.nodes().collect::<Vec<_>>() {
        taken.extend(std::iter::from_fn(|| pool.allocate(node, class).ok()));
    }
    (pool, taken)
}

/// The state that a run leaves when it is killed after this number of operations, and whether it
/// reached its end.
fn killed_after(uses: u64, event: Event) -> (Arc<KillableAgent>, Arc<SlabSet>, Mempool, bool) {
    let fabric = SimFabric::new(7, SimOptions { step_on_poll: true, ..SimOptions::default() });
    let targets: Vec<_> = (0..NODES).map(|_| fabric.add_node()).collect();
    for (id, target) in (0..).map(NodeId).zip(&targets) {
        NodeMemory::create(target, id, NODE_BYTES).unwrap();
    }
    let nodes = targets.iter().map(aquifer_fabric::sim::SimTarget::node).collect();
    let (epoch, left, figures) = (AtomicU64::new(1), AtomicU64::new(uses), Arc::default());
    let agent = Arc::new(KillableAgent { fabric, nodes, epoch, figures, left });
    let slabs = Arc::new(SlabSet::with_replicas(REPLICAS).unwrap());
    let mempool = Mempool::new(8 * BLOCK_PAGES * PAGE_BYTES).unwrap();
    let lived = match catch_unwind(AssertUnwindSafe(|| live(&agent, &slabs, &mempool, event))) {
        Ok(()) => true,
        Err(panic) if panic.is::<Killed>() => false,
        Err(panic) => std::panic::resume_unwind(panic),
    };
    agent.next();
    (agent, slabs, mempool, lived)
}

/// Calls `check` for each operation at which the agent can be killed.
fn at_each_moment(event: Event, check: impl Fn(&Arc<KillableAgent>, &SlabSet, &Mempool)) {
    std::panic::set_hook(Box::new(|info| {
        if !info.payload().is::<Killed>() {
            eprintln!("{info}");
        }
    }));
    for uses in 1.. {
        let (agent, slabs, mempool, lived) = killed_after(uses, event);
        check(&agent, &slabs, &mempool);
        if lived {
            assert!(uses > 100, "only {uses} moments");
            return;
        }
    }
}

fn check_beside_other_hosts(event: Event) {
    at_each_moment(event, |agent, slabs, mempool| {
        let (mut other, taken) = allocate_rest(agent);
        adopt_recovered(agent, slabs, mempool);
        for extent in taken {
            other.free(extent).unwrap();
        }
    });
}

#[test]
fn memory_that_other_hosts_allocated_meanwhile_is_not_freed() {
    check_beside_other_hosts(lose_node);
}

mod long {
    use super::*;

    #[test]
    fn memory_that_other_hosts_allocated_meanwhile_is_not_freed_when_a_node_is_emptied() {
        check_beside_other_hosts(empty_node);
    }

    fn check_all_is_free(event: Event) {
        at_each_moment(event, |agent, slabs, mempool| {
            adopt_recovered(agent, slabs, mempool);
            let pool = agent.pool();
            for node in pool.nodes() {
                assert_eq!(pool.free_bytes(node), pool.total_bytes(node));
            }
            // Spans that the agent was about to open or close must be free for all hosts.
            let (others, taken) = allocate_rest(agent);
            let bytes: u64 = taken.iter().map(|extent| extent.class.bytes()).sum();
            assert_eq!(bytes, others.nodes().map(|node| others.total_bytes(node)).sum());
        });
    }

    #[test]
    fn all_memory_of_the_pool_is_free_at_the_end() {
        check_all_is_free(lose_node);
    }

    #[test]
    fn all_memory_of_the_pool_is_free_at_the_end_when_a_node_is_emptied() {
        check_all_is_free(empty_node);
    }
}
