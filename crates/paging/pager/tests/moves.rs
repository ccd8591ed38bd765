//! Tests of slabs that are moved off memory that nodes recall.

use std::fmt;
use std::sync::{Arc, Mutex};

use aquifer_fabric::{
    Completion, Endpoint, EndpointError, PostError, Verb, Work, WorkError, forward_endpoint,
};
use aquifer_mutation::Mutations;
use aquifer_pager::{
    BLOCK_PAGES, Connector, FetchError, Fetcher, Location, Mempool, Mutation, PAGE_BYTES, Sender, SlabSet,
};
use aquifer_pool::NodeId;

use crate::replicas::{ReplicaCluster, ReplicaTest, new_test};

#[test]
fn slabs_leave_a_node_that_recalls_its_memory() {
    for replicas in 1..=3 {
        let mut test = new_test(replicas, u16::try_from(replicas).unwrap() + 1);
        let locations = test.write(BLOCK_PAGES);
        let node = test.nodes_of(locations[0])[0];
        test.recall(node, true);
        test.heal();
        let nodes = test.nodes_of(locations[0]);
        assert!(nodes.len() == replicas && !nodes.contains(&node), "{replicas} replicas: {nodes:?}");
        assert_eq!(test.sender.stats().recalled_bytes, 0);
        test.crash(node);
        test.assert_readable(&locations);
        assert_eq!(test.sender.stats().degraded_slabs, 0);
    }
}

#[test]
fn a_slab_can_be_moved_back() {
    for replicas in 1..=3 {
        let mut test = new_test(replicas, u16::try_from(replicas).unwrap() + 1);
        let locations = test.write(BLOCK_PAGES);
        let mut moved = test.nodes_of(locations[0])[0];
        for _ in 0..5 {
            test.recall(moved, true);
            test.heal();
            let nodes = test.nodes_of(locations[0]);
            assert!(nodes.len() == replicas && !nodes.contains(&moved), "{nodes:?}");
            test.recall(moved, false);
            test.assert_readable(&locations);
            moved = nodes[0];
        }
        assert_eq!(
            test.slabs.bytes().0,
            test.slabs.replicas(locations[0].slab()).iter().count() as u64
                * test.slabs.replicas(locations[0].slab()).class().expect("it is in use").bytes()
        );
    }
}

#[test]
fn the_slab_that_was_used_least_recently_is_moved_first() {
    let mut test = new_test(1, 2);
    let mut slabs: Vec<Vec<Location>> = Vec::new();
    while slabs.len() < 4 {
        let locations = test.write(BLOCK_PAGES);
        if test.nodes_of(locations[0]) == [NodeId(0)]
            && slabs.iter().all(|other| other[0].slab() != locations[0].slab())
        {
            slabs.push(locations);
        }
    }
    for used in [2, 0, 3, 1] {
        test.sender.probe();
        test.assert_readable(&slabs[used]);
    }
    test.recall(NodeId(0), true);
    let mut moved = Vec::new();
    for _ in 0..100_000 {
        test.sender.probe();
        test.sender.advance(&mut Vec::new()).unwrap();
        test.cluster.fabric.step();
        for (number, locations) in slabs.iter().enumerate() {
            if test.nodes_of(locations[0]) == [NodeId(1)] && !moved.contains(&number) {
                moved.push(number);
            }
        }
    }
    assert_eq!(moved, [2, 0, 3, 1]);
}

#[test]
fn nothing_is_moved_or_lost_if_no_other_node_has_room() {
    let mut test = new_test(2, 2);
    let locations = test.write(BLOCK_PAGES);
    let before = test.nodes_of(locations[0]);
    test.recall(NodeId(0), true);
    test.heal();
    assert_eq!(test.nodes_of(locations[0]), before, "replicas stay on distinct nodes");
    assert!(test.sender.stats().recalled_bytes > 0);
    test.assert_readable(&locations);
    let more = test.write(BLOCK_PAGES);
    test.assert_readable(&more);
    test.recall(NodeId(0), false);
    test.heal();
    assert_eq!(test.sender.stats().recalled_bytes, 0);
}

