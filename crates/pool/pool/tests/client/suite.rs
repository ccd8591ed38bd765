//! Tests of the client that run over every fabric: several threads at one node, and requests that a
//! client refuses.

use std::collections::HashSet;
use std::sync::Arc;

use aquifer_fabric::{
    Access, Completion, Endpoint, Host, Identity, LocalKey, LocalSlice, Memory, RemoteAddr, Scope, Tenant,
    Verb, Work, WorkError,
};
use aquifer_pool::layout::Layout;
use aquifer_pool::size::SECTION_BYTES;
use aquifer_pool::word::AlignedRun;
use aquifer_pool::{Extent, FormatError, LeakDetector, NodeId, NodeMemory, PoolClient, PoolError, SizeClass};

use super::Bed;

#[path = "suite/leaks.rs"]
mod leaks;
#[path = "suite/many.rs"]
mod many;

const NODE: NodeId = NodeId(7);

fn lend(bed: &Bed, sections: u64) -> NodeMemory {
    NodeMemory::create(bed.target(), NODE, sections * SECTION_BYTES).expect("memory")
}

fn bed(sections: u64) -> Bed {
    let bed = Bed::bare();
    lend(&bed, sections);
    bed
}

impl Bed {
    fn endpoint(&self, host: u16) -> Box<dyn Endpoint> {
        self.endpoint_of(host, 0)
    }

    fn endpoint_of(&self, host: u16, tenant: u32) -> Box<dyn Endpoint> {
        let who = Identity { host: Host(host), epoch: 1, tenant: Tenant(tenant) };
        self.connect(who).expect("the target listens")
    }

    fn client(&self, host: u16) -> PoolClient {
        self.client_of(host, 0)
    }

    fn client_in(&self, host: u16, leak_detector: &Arc<LeakDetector>) -> PoolClient {
        let mut client = PoolClient::with_leak_detector(Host(host), Tenant(0), Arc::clone(leak_detector));
        client.add_node(NODE, self.endpoint(host)).expect("a good node");
        client
    }

    fn client_of(&self, host: u16, tenant: u32) -> PoolClient {
        let mut client = PoolClient::new(Host(host), Tenant(tenant));
        client.add_node(NODE, self.endpoint_of(host, tenant)).expect("a good node");
        client
    }
}

fn class(k: u8) -> SizeClass {
    SizeClass::new(k).expect("a class")
}

/// Executes one operation on an extent.
fn execute(client: &mut PoolClient, extent: &Extent, verb: Verb) -> u64 {
    try_execute(client, extent, verb).expect("the extent's key opens it")
}

fn try_execute(client: &mut PoolClient, extent: &Extent, verb: Verb) -> Result<u64, WorkError> {
    let endpoint = client.endpoint(extent.node).expect("connected");
    endpoint.post(&[Work { id: 5, verb, signalled: true }]).expect("room");
    let mut done: Vec<Completion> = Vec::new();
    while endpoint.poll(&mut done, 1) == 0 {
        std::thread::yield_now();
    }
    assert_eq!(done[0].id, 5);
    done[0].outcome
}

/// The offsets of the first, a middle and the last word of each chunk.
fn stamps(extent: &Extent) -> impl Iterator<Item = u64> {
    let chunks = 0..u64::from(extent.class.chunks());
    chunks.flat_map(|chunk| [0, 2048, 4088].map(|place| chunk * 4096 + place))
}

struct Stamper {
    memory: Arc<Memory>,
    key: LocalKey,
}

impl Stamper {
    fn new(client: &mut PoolClient) -> Self {
        let memory = Arc::new(Memory::create("stamps", 2 << 20).expect("memory"));
        let key =
            client.endpoint(NODE).expect("connected").register_local(Arc::clone(&memory)).expect("room");
        Self { memory, key }
    }

    fn local(&self, extent: &Extent) -> LocalSlice {
        LocalSlice { key: self.key, offset: 0, len: u32::try_from(extent.class.bytes()).unwrap() }
    }

    fn write(&self, client: &mut PoolClient, extent: &Extent, stamp: u64) {
        for at in stamps(extent) {
            self.memory.write(usize::try_from(at).unwrap(), &(stamp ^ at).to_le_bytes());
        }
        let remote = RemoteAddr { addr: extent.addr, key: extent.key };
        execute(client, extent, Verb::Write { local: self.local(extent), remote });
    }

