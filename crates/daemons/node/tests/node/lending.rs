//! Changes of the lent memory while hosts use it.

use aquifer_directory::Directory;
use aquifer_directory::names::{self, NodeRecord, RequestedMemory, ResizeBlocker};
use aquifer_fabric::{Host, Memory, Tenant};
use aquifer_node::NodeOptions;
use aquifer_pool::size::SECTION_BYTES;
use aquifer_pool::{Extent, NodeId, PoolClient, SizeClass};

use crate::harness::{BYTES, NodeHarness, SectionBuffer, ServingNode};

const NODE: NodeId = NodeId(1);

fn start(harness: &NodeHarness) -> ServingNode {
    NodeHarness::start_with(NodeOptions { memory_bytes_max: 2 * BYTES, ..harness.options(1, BYTES) })
}

fn request(harness: &NodeHarness, node: &ServingNode, memory_bytes: u64) {
    let request = RequestedMemory { node: 1, epoch: node.record.epoch, memory_bytes };
    harness.directory().put(&names::requested_memory_key(1), &names::encode(&request), None).expect("room");
}

/// Waits until the node's record fulfils a condition.
fn wait_for(harness: &NodeHarness, condition: impl Fn(&NodeRecord) -> bool) -> NodeRecord {
    loop {
        let record = harness.record(1).expect("it lives");
        if condition(&record) {
            return record;
        }
        std::thread::yield_now();
    }
}

/// Allocates `count` sections. Retries, because the node may be clearing some.
fn allocate_sections(client: &mut PoolClient, count: u64) -> Vec<Extent> {
    let mut held = Vec::new();
    while (held.len() as u64) < count {
        held.extend(client.allocate(NODE, SizeClass::SECTION).ok());
    }
    held
}

#[test]
fn a_node_lends_more_and_less() {
    let harness = NodeHarness::new();
    let node = start(&harness);
    assert_eq!((node.record.memory_bytes, node.record.memory_bytes_max), (BYTES, 2 * BYTES));
    let mut client = harness.client(1, 1).expect("it listens");
    let mut extents = Vec::new();
    let mut allocate_all = |extents: &mut Vec<_>| {
        while let Ok(extent) = client.allocate(NODE, SizeClass::SECTION) {
            extents.push(extent);
        }
        client.refresh(NODE).expect("it answers");
        client.total_bytes(NODE)
    };
    assert_eq!(allocate_all(&mut extents), BYTES);
    assert_eq!(extents.len() as u64, BYTES / SECTION_BYTES);

    request(&harness, &node, 2 * BYTES);
    wait_for(&harness, |record| record.memory_bytes == 2 * BYTES);
    assert_eq!(allocate_all(&mut extents), 2 * BYTES);
    assert_eq!(extents.len() as u64, 2 * BYTES / SECTION_BYTES);

    // Memory in use stays.
    request(&harness, &node, SECTION_BYTES);
    let record = wait_for(&harness, |record| record.resize_blocker.is_some());
    assert_eq!((record.memory_bytes, record.resize_blocker), (2 * BYTES, Some(ResizeBlocker::InUse)));
    let last = extents.pop().expect("many");
    client.free(last).expect("it is ours");
    wait_for(&harness, |record| record.memory_bytes == 2 * BYTES - SECTION_BYTES);
    assert!(client.allocate(NODE, SizeClass::CHUNK).is_err(), "it is offline");
    extents.drain(..).for_each(|extent| client.free(extent).expect("it is ours"));
    let record = wait_for(&harness, |record| record.memory_bytes == SECTION_BYTES);
    assert_eq!(record.resize_blocker, None);
    let only = allocate_sections(&mut client, 1);
    assert!(client.allocate(NODE, SizeClass::CHUNK).is_err(), "all others are offline");
    only.into_iter().for_each(|extent| client.free(extent).expect("it is ours"));
    node.stop();
}

/// Lent memory counts as used, whether or not it is written.
#[test]
fn a_node_lends_no_more_than_its_machine_has() {
    let harness = NodeHarness::new();
    let meminfo = std::fs::read_to_string("/proc/meminfo").expect("/proc/meminfo exists");
    let total_kib =
        meminfo.split_whitespace().nth(1).and_then(|kib| kib.parse::<u64>().ok()).expect("MemTotal");
    let most = 2 * total_kib * 1024 / SECTION_BYTES * SECTION_BYTES;
    let node = NodeHarness::start_with(NodeOptions { memory_bytes_max: most, ..harness.options(1, BYTES) });
    request(&harness, &node, most);
    let record = wait_for(&harness, |record| record.resize_blocker.is_some());
    assert_eq!((record.resize_blocker, record.requested_memory_bytes), (Some(ResizeBlocker::NoMemory), most));
    assert!((BYTES..most).contains(&record.memory_bytes), "{record:?}");
    request(&harness, &node, BYTES);
    let record = wait_for(&harness, |record| record.memory_bytes == BYTES);
    assert_eq!(record.resize_blocker, None);
    node.stop();
}