#[test]
fn a_node_that_dies_while_a_slab_is_moved_costs_no_page_of_the_other() {
    for dies in [0, 1] {
        let mut test = new_test(1, 3);
        let locations = test.write(BLOCK_PAGES);
        let from = test.nodes_of(locations[0])[0];
        test.recall(from, true);
        for _ in 0..100 {
            test.sender.probe();
            test.sender.advance(&mut Vec::new()).unwrap();
            if test.sender.is_healing() {
                break;
            }
            test.cluster.fabric.step();
        }
        assert!(test.sender.is_healing());
        let target = (0..3).map(NodeId).filter(|node| *node != from);
        if dies == 0 {
            target.for_each(|node| test.crash(node));
            test.heal();
            assert_eq!(test.nodes_of(locations[0]), [from]);
            test.assert_readable(&locations);
        } else {
            test.crash(from);
            test.heal();
            // The copy may have been read just before.
            match test.fetcher.fetch(&test.slabs, &locations) {
                Ok(_) => test.assert_readable(&locations),
                Err(FetchError::NodeGone { .. } | FetchError::Refused { .. }) => {}
                Err(error) => panic!("{error}"),
            }
        }
    }
}

/// A function that is called before each operation of a reader is posted.
type Hook = Box<dyn FnMut() + Send>;

/// A connector of a reader, whose endpoints call a hook.
#[derive(Clone)]
struct HookedConnector {
    cluster: ReplicaCluster,
    hook: Arc<Mutex<Hook>>,
}

impl fmt::Debug for HookedConnector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HookedConnector").finish_non_exhaustive()
    }
}

struct HookedEndpoint {
    inner: Box<dyn Endpoint>,
    hook: Arc<Mutex<Hook>>,
}

impl fmt::Debug for HookedEndpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.inner.fmt(f)
    }
}

impl Connector for HookedConnector {
    fn connect(&self, node: NodeId) -> Result<Box<dyn Endpoint>, EndpointError> {
        let inner = self.cluster.connect(node)?;
        Ok(Box::new(HookedEndpoint { inner, hook: Arc::clone(&self.hook) }))
    }
}

impl Endpoint for HookedEndpoint {
    fn post(&mut self, batch: &[Work]) -> Result<(), PostError> {
        (self.hook.lock().unwrap())();
        self.inner.post(batch)
    }

    fn poll(&mut self, out: &mut Vec<Completion>, max: usize) -> usize {
        self.inner.poll(out, max)
    }

    forward_endpoint!(
        inner: wait, poll_fd, register_local, receive, regions, limits, is_broken, drain_handle
    );
}

/// Reads a page whose slab is moved to another node and back while it is read.
fn read_while_moving() -> Result<(), FetchError> {
    let mut test = new_test(1, 2);
    let locations = test.write(1);
    let (slabs, cluster) = (Arc::clone(&test.slabs), test.cluster.clone());
    let nodes = [test.nodes_of(locations[0])[0].0, 1 - test.nodes_of(locations[0])[0].0].map(NodeId);
    let mut moves = 0;
    let test = Arc::new(Mutex::new(test));
    let moving = Arc::clone(&test);
    let hook: Hook = Box::new(move || {
        if moves < 2 {
            let mut test = moving.lock().unwrap();
            test.recall(nodes[1 - moves], false);
            test.recall(nodes[moves], true);
            test.heal();
            assert_eq!(test.nodes_of(locations[0]), [nodes[1 - moves]], "it was moved");
            moves += 1;
        }
    });
    let connector = HookedConnector { cluster, hook: Arc::new(Mutex::new(hook)) };
    let mut fetcher = Fetcher::new(Arc::new(connector)).unwrap();
    fetcher.fetch(&slabs, &[Location(0)])?;
    let mut found = [0; PAGE_BYTES];
    fetcher.buffer().read(0, &mut found);
    assert_eq!(found[8], 1, "the bytes of page 0");
    Ok(())
}