    fn verify(&self, client: &mut PoolClient, extent: &Extent, stamp: u64) {
        let remote = RemoteAddr { addr: extent.addr, key: extent.key };
        execute(client, extent, Verb::Read { local: self.local(extent), remote });
        for at in stamps(extent) {
            let mut word = [0; 8];
            self.memory.read(usize::try_from(at).unwrap(), &mut word);
            assert_eq!(u64::from_le_bytes(word), stamp ^ at, "{extent:?} was written by another");
        }
    }
}

/// Allocates, stamps, verifies and frees extents at random.
fn worker(bed: &Bed, host: u16) {
    let mut client = bed.client(host);
    let stamper = Stamper::new(&mut client);
    let mut random = 0x9e37_79b9_7f4a_7c15_u64 ^ u64::from(host);
    let mut next = |end: u64| {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        random % end
    };
    let mut owned: Vec<(Extent, u64)> = Vec::new();
    let mut full = 0;
    for turn in 0..Bed::TURNS {
        let stamp = (u64::from(host) << 48) | (turn << 8);
        // Small extents are more frequent than large ones.
        let k = u8::try_from(next(10).min(next(10))).unwrap();
        if owned.len() < 24 && next(2) == 0 {
            let count = u32::try_from(1 + next(4)).unwrap();
            match client.allocate_many(NODE, class(k), count) {
                Ok(extents) => {
                    assert!((1..=count as usize).contains(&extents.len()));
                    for extent in extents {
                        stamper.write(&mut client, &extent, stamp);
                        owned.push((extent, stamp));
                    }
                }
                Err(PoolError::Full { .. }) => full += 1,
                Err(error) => panic!("{error}"),
            }
        } else if !owned.is_empty() {
            let index = usize::try_from(next(owned.len() as u64)).unwrap();
            let (extent, stamp) = owned.swap_remove(index);
            stamper.verify(&mut client, &extent, stamp);
            client.free(extent).expect("the extent is this host's");
        }
    }
    assert!(full < Bed::TURNS);
    for (extent, stamp) in &owned {
        stamper.verify(&mut client, extent, *stamp);
    }
    let extents: Vec<Extent> = owned.into_iter().map(|(extent, _)| extent).collect();
    let freed = client.free_many(NODE, &extents).expect("the node lives");
    freed.into_iter().for_each(|freed| freed.expect("the extent is this host's"));
}

/// Runs four threads at a node of `sections` sections.
fn share(sections: u64) {
    let bed = bed(sections);
    std::thread::scope(|scope| {
        for host in 1..=4 {
            let bed = &bed;
            scope.spawn(move || worker(bed, host));
        }
    });
    let mut client = bed.client(9);
    assert_eq!(client.free_bytes(NODE), sections * SECTION_BYTES);
    let addresses: HashSet<u64> =
        (0..sections).map(|_| client.allocate(NODE, SizeClass::SECTION).expect("all is free").addr).collect();
    assert_eq!(addresses.len() as u64, sections);
    let full = client.allocate(NODE, SizeClass::CHUNK);
    assert!(matches!(full, Err(PoolError::Full { node: NODE, bytes: 4096 })));
}

#[test]
fn four_threads_never_get_the_same_memory() {
    share(6);
}

#[test]
fn four_threads_never_get_the_same_memory_of_one_section() {
    share(1);
}

#[test]
fn every_size_is_aligned_opened_by_its_key_and_counted() {
    let bed = bed(2);
    let mut client = bed.client(1);
    assert_eq!((client.free_bytes(NODE), client.total_bytes(NODE)), (2 * SECTION_BYTES, 2 * SECTION_BYTES));
    let stamper = Stamper::new(&mut client);
    for k in 0..SizeClass::COUNT {
        let extent = client.allocate(NODE, class(k)).expect("the node is empty");
        assert_eq!(extent.addr % extent.class.bytes(), 0);
        assert_eq!(client.free_bytes(NODE), 2 * SECTION_BYTES - class(k).bytes());
        stamper.write(&mut client, &extent, k.into());
        stamper.verify(&mut client, &extent, k.into());
        client.free(extent).expect("the extent is this host's");
        assert_eq!(client.free_bytes(NODE), 2 * SECTION_BYTES);
    }
}

