//! Resumes a free of a killed process while an operation of that process is still in flight.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use aquifer_fabric::sim::{SimFabric, SimOptions};
use aquifer_fabric::{Endpoint, Host, Identity, Memory, PostError, Tenant, Verb, Work, forward_endpoint};
use aquifer_pool::op::{Grant, WordAt};
use aquifer_pool::size::SECTION_BYTES;
use aquifer_pool::{LeakDetector, NodeId, NodeMemory, PoolClient, SizeClass};

const NODE: NodeId = NodeId(1);
const WHO: Identity = Identity { host: Host(1), epoch: 1, tenant: Tenant(0) };

/// An endpoint on which an operation in flight zeroes a word after this client has read it.
#[derive(Debug)]
struct LateZero {
    inner: Box<dyn Endpoint>,
    memory: Arc<Memory>,
    at: usize,
    addr: u64,
    was_read: bool,
}

impl Endpoint for LateZero {
    fn post(&mut self, batch: &[Work]) -> Result<(), PostError> {
        if std::mem::take(&mut self.was_read) {
            self.memory.atomic_u64(self.at).store(0, Ordering::SeqCst);
        }
        let is_it = |work: &Work| matches!(work.verb, Verb::Read { remote, .. } if remote.addr == self.addr);
        self.was_read = batch.iter().any(is_it);
        self.inner.post(batch)
    }

    forward_endpoint!(
        inner: poll, wait, poll_fd, register_local, receive, regions, limits, is_broken, drain_handle
    );
}

/// The key is in its entry when the client checks, and revoked when the client is to revoke it. The
/// extent is still the host's, and no ledger names it: only a leak scan frees it.
#[test]
fn a_leak_scan_frees_an_extent_whose_key_a_late_operation_has_revoked() {
    let fabric = SimFabric::new(1, SimOptions { step_on_poll: true, ..SimOptions::default() });
    let target = fabric.add_node();
    let node_memory = NodeMemory::create(&target, NODE, SECTION_BYTES).expect("memory");
    let connect = || fabric.connect(target.node(), WHO).expect("the node lives");
    let mut dead = PoolClient::new(WHO.host, WHO.tenant);
    dead.add_node(NODE, connect()).expect("a good node");
    let [extent, kept] = [(); 2].map(|()| dead.allocate(NODE, SizeClass::CHUNK).expect("room"));
    let record = dead.last_record(kept);
    // Another allocation in the span changes the record of the word.
    let other = dead.allocate(NODE, SizeClass::CHUNK).expect("room");

    let layout = node_memory.layout;
    let chunk = layout.chunk_of(extent.addr - node_memory.region.base).expect("the address is an extent's");
    let entry = layout.word_at(WordAt::key_of(Grant { chunk, class: extent.class, key: extent.key }));
    let late = LateZero {
        inner: connect(),
        memory: Arc::clone(&node_memory.memory),
        at: usize::try_from(entry).expect("the memory is mapped"),
        addr: node_memory.region.base + entry,
        was_read: false,
    };
    let leak_detector = Arc::new(LeakDetector::default());
    let mut next = PoolClient::with_leak_detector(WHO.host, WHO.tenant, Arc::clone(&leak_detector));
    next.add_node(NODE, Box::new(late)).expect("a good node");
    let outcome = next.resume_free(extent, record);
    assert!(matches!(outcome, Ok(false)), "the extent was not freed, which is not an error: {outcome:?}");
    assert!(leak_detector.has_suspects());
    [kept, other].into_iter().for_each(|extent| next.free(extent).expect("the extent is this host's"));
    assert!(leak_detector.scan(&mut next, NODE, |_| true).expect("the node lives").is_some());
    assert_eq!(node_memory.free_bytes(), layout.data_bytes());
}