#[test]
fn a_page_is_read_although_its_slab_is_moved_meanwhile() {
    read_while_moving().unwrap();
    assert!(Mutation::BlameMovedReplica.while_active(read_while_moving).is_err());
}

/// A connector to nodes of which one answers READs and no WRITEs.
#[derive(Clone, Debug)]
struct DeafConnector {
    cluster: ReplicaCluster,
    deaf: NodeId,
}

#[derive(Debug)]
struct DeafEndpoint {
    inner: Box<dyn Endpoint>,
    /// WRITEs that end as if the node were away.
    unanswered: Vec<u64>,
}

impl Connector for DeafConnector {
    fn connect(&self, node: NodeId) -> Result<Box<dyn Endpoint>, EndpointError> {
        let inner = self.cluster.connect(node)?;
        if node != self.deaf {
            return Ok(inner);
        }
        Ok(Box::new(DeafEndpoint { inner, unanswered: Vec::new() }))
    }

    fn now(&self) -> std::time::Duration {
        self.cluster.now()
    }
}

impl Endpoint for DeafEndpoint {
    fn post(&mut self, batch: &[Work]) -> Result<(), PostError> {
        let is_write = |work: &&Work| matches!(work.verb, Verb::Write { .. });
        self.unanswered.extend(batch.iter().filter(is_write).map(|work| work.id));
        let others: Vec<Work> = batch.iter().filter(|work| !is_write(work)).cloned().collect();
        self.inner.post(&others)
    }

    fn poll(&mut self, out: &mut Vec<Completion>, max: usize) -> usize {
        let ended = self.unanswered.len().min(max);
        let away = |id| Completion { id, outcome: Err(WorkError::Away) };
        out.extend(self.unanswered.drain(..ended).map(away));
        if ended == max { ended } else { ended + self.inner.poll(out, max - ended) }
    }

    forward_endpoint!(
        inner: wait, poll_fd, register_local, receive, regions, limits, is_broken, drain_handle
    );
}

/// A node that answers probes and no WRITEs would keep a batch for ever if its pages were written
/// again without end.
#[test]
fn a_replica_that_takes_no_writes_is_dropped_after_some_attempts() {
    let test: ReplicaTest = new_test(2, 2);
    let deaf = NodeId(1);
    let connector: Arc<dyn Connector> = Arc::new(DeafConnector { cluster: test.cluster.clone(), deaf });
    let slabs = Arc::new(SlabSet::with_replicas(2).unwrap());
    let mempool = Mempool::new(BLOCK_PAGES * PAGE_BYTES).unwrap();
    let mut sender = Sender::new(Arc::clone(&slabs), &mempool, connector, test.cluster.pool(1), 5);
    let block = mempool.allocate(&mempool.user(0), 0).unwrap();
    mempool.memory().write(block.slot(0).offset(), &[7; PAGE_BYTES]);
    sender.stage(0, block, 1, |_| true, &mut Vec::new());
    let mut done = Vec::new();
    for _ in 0..10_000 {
        sender.probe();
        // While the node counts as away, there is no room for a second replica.
        let _no_room = sender.advance(&mut done);
        test.cluster.fabric.step();
        if !done.is_empty() {
            break;
        }
    }
    let written = done.pop().expect("the batch ends");
    let location = written.locations[0].expect("the page was written");
    let nodes: Vec<NodeId> = slabs.replicas(location.slab()).iter().map(|replica| replica.node).collect();
    assert_eq!(nodes, [NodeId(0)]);
    assert!(sender.stats().rewritten_pages >= 1, "{:?}", sender.stats());
    assert!(sender.stats().degraded_slabs > 0);
}