#[test]
fn a_node_can_be_allocated_to_the_last_chunk() {
    let bed = bed(1);
    let mut client = bed.client(1);
    let mut extents = client.allocate_many(NODE, SizeClass::CHUNK, 1000).expect("room");
    assert_eq!(extents.len(), 512);
    client
        .free_many(NODE, &extents)
        .expect("the node lives")
        .into_iter()
        .for_each(|freed| freed.expect("the extent is this host's"));
    extents = (0..512).map(|_| client.allocate(NODE, SizeClass::CHUNK).expect("room")).collect();
    assert_eq!(extents.iter().map(|extent| extent.addr).collect::<HashSet<_>>().len(), 512);
    assert_eq!(client.free_bytes(NODE), 0);
    assert!(matches!(client.allocate(NODE, SizeClass::CHUNK), Err(PoolError::Full { .. })));
    // Another host finds the freed chunk, although it has seen the node full.
    let mut other = bed.client(2);
    assert!(matches!(other.allocate(NODE, SizeClass::CHUNK), Err(PoolError::Full { .. })));
    client.free(extents[300]).expect("the extent is this host's");
    assert_eq!(other.allocate(NODE, SizeClass::CHUNK).expect("one is free").addr, extents[300].addr);
}

#[test]
fn extents_of_others_cannot_be_freed() {
    let bed = bed(2);
    let (mut mine, mut other) = (bed.client(1), bed.client(2));
    for k in 0..SizeClass::COUNT {
        let extent = mine.allocate(NODE, class(k)).expect("room");
        assert!(matches!(other.free(extent), Err(PoolError::NotOurs { owner: Host(1), .. })), "k = {k}");
        let beyond = Extent { addr: extent.addr + 4 * SECTION_BYTES, ..extent };
        assert!(matches!(mine.free(beyond), Err(PoolError::NotAllocated { .. })));
        let crooked = Extent { addr: extent.addr + 1, ..extent };
        assert!(matches!(mine.free(crooked), Err(PoolError::NotAllocated { .. })));
        let before = Extent { addr: 0, ..extent };
        assert!(matches!(mine.free(before), Err(PoolError::NotAllocated { .. })));
        if k > 0 {
            let part = Extent { class: class(k - 1), ..extent };
            assert!(matches!(mine.free(part), Err(PoolError::NotAllocated { .. })), "k = {k}");
        }
        mine.free(extent).expect("the extent is this host's");
        assert!(matches!(mine.free(extent), Err(PoolError::NotAllocated { .. })), "twice, k = {k}");
    }
    other.refresh(NODE).expect("the node lives");
    assert_eq!(other.free_bytes(NODE), 2 * SECTION_BYTES);
}

/// An extent that was freed and allocated again is another extent, although it has the same place
/// and size.
#[test]
fn a_second_free_does_not_free_the_extent_of_another() {
    let bed = bed(2);
    let mut client = bed.client(1);
    for k in 0..SizeClass::COUNT {
        let stale = client.allocate(NODE, class(k)).expect("room");
        client.free(stale).expect("the extent is this host's");
        let fresh = client.allocate(NODE, class(k)).expect("room");
        assert_eq!(fresh.addr, stale.addr, "k = {k}");
        // Other allocations in the same words overwrite the record of this one.
        let others: Vec<Extent> = (0..3).filter_map(|_| client.allocate(NODE, class(k)).ok()).collect();
        assert!(matches!(client.free(stale), Err(PoolError::NotAllocated { .. })), "k = {k}");
        assert!(
            client.is_current(fresh).expect("the node answers")
                && !client.is_current(stale).expect("the node answers")
        );
        client.free(fresh).expect("the extent is this host's");
        others.into_iter().for_each(|extent| client.free(extent).expect("the extent is this host's"));
    }
    assert_eq!(client.free_bytes(NODE), 2 * SECTION_BYTES);
}

