//! The node lends more or less while hosts use its memory.

use aquifer_directory::Directory;
use aquifer_directory::names::{self, NodeRecord, RequestedMemory, ResizeBlocker};
use aquifer_fabric::{Host, Memory, Tenant};
use aquifer_node::NodeOptions;
use aquifer_pool::size::SECTION_BYTES;
use aquifer_pool::{Extent, NodeId, PoolClient, SizeClass};

use crate::bed::{BYTES, Bed, Serving, Stamp};

const NODE: NodeId = NodeId(1);

fn start(bed: &Bed) -> Serving {
    Bed::start_with(NodeOptions { memory_bytes_max: 2 * BYTES, ..bed.options(1, BYTES) })
}

fn want(bed: &Bed, node: &Serving, memory_bytes: u64) {
    let wanted = RequestedMemory { node: 1, epoch: node.ready.record.epoch, memory_bytes };
    bed.directory().put(&names::requested_memory_key(1), &names::encode(&wanted), None).expect("room");
}

/// Wait until the node says something that is so.
fn until(bed: &Bed, is_so: impl Fn(&NodeRecord) -> bool) -> NodeRecord {
    loop {
        let record = bed.record(1).expect("it lives");
        if is_so(&record) {
            return record;
        }
        std::thread::yield_now();
    }
}

/// So many sections. The node may be clearing some just now.
fn sections(client: &mut PoolClient, count: u64) -> Vec<Extent> {
    let mut held = Vec::new();
    while (held.len() as u64) < count {
        held.extend(client.allocate(NODE, SizeClass::SECTION).ok());
    }
    held
}

#[test]
fn a_node_lends_more_and_less() {
    let bed = Bed::new();
    let node = start(&bed);
    assert_eq!((node.ready.record.memory_bytes, node.ready.record.memory_bytes_max), (BYTES, 2 * BYTES));
    let mut client = bed.client(1, 1).expect("it listens");
    let mut extents = Vec::new();
    let mut take = |extents: &mut Vec<_>| {
        while let Ok(extent) = client.allocate(NODE, SizeClass::SECTION) {
            extents.push(extent);
        }
        client.refresh(NODE).expect("it answers");
        client.total_bytes(NODE)
    };
    assert_eq!(take(&mut extents), BYTES);
    assert_eq!(extents.len() as u64, BYTES / SECTION_BYTES);

    want(&bed, &node, 2 * BYTES);
    until(&bed, |record| record.memory_bytes == 2 * BYTES);
    assert_eq!(take(&mut extents), 2 * BYTES);
    assert_eq!(extents.len() as u64, 2 * BYTES / SECTION_BYTES);

    // Nothing is taken from those who use it.
    want(&bed, &node, SECTION_BYTES);
    let record = until(&bed, |record| record.resize_blocker.is_some());
    assert_eq!((record.memory_bytes, record.resize_blocker), (2 * BYTES, Some(ResizeBlocker::InUse)));
    let last = extents.pop().expect("many");
    client.free(last).expect("it is ours");
    until(&bed, |record| record.memory_bytes == 2 * BYTES - SECTION_BYTES);
    assert!(client.allocate(NODE, SizeClass::CHUNK).is_err(), "it is withdrawn");
    extents.drain(..).for_each(|extent| client.free(extent).expect("it is ours"));
    let record = until(&bed, |record| record.memory_bytes == SECTION_BYTES);
    assert_eq!(record.resize_blocker, None);
    let only = sections(&mut client, 1);
    assert!(client.allocate(NODE, SizeClass::CHUNK).is_err(), "all others are withdrawn");
    only.into_iter().for_each(|extent| client.free(extent).expect("it is ours"));
    node.stop();
}

/// Memory that is lent is promised.
#[test]
fn a_node_lends_no_more_than_its_machine_has() {
    let bed = Bed::new();
    let meminfo = std::fs::read_to_string("/proc/meminfo").expect("the system tells");
    let total_kib =
        meminfo.split_whitespace().nth(1).and_then(|kib| kib.parse::<u64>().ok()).expect("MemTotal");
    let most = 2 * total_kib * 1024 / SECTION_BYTES * SECTION_BYTES;
    let node = Bed::start_with(NodeOptions { memory_bytes_max: most, ..bed.options(1, BYTES) });
    want(&bed, &node, most);
    let record = until(&bed, |record| record.resize_blocker.is_some());
    assert_eq!((record.resize_blocker, record.requested_memory_bytes), (Some(ResizeBlocker::NoMemory), most));
    assert!((BYTES..most).contains(&record.memory_bytes), "{record:?}");
    want(&bed, &node, BYTES);
    let record = until(&bed, |record| record.memory_bytes == BYTES);
    assert_eq!(record.resize_blocker, None);
    node.stop();
}