/// The machine's available memory, in bytes.
fn available_bytes() -> u64 {
    let meminfo = std::fs::read_to_string("/proc/meminfo").expect("/proc/meminfo exists");
    let line = meminfo.lines().find(|line| line.starts_with("MemAvailable:")).expect("MemAvailable");
    line.split_whitespace().nth(1).and_then(|kib| kib.parse::<u64>().ok()).expect("a number") * 1024
}

/// Half of the lent memory returns to the machine when another program needs as much. The bounds
/// are wide because other programs may run.
#[test]
fn a_node_with_keep_free_follows_the_available_memory() {
    let harness = NodeHarness::new();
    let available = available_bytes();
    let needed = (available / 4).min(1 << 30);
    let options =
        NodeOptions { keep_free_bytes: Some(available - 2 * needed), ..harness.options(1, 2 * needed) };
    let node = NodeHarness::start_with(options);
    let (least, most) = (needed / 4, needed / 2 * 3);
    wait_for(&harness, |record| record.memory_bytes >= most);
    let bytes = usize::try_from(needed).expect("it fits");
    let other_program = Memory::create("other", bytes).expect("address space");
    for page in (0..bytes).step_by(4096) {
        other_program.write(page, &[1]);
    }
    let is_less = |record: &NodeRecord| record.memory_bytes < most && record.resize_blocker.is_some();
    let record = wait_for(&harness, is_less);
    assert_eq!(
        (record.resize_blocker, record.memory_bytes >= least),
        (Some(ResizeBlocker::NoMemory), true),
        "{record:?}"
    );
    let client = harness.client(1, 1).expect("it listens");
    assert!(client.total_bytes(NODE) < most);
    drop(other_program);
    wait_for(&harness, |record| record.memory_bytes >= most);
    node.stop();
}

#[test]
fn a_node_may_start_with_nothing_to_lend() {
    let harness = NodeHarness::new();
    let options = NodeOptions { keep_free_bytes: Some(u64::MAX), ..harness.options(1, BYTES) };
    let node = NodeHarness::start_with(options);
    let record = wait_for(&harness, |record| record.resize_blocker.is_some());
    assert_eq!(
        (record.memory_bytes, record.requested_memory_bytes, record.resize_blocker),
        (0, BYTES, Some(ResizeBlocker::NoMemory))
    );
    assert!(harness.client(1, 1).expect("it listens").allocate(NODE, SizeClass::CHUNK).is_err());
    node.stop();
}

/// Sections that come online again have no owner and are clear.
#[test]
fn another_tenant_gets_cleared_memory_after_it_was_offline() {
    let harness = NodeHarness::new();
    let node = start(&harness);
    let mut clients =
        [1, 2].map(|host| harness.client_of_tenant(host, 1, Tenant(host.into())).expect("it listens"));
    let buffers = clients.each_mut().map(SectionBuffer::new);
    for turn in 0..6 {
        let (client, buffer) = (&mut clients[turn % 2], &buffers[turn % 2]);
        // All memory goes offline and comes online again.
        request(&harness, &node, 0);
        wait_for(&harness, |record| record.memory_bytes == 0);
        request(&harness, &node, BYTES);
        wait_for(&harness, |record| record.memory_bytes == BYTES);
        let mut held = Vec::new();
        while let Ok(extent) = client.allocate(NODE, SizeClass::SECTION) {
            assert!(buffer.is_zero(client, &extent), "turn {turn}");
            buffer.write(client, &extent);
            held.push(extent);
        }
        assert_eq!(held.len() as u64, BYTES / SECTION_BYTES, "no section waits for clearing");
        held.iter().for_each(|extent| client.free(*extent).expect("it is ours"));
    }
    node.stop();
}

/// Each connection of the test as host `NODE` fences the node's own connection.
#[test]
fn a_node_whose_own_connection_breaks_lends_what_its_record_says() {
    let harness = NodeHarness::new();
    let node = start(&harness);
    let mut client = harness.client(1, 1).expect("it listens");
    for epoch in 2..20 {
        let wanted = epoch * 7 % (2 * BYTES / SECTION_BYTES + 1) * SECTION_BYTES;
        request(&harness, &node, wanted);
        // Fails if the node has a greater epoch.
        harness.client(Host::NODE.0, epoch).ok();
        wait_for(&harness, |record| (record.memory_bytes, record.requested_memory_bytes) == (wanted, wanted));
        let held = allocate_sections(&mut client, wanted / SECTION_BYTES);
        assert!(client.allocate(NODE, SizeClass::CHUNK).is_err(), "no more than the record says");
        held.iter().for_each(|extent| client.free(*extent).expect("it is ours"));
    }
    node.stop();
}

#[test]
fn a_request_for_another_life_is_ignored() {
    let harness = NodeHarness::new();
    let node = start(&harness);
    request(&harness, &node, SECTION_BYTES);
    wait_for(&harness, |record| record.memory_bytes == SECTION_BYTES);
    node.stop();
    let node = start(&harness);
    assert_eq!(node.record.memory_bytes, BYTES);
    // A request above memory_bytes_max counts as memory_bytes_max.
    request(&harness, &node, u64::MAX);
    wait_for(&harness, |record| record.memory_bytes == 2 * BYTES);
    node.stop();
}