/// A key opens its extent to its tenant from the allocation to the free.
#[test]
fn keys_open_their_extent_only_to_its_tenant() {
    let bed = bed(2);
    let (mut own, mut friend, mut foreign) = (bed.client_of(1, 5), bed.client_of(2, 5), bed.client_of(3, 6));
    let stampers = [&mut own, &mut friend, &mut foreign].map(Stamper::new);
    let read = |stamper: &Stamper, remote| Verb::Read {
        local: LocalSlice { key: stamper.key, offset: 0, len: 8 },
        remote,
    };
    for k in 0..SizeClass::COUNT {
        let extent = own.allocate(NODE, class(k)).expect("room");
        let neighbour = own.allocate(NODE, class(k.min(8))).expect("room");
        let last = RemoteAddr { addr: extent.addr + extent.class.bytes() - 8, key: extent.key };
        let there = RemoteAddr { addr: neighbour.addr, key: extent.key };
        assert_eq!(try_execute(&mut own, &extent, read(&stampers[0], last)), Ok(8), "k = {k}");
        assert_eq!(try_execute(&mut friend, &extent, read(&stampers[1], last)), Ok(8), "k = {k}");
        let refused = Err(WorkError::RemoteAccess);
        assert_eq!(try_execute(&mut own, &extent, read(&stampers[0], there)), refused, "k = {k}");
        assert_eq!(try_execute(&mut foreign, &extent, read(&stampers[2], last)), refused, "k = {k}");
        own.free(extent).expect("the extent is this host's");
        own.free(neighbour).expect("the extent is this host's");
        // On an RDMA device a window stays open until the node closes it.
        bed.target().expel(extent.addr..extent.addr + extent.class.bytes());
        assert_eq!(try_execute(&mut own, &extent, read(&stampers[0], last)), refused, "k = {k}");
        assert_eq!(try_execute(&mut friend, &extent, read(&stampers[1], last)), refused, "k = {k}");
    }
}

/// Another tenant can allocate used memory only after the node has cleared it.
#[test]
fn another_tenant_gets_only_cleared_memory() {
    let bed = Bed::bare();
    let node_memory = lend(&bed, 1);
    let (mut first, mut second) = (bed.client_of(1, 5), bed.client_of(2, 6));
    let mut node = bed.client_of(4095, u32::MAX);
    let stampers = [&mut first, &mut second].map(Stamper::new);
    for k in 0..SizeClass::COUNT {
        let extents: Vec<Extent> = std::iter::from_fn(|| first.allocate(NODE, class(k)).ok()).collect();
        assert_eq!(extents.len(), 512 >> k);
        extents.iter().for_each(|extent| stampers[0].write(&mut first, extent, 77));
        extents.iter().for_each(|extent| first.free(*extent).expect("the extent is this host's"));
        let none = second.allocate(NODE, class(k));
        assert!(matches!(none, Err(PoolError::Full { .. })), "k = {k}: {none:?}");
        let again = first.allocate(NODE, class(k)).expect("the same tenant may allocate it at once");
        first.free(again).expect("the extent is this host's");

        let group = node_memory.find_uncleared(0).expect("all of it was used");
        assert_eq!(group.len(), 16);
        let allocated =
            node.allocate_group(NODE, 0, group).expect("the node answers").expect("the group is free");
        assert!(
            matches!(first.allocate(NODE, class(k)), Err(PoolError::Full { .. })),
            "the memory is being cleared"
        );
        node_memory.revoke_keys(&allocated);
        bed.target().expel(allocated.addr..allocated.addr + allocated.class.bytes());
        node_memory.clear(&allocated);
        node.free(allocated).expect("the group is the node's");
        assert_eq!(node_memory.find_uncleared(0), None);

        let fresh = second.allocate(NODE, class(k)).expect("the memory has no owner");
        let remote = RemoteAddr { addr: fresh.addr, key: fresh.key };
        execute(&mut second, &fresh, Verb::Read { local: stampers[1].local(&fresh), remote });
        let mut found = vec![1; usize::try_from(fresh.class.bytes()).unwrap()];
        stampers[1].memory.read(0, &mut found);
        assert!(found.iter().all(|byte| *byte == 0), "k = {k}");
        second.free(fresh).expect("the extent is this host's");
        let group = node_memory.find_uncleared(0).expect("the memory was used");
        let allocated =
            node.allocate_group(NODE, 0, group).expect("the node answers").expect("the group is free");
        node_memory.clear(&allocated);
        node.free(allocated).expect("the group is the node's");
    }
}