/// What the machine has available, in bytes.
fn available() -> u64 {
    let meminfo = std::fs::read_to_string("/proc/meminfo").expect("the system tells");
    let line = meminfo.lines().find(|line| line.starts_with("MemAvailable:")).expect("it tells of this, too");
    line.split_whitespace().nth(1).and_then(|kib| kib.parse::<u64>().ok()).expect("a number") * 1024
}

/// Half of what is lent goes back when somebody else needs as much. Others on this machine may need some, too.
#[test]
fn a_node_that_looks_after_its_machine_follows_what_it_has() {
    let bed = Bed::new();
    let there = available();
    let needed = (there / 4).min(1 << 30);
    let options = NodeOptions { keep_free_bytes: Some(there - 2 * needed), ..bed.options(1, 2 * needed) };
    let node = Bed::start_with(options);
    let (least, most) = (needed / 4, needed / 2 * 3);
    until(&bed, |record| record.memory_bytes >= most);
    let taken = usize::try_from(needed).expect("it fits");
    let somebody = Memory::create("somebody", taken).expect("address space");
    for page in (0..taken).step_by(4096) {
        somebody.write(page, &[1]);
    }
    let is_less = |record: &NodeRecord| record.memory_bytes < most && record.resize_blocker.is_some();
    let record = until(&bed, is_less);
    assert_eq!(
        (record.resize_blocker, record.memory_bytes >= least),
        (Some(ResizeBlocker::NoMemory), true),
        "{record:?}"
    );
    let client = bed.client(1, 1).expect("it listens");
    assert!(client.total_bytes(NODE) < most);
    drop(somebody);
    until(&bed, |record| record.memory_bytes >= most);
    node.stop();
}

#[test]
fn a_node_may_begin_with_nothing_to_lend() {
    let bed = Bed::new();
    let options = NodeOptions { keep_free_bytes: Some(u64::MAX), ..bed.options(1, BYTES) };
    let node = Bed::start_with(options);
    let record = until(&bed, |record| record.resize_blocker.is_some());
    assert_eq!(
        (record.memory_bytes, record.requested_memory_bytes, record.resize_blocker),
        (0, BYTES, Some(ResizeBlocker::NoMemory))
    );
    assert!(bed.client(1, 1).expect("it listens").allocate(NODE, SizeClass::CHUNK).is_err());
    node.stop();
}

/// What comes back is nobody's, and clear.
#[test]
fn another_tenant_finds_nothing_in_what_was_withdrawn() {
    let bed = Bed::new();
    let node = start(&bed);
    let mut clients = [1, 2].map(|host| bed.client_of(host, 1, Tenant(host.into())).expect("it listens"));
    let stamps = clients.each_mut().map(Stamp::new);
    for turn in 0..6 {
        let (client, stamp) = (&mut clients[turn % 2], &stamps[turn % 2]);
        // Nothing is lent, so that what is lent after this was withdrawn.
        want(&bed, &node, 0);
        until(&bed, |record| record.memory_bytes == 0);
        want(&bed, &node, BYTES);
        until(&bed, |record| record.memory_bytes == BYTES);
        let mut held = Vec::new();
        while let Ok(extent) = client.allocate(NODE, SizeClass::SECTION) {
            assert!(stamp.finds_zeros(client, &extent), "turn {turn}");
            stamp.write(client, &extent);
            held.push(extent);
        }
        assert_eq!(held.len() as u64, BYTES / SECTION_BYTES, "none waits to be cleared");
        held.iter().for_each(|extent| client.free(*extent).expect("it is ours"));
    }
    node.stop();
}

/// Whoever connects as the node shuts the node's own connection out.
#[test]
fn a_node_whose_own_connection_breaks_lends_what_it_says() {
    let bed = Bed::new();
    let node = start(&bed);
    let mut client = bed.client(1, 1).expect("it listens");
    for epoch in 2..20 {
        let wanted = epoch * 7 % (2 * BYTES / SECTION_BYTES + 1) * SECTION_BYTES;
        want(&bed, &node, wanted);
        // Unless the node has connected more often than that.
        bed.client(Host::NODE.0, epoch).ok();
        until(&bed, |record| (record.memory_bytes, record.requested_memory_bytes) == (wanted, wanted));
        let held = sections(&mut client, wanted / SECTION_BYTES);
        assert!(client.allocate(NODE, SizeClass::CHUNK).is_err(), "no more than it says");
        held.iter().for_each(|extent| client.free(*extent).expect("it is ours"));
    }
    node.stop();
}

#[test]
fn a_wish_of_another_life_is_not_heeded() {
    let bed = Bed::new();
    let node = start(&bed);
    want(&bed, &node, SECTION_BYTES);
    until(&bed, |record| record.memory_bytes == SECTION_BYTES);
    node.stop();
    let node = start(&bed);
    assert_eq!(node.ready.record.memory_bytes, BYTES);
    // More than the most is the most.
    want(&bed, &node, u64::MAX);
    until(&bed, |record| record.memory_bytes == 2 * BYTES);
    node.stop();
}
