//! Changes of the lent memory while hosts use it.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use aquifer_directory::Directory;
use aquifer_directory::names::{self, NodeRecord, RequestedMemory, ResizeBlocker};
use aquifer_fabric::{Host, Tenant};
use aquifer_node::NodeOptions;
use aquifer_pool::size::{SECTION_BYTES, SPAN_BYTES};
use aquifer_pool::{Extent, NodeFigures, NodeId, PoolClient, SizeClass};

use crate::harness::{BYTES, NodeHarness, SectionBuffer, ServingNode};

const NODE: NodeId = NodeId(1);
const GIB: u64 = 1 << 30;

fn start(harness: &NodeHarness) -> ServingNode {
    NodeHarness::start_with(NodeOptions { memory_bytes_max: 2 * BYTES, ..harness.options(1, BYTES) })
}

fn request(harness: &NodeHarness, node: &ServingNode, memory_bytes: u64) {
    let request = RequestedMemory::new(1, node.record.epoch, memory_bytes);
    harness.directory().put(&names::requested_memory_key(1), &names::encode(&request), None).expect("room");
}

/// Waits until the node's record fulfils a condition.
fn wait_for(harness: &NodeHarness, condition: impl Fn(&NodeRecord) -> bool) -> NodeRecord {
    let key = names::node_key(1);
    let revision = harness.directory().list(&key).expect("the directory answers").revision;
    let mut watch = harness.directory().watch(&key, revision + 1).expect("the directory answers");
    loop {
        let record = harness.record(1).expect("it lives");
        if condition(&record) {
            return record;
        }
        watch.next(Duration::from_secs(1)).expect("the directory answers");
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

/// Waits until the node's figures fulfil a condition.
fn wait_for_figures(client: &mut PoolClient, condition: impl Fn(&NodeFigures) -> bool) -> NodeFigures {
    loop {
        let figures = client.read_figures(NODE).expect("it answers");
        if let Some(figures) = figures.filter(|figures| condition(figures)) {
            return figures;
        }
        std::thread::yield_now();
    }
}

#[test]
fn a_node_holds_what_becomes_free_of_memory_that_it_wants_back() {
    let harness = NodeHarness::new();
    let node = start(&harness);
    let mut client = harness.client(1, 1).expect("it listens");
    let span = SizeClass::new(5).expect("128 KiB");
    let mut extents = Vec::new();
    while let Ok(extent) = client.allocate(NODE, span) {
        extents.push(extent);
    }
    extents.sort_by_key(|extent| extent.addr);
    let kept = BYTES / 2 / SECTION_BYTES * SECTION_BYTES;
    request(&harness, &node, kept);
    let wants = |bytes: u64| move |figures: &NodeFigures| figures.recalled_bytes == bytes;
    let figures = wait_for_figures(&mut client, wants(BYTES - kept));
    assert_eq!((u64::from(figures.first_recalled), figures.free_bytes), (kept / SECTION_BYTES, 0));

    // What becomes free behind the boundary belongs to the node, and what becomes free in front of
    // it does not.
    client.free(extents.pop().expect("many")).expect("it is ours");
    let is_held = |figures: &NodeFigures| {
        (figures.recalled_bytes, figures.free_bytes, figures.lent_bytes)
            == (BYTES - kept - SPAN_BYTES, 0, BYTES - SPAN_BYTES)
    };
    wait_for_figures(&mut client, is_held);
    assert!(client.allocate(NODE, span).is_err(), "the node holds it");
    client.free(extents.remove(0)).expect("it is ours");
    // The node may be clearing it.
    let again = std::iter::repeat_with(|| client.allocate(NODE, span).ok()).find_map(|extent| extent);
    extents.insert(0, again.expect("the boundary is behind it"));

    // The node lends what it held when it is to lend more again.
    request(&harness, &node, BYTES);
    wait_for_figures(&mut client, |figures| figures.recalled_bytes == 0 && figures.free_bytes == SPAN_BYTES);
    extents.push(client.allocate(NODE, span).expect("it is lent again"));

    // The request is undone before anything was held.
    request(&harness, &node, 0);
    wait_for_figures(&mut client, wants(BYTES));
    request(&harness, &node, BYTES);
    wait_for_figures(&mut client, wants(0));

    // The rest returns section by section.
    request(&harness, &node, 0);
    wait_for_figures(&mut client, wants(BYTES));
    for extent in extents {
        client.free(extent).expect("it is ours");
    }
    wait_for(&harness, |record| record.memory_bytes == 0 && record.recalled_bytes == 0);
    wait_for_figures(&mut client, |figures| *figures == NodeFigures::default());
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

/// Options of a node that keeps a gibibyte free, on a machine whose available memory is
/// `available_bytes`.
fn keeping_free(
    harness: &NodeHarness,
    lent_bytes: u64,
    available_bytes: fn() -> io::Result<u64>,
) -> NodeOptions {
    NodeOptions {
        keep_free_bytes: Some(GIB),
        available_bytes,
        watches_pressure: false,
        ..harness.options(1, lent_bytes)
    }
}

/// Lent memory returns to the machine when other programs need it, and is lent again later.
#[test]
fn a_node_with_keep_free_follows_the_available_memory() {
    static AVAILABLE: AtomicU64 = AtomicU64::new(3 * GIB);
    let harness = NodeHarness::new();
    let node = NodeHarness::start_with(keeping_free(&harness, GIB, || Ok(AVAILABLE.load(Relaxed))));
    assert_eq!(node.record.memory_bytes, GIB);
    AVAILABLE.store(GIB + GIB / 2, Relaxed);
    let record = wait_for(&harness, |record| record.memory_bytes < GIB);
    assert_eq!(record.resize_blocker, Some(ResizeBlocker::NoMemory));
    // What the node's metadata takes counts as lent.
    assert!((GIB / 2..GIB / 4 * 3).contains(&record.memory_bytes), "{record:?}");
    let client = harness.client(1, 1).expect("it listens");
    assert!(client.total_bytes(NODE) < GIB);
    AVAILABLE.store(3 * GIB, Relaxed);
    wait_for(&harness, |record| record.memory_bytes == GIB);
    node.stop();
}

/// If the memory that the machine needs is in use, the node recalls it, and holds what becomes
/// free.
#[test]
fn a_node_with_keep_free_recalls_memory_in_use() {
    const LENT: u64 = 256 << 20;
    static AVAILABLE: AtomicU64 = AtomicU64::new(3 * GIB);
    let harness = NodeHarness::new();
    let node = NodeHarness::start_with(keeping_free(&harness, LENT, || Ok(AVAILABLE.load(Relaxed))));
    let mut client = harness.client(1, 1).expect("it listens");
    let mut extents = Vec::new();
    while let Ok(extent) = client.allocate(NODE, SizeClass::SECTION) {
        extents.push(extent);
    }
    AVAILABLE.store(GIB + LENT / 2, Relaxed);
    let record = wait_for(&harness, |record| record.recalled_bytes > 0);
    assert!((LENT / 4..=LENT / 2).contains(&record.recalled_bytes), "{record:?}");
    assert_eq!((record.recalled_from[0].tenant, record.memory_bytes), (Some(0), LENT));
    let figures = wait_for_figures(&mut client, |figures| figures.recalled_bytes > 0);
    extents.sort_by_key(|extent| extent.addr);
    let kept = extents.len() - usize::try_from(figures.recalled_bytes / SECTION_BYTES).expect("it fits");
    for extent in extents.drain(kept..) {
        client.free(extent).expect("it is ours");
    }
    let record = wait_for(&harness, |record| record.recalled_bytes == 0 && record.memory_bytes < LENT);
    assert!(record.recalled_from.is_empty(), "{record:?}");
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