/// A node whose connection broke frees the section that it was changing, and keeps offline
/// sections.
#[test]
fn a_recovery_within_one_section_does_not_change_others() {
    let bed = Bed::bare();
    let node_memory = lend(&bed, 3);
    let mut node = bed.client_of(4095, u32::MAX);
    let allocated = [0, 2].map(|section| {
        node.allocate_group(NODE, section, AlignedRun::SECTION).unwrap().expect("the group is free")
    });
    drop(node);
    let mut node = bed.client_of(4095, u32::MAX);
    let recovered = node.recover_within(NODE, Host::NODE, 0..1).expect("the node answers");
    assert_eq!((recovered.extents, recovered.chunks), (1, 512));
    assert_eq!([0, 1, 2].map(|section| node_memory.is_offline(section)), [false, false, true]);
    assert_eq!(node.total_bytes(NODE), 2 * SECTION_BYTES);
    assert_eq!(node_memory.section_extent(2), allocated[1]);
    node.free(allocated[1]).expect("the group is the node's");
    node.refresh(NODE).expect("the node answers");
    assert_eq!((node.total_bytes(NODE), node.free_bytes(NODE)), (3 * SECTION_BYTES, 3 * SECTION_BYTES));
}

#[test]
fn chunks_are_not_freed_as_a_whole_span() {
    let bed = bed(1);
    let mut client = bed.client(1);
    let chunks: Vec<Extent> =
        (0..32).map(|_| client.allocate(NODE, SizeClass::CHUNK).expect("room")).collect();
    let span = Extent { class: SizeClass::SPAN, ..chunks[0] };
    assert!(matches!(client.free(span), Err(PoolError::NotAllocated { .. })));
    chunks.into_iter().for_each(|chunk| client.free(chunk).expect("the extent is this host's"));
}

#[test]
fn the_users_completions_are_not_lost_in_the_pool() {
    let bed = bed(1);
    let mut client = bed.client(1);
    let stamper = Stamper::new(&mut client);
    let extent = client.allocate(NODE, SizeClass::CHUNK).expect("room");
    let remote = RemoteAddr { addr: extent.addr, key: extent.key };
    let local = LocalSlice { key: stamper.key, offset: 0, len: 4096 };
    let depth = client.endpoint(NODE).expect("connected").limits().queue_depth;
    let batch: Vec<Work> = (0..depth as u64)
        .map(|id| Work { id, verb: Verb::Read { local, remote }, signalled: true })
        .collect();
    client.endpoint(NODE).expect("connected").post(&batch).expect("the queue holds its depth");
    // The queue is full of the user's operations, and the pool's operations still complete.
    let second = client.allocate(NODE, SizeClass::SPAN).expect("room");
    client.free(second).expect("the extent is this host's");
    // The pool keeps at most as many completions as the queue holds; then the user must poll.
    let endpoint = client.endpoint(NODE).expect("connected");
    assert!(endpoint.post(&batch[..1]).is_err());
    let mut done = Vec::new();
    while done.len() < depth {
        endpoint.poll(&mut done, 7);
    }
    assert_eq!(
        done.iter().map(|completion| completion.id).collect::<Vec<_>>(),
        (0..depth as u64).collect::<Vec<_>>()
    );
    assert!(endpoint.post(&batch[..1]).is_ok());
}

#[test]
fn a_dead_node_and_a_full_node_have_different_errors() {
    let bed = bed(1);
    let mut client = bed.client(1);
    let extent = client.allocate(NODE, SizeClass::CHUNK).expect("room");
    drop(bed);
    assert!(matches!(client.allocate(NODE, SizeClass::CHUNK), Err(PoolError::NodeGone { node: NODE, .. })));
    assert!(matches!(client.free(extent), Err(PoolError::NodeGone { .. })));
    assert!(matches!(client.refresh(NODE), Err(PoolError::NodeGone { .. })));
    assert!(client.remove_node(NODE).is_some());
    assert!(client.remove_node(NODE).is_none());
    assert!(matches!(client.allocate(NODE, SizeClass::CHUNK), Err(PoolError::NoSuchNode { .. })));
}

#[test]
fn a_fenced_host_changes_nothing() {
    let bed = bed(1);
    let (mut fenced, mut other) = (bed.client(1), bed.client(2));
    let extent = fenced.allocate(NODE, SizeClass::CHUNK).expect("room");
    bed.target().fence(Host(1), 1);
    assert!(matches!(fenced.free(extent), Err(PoolError::NodeGone { .. })));
    assert!(matches!(fenced.allocate(NODE, SizeClass::SPAN), Err(PoolError::NodeGone { .. })));
    other.refresh(NODE).expect("the node lives");
    assert_eq!(other.free_bytes(NODE), SECTION_BYTES - 4096);
}

/// The error of a client for a node whose memory is filled by `fill`.
fn add_odd_node(len: usize, fill: impl FnOnce(&Memory)) -> Result<(), PoolError> {
    let bed = Bed::bare();
    let memory = Arc::new(Memory::create("odd", len).expect("memory"));
    fill(&memory);
    bed.target().register(memory, Access::ALL, Scope::Anyone).expect("room");
    PoolClient::new(Host(1), Tenant(0)).add_node(NODE, bed.endpoint(1))
}

#[test]
fn memory_of_another_format_is_refused() {
    let layout = Layout::new(NODE.0, 1).expect("a layout");
    let len = usize::try_from(layout.region_bytes()).unwrap();
    let cause = |outcome| match outcome {
        Err(PoolError::Format { node: NODE, cause }) => cause,
        other => panic!("{other:?}"),
    };
    assert!(add_odd_node(len, |memory| memory.write(0, &layout.encode())).is_ok());
    assert_eq!(cause(add_odd_node(len, |_| ())), FormatError::Magic);
    let future = |memory: &Memory| {
        memory.write(0, &layout.encode());
        memory.write(8, &9_u32.to_le_bytes());
    };
    assert_eq!(cause(add_odd_node(len, future)), FormatError::Version { version: 9 });
    let foreign = Layout::new(NODE.0 + 1, 1).expect("a layout").encode();
    assert_eq!(
        cause(add_odd_node(len, |memory| memory.write(0, &foreign))),
        FormatError::OtherNode { found: NODE.0 + 1 }
    );
    let short = add_odd_node(len - 4096, |memory| memory.write(0, &layout.encode()));
    assert!(matches!(cause(short), FormatError::TooShort { .. }));
    let bed = Bed::bare();
    let none = PoolClient::new(Host(1), Tenant(0)).add_node(NODE, bed.endpoint(1));
    assert_eq!(cause(none), FormatError::NoRegion);
}

#[test]
fn damaged_metadata_is_an_error() {
    let layout = Layout::new(NODE.0, 1).expect("a layout");
    let bed = Bed::bare();
    let memory =
        Arc::new(Memory::create("odd", usize::try_from(layout.region_bytes()).unwrap()).expect("memory"));
    memory.write(0, &layout.encode());
    bed.target().register(Arc::clone(&memory), Access::ALL, Scope::Anyone).expect("room");
    let mut client = PoolClient::new(Host(1), Tenant(0));
    client.add_node(NODE, bed.endpoint(1)).expect("a good node");
    assert!(matches!(client.add_node(NODE, bed.endpoint(1)), Err(PoolError::NodeExists { .. })));
    memory.write(4096, &u64::MAX.to_le_bytes());
    let damaged = client.allocate(NODE, SizeClass::SPAN);
    assert!(matches!(damaged, Err(PoolError::Damaged { .. })), "{damaged:?}");
}

#[test]
fn the_node_and_a_client_count_the_same_free_bytes() {
    let bed = Bed::bare();
    let node_memory = lend(&bed, 3);
    let mut client = bed.client(1);
    assert_eq!(node_memory.free_bytes(), 3 * SECTION_BYTES);
    let mut allocated = Vec::new();
    let mut expected = 3 * SECTION_BYTES;
    for k in [0, 9, 5, 1, 0, 4, 7] {
        allocated.push(client.allocate(NODE, class(k)).expect("room"));
        expected -= class(k).bytes();
        assert_eq!(node_memory.free_bytes(), expected);
        client.refresh(NODE).expect("the node answers");
        assert_eq!(client.free_bytes(NODE), expected);
    }
    allocated.into_iter().for_each(|extent| client.free(extent).expect("the extent is this host's"));
    assert_eq!(node_memory.free_bytes(), 3 * SECTION_BYTES);
}
