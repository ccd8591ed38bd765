//! Regions that are registered and removed while endpoints are connected.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use aquifer_fabric::{
    Access, EndpointError, Host, Identity, Key, KeyEntry, KeyTable, Memory, Region, Registration, RemoteAddr,
    Scope, TargetError, Tenant, UnitMap, Verb, WindowSpec, Work, WorkError,
};

use super::harness::{Harness, REGION_BYTES, REGIONS_MAX, WHO, WINDOWS_MAX, signalled};

const REFUSED: Result<u64, WorkError> = Err(WorkError::RemoteAccess);
const ROW: u64 = 2 << 20;

fn window<H: Harness>(harness: &H, region: &Region, access: Access) -> Key {
    let range = region.base..region.base + 64;
    harness.target().bind(&WindowSpec { range, access, scope: Scope::Anyone }).unwrap()
}

/// Memory whose data is one run that a key of a key table opens to the tenant.
fn with_table<H: Harness>(harness: &H, key: Key) -> (Arc<Memory>, Region) {
    let memory = Arc::new(Memory::create("keyed", 4 << 20).unwrap());
    let table = KeyTable { entries_at: 4096, data: ROW..2 * ROW };
    memory.atomic_u64(4096).store(KeyEntry::open(key, WHO.tenant).0, Ordering::SeqCst);
    let plain = Registration::plain(Arc::clone(&memory), Access::ALL, Scope::Host(Host(99)));
    let region = harness.target().register_as(Registration { table: Some(table), ..plain });
    (memory, region.unwrap())
}

pub fn endpoints_use_regions_that_are_registered_later<H: Harness>() {
    let harness = H::start();
    let mut client = harness.client(WHO);
    let mut foreign = harness.client(Identity { host: Host(8), epoch: 1, tenant: Tenant(71) });
    let (memory, region) = harness.region(Access::READ, Scope::Tenant(WHO.tenant));
    memory.write(0, b"the bytes");
    assert_eq!(client.read(region.base, region.key, 9), Ok(9));
    let mut seen = [0; 9];
    client.memory.read(0, &mut seen);
    assert_eq!(&seen, b"the bytes");
    assert_eq!(foreign.read(region.base, region.key, 9), REFUSED);
    assert_eq!(client.write(region.base, region.key, 9), REFUSED);
    let writes = window(&harness, &region, Access::ALL);
    client.memory.write(0, b"other");
    assert_eq!(client.write(region.base, writes, 5), Ok(5), "a window opens more than the region's key");
    assert_eq!(client.add(region.base + 16, writes, 1), Ok(0));
    assert_eq!(client.read(region.base, region.key, 9), Ok(9));
    client.memory.read(0, &mut seen);
    assert_eq!(&seen, b"otherytes");
    let key = Key::of_run(9, 77);
    let (_keyed, region) = with_table(&harness, key);
    assert_eq!(client.read(region.base + ROW, key, 64), Ok(64));
    assert_eq!(client.write(region.base + ROW, key, 64), Ok(64));
    assert_eq!(foreign.read(region.base + ROW, key, 64), REFUSED);
    assert_eq!(client.read(region.base, region.key, 64), REFUSED);
    assert_eq!(client.endpoint.regions(), [], "the regions at the time of connecting");
}

pub fn a_removed_region_is_open_to_no_key<H: Harness>() {
    let harness = H::start();
    let target = harness.target();
    let mut client = harness.client(WHO);
    for round in 0..50 {
        let (memory, region) = harness.region(Access::ALL, Scope::Anyone);
        let (other, stays) = harness.region(Access::ALL, Scope::Anyone);
        let windows = [Access::READ, Access::ALL].map(|access| window(&harness, &region, access));
        let kept = window(&harness, &stays, Access::ALL);
        for key in [region.key, windows[0], windows[1]] {
            assert_eq!(client.read(region.base, key, 8), Ok(8), "round {round}");
        }
        assert_eq!(client.read(stays.base, kept, 8), Ok(8));
        if round % 2 == 0 {
            target.invalidate(region.key).unwrap();
            target.invalidate(windows[0]).unwrap();
        }
        target.deregister(region.key).unwrap();
        assert_eq!(Arc::strong_count(&memory), 1, "the target does not refer to it");
        for key in [region.key, windows[0], windows[1]] {
            assert_eq!(client.read(region.base, key, 8), REFUSED, "round {round}");
            assert!(matches!(target.invalidate(key), Err(TargetError::NoSuchKey(_))));
        }
        assert!(matches!(target.deregister(region.key), Err(TargetError::NoSuchKey(_))));
        assert!(matches!(target.deregister(kept), Err(TargetError::NoSuchKey(_))), "a window is no region");
        let range = region.base..region.base + 8;
        let gone = target.bind(&WindowSpec { range, access: Access::READ, scope: Scope::Anyone });
        assert!(matches!(gone, Err(TargetError::OutOfRange { .. })));
        assert_eq!(client.add(stays.base, kept, 1), Ok(0), "another region stays");
        target.deregister(stays.key).unwrap();
        assert_eq!(Arc::strong_count(&other), 1);
    }
}

pub fn a_removed_key_table_opens_nothing<H: Harness>() {
    let harness = H::start();
    let mut client = harness.client(WHO);
    let key = Key::of_run(9, 77);
    for _ in 0..3 {
        let (memory, region) = with_table(&harness, key);
        let (_second_memory, second) = with_table(&harness, Key::of_run(9, 78));
        assert_eq!(client.read(region.base + ROW, key, 64), Ok(64));
        assert_eq!(client.read(second.base + ROW, key, 64), REFUSED);
        harness.target().deregister(region.key).unwrap();
        assert_eq!(client.read(region.base + ROW, key, 64), REFUSED);
        assert_eq!(Arc::strong_count(&memory), 1);
        assert_eq!(client.read(second.base + ROW, Key::of_run(9, 78), 64), Ok(64));
        harness.target().deregister(second.key).unwrap();
    }
}

pub fn slots_of_regions_are_reused_with_fresh_keys<H: Harness>() {
    let harness = H::start();
    let mut client = harness.client(WHO);
    let mut stale: Vec<Region> = Vec::new();
    for round in 0..40_u8 {
        let regions: Vec<_> = (0..REGIONS_MAX).map(|_| harness.region(Access::ALL, Scope::Anyone)).collect();
        let more = harness.target().register(Arc::clone(&regions[0].0), Access::ALL, Scope::Anyone);
        assert!(matches!(more, Err(TargetError::Full { what: "regions", limit: REGIONS_MAX })));
        for _ in 0..WINDOWS_MAX {
            window(&harness, &regions[0].1, Access::ALL);
        }
        for (at, (memory, region)) in (0..).zip(&regions) {
            assert!(stale.iter().all(|old| old.key != region.key), "{region:?} has an old key");
            memory.write(0, &[round, at]);
            assert_eq!(client.read(region.base, region.key, 2), Ok(2));
            let mut seen = [0; 2];
            client.memory.read(0, &mut seen);
            assert_eq!(seen, [round, at], "the READ finds the memory of this registration");
        }
        for old in stale.iter().rev().take(4 * REGIONS_MAX) {
            assert_eq!(client.read(old.base, old.key, 2), REFUSED, "{old:?}");
        }
        for (_, region) in regions {
            harness.target().deregister(region.key).unwrap();
            stale.push(region);
        }
    }
}

/// The property on which reuse of the memory depends.
pub fn no_access_outlives_its_region<H: Harness>() {
    let harness = H::start();
    let mut client = harness.client(WHO);
    client.memory.write(0, &[1; 4096]);
    for round in 0..50 {
        let memory = Arc::new(Memory::create("movable", REGION_BYTES).unwrap());
        let words = Arc::new(Memory::create("words", 4096).unwrap());
        let map = UnitMap { words, at: 0, units: 4, unit_bytes: 4096 };
        (0..4).for_each(|unit| map.store(unit, Some(unit * 4096)));
        let target = harness.target();
        let plain = Registration::plain(Arc::clone(&memory), Access::ALL, Scope::Anyone);
        let map_of_round = (round % 2 == 1).then(|| map.clone());
        let region = target.register_as(Registration { map: map_of_round, ..plain });
        let region = region.unwrap();
        let (local, remote) = (client.slice(0, 4096), RemoteAddr { addr: region.base, key: region.key });
        let works: Vec<Work> = (0..8).map(|id| signalled(id, Verb::Write { local, remote })).collect();
        client.endpoint.post(&works).unwrap();
        // Either outcome of the operations in flight is correct.
        target.deregister(region.key).unwrap();
        memory.write(0, &[0; 4096]);
        assert_eq!((Arc::strong_count(&memory), Arc::strong_count(&map.words)), (1, 1));
        for done in client.wait(works.len()) {
            assert!(matches!(done.outcome, Ok(4096) | Err(WorkError::RemoteAccess)), "{done:?}");
        }
        let mut seen = [9; 4096];
        memory.read(0, &mut seen);
        assert!(seen == [0; 4096], "round {round}: a WRITE took effect after its region was removed");
    }
}

pub fn read_only_memory_is_registered_for_reads_only<H: Harness>() {
    let harness = H::start();
    let target = harness.target();
    let memory = Memory::create("written elsewhere", REGION_BYTES).unwrap();
    memory.write(0, b"the bytes");
    let read_only = Memory::from_fd_read_only(memory.read_only_fd().unwrap(), REGION_BYTES).unwrap();
    let read_only = Arc::new(read_only);
    for access in [Access::ALL, Access::READ_WRITE] {
        let refused = target.register(Arc::clone(&read_only), access, Scope::Anyone);
        assert!(matches!(refused, Err(TargetError::ReadOnly)));
    }
    let region = target.register(read_only, Access::READ, Scope::Anyone).unwrap();
    let range = region.base..region.base + 64;
    let window = WindowSpec { range: range.clone(), access: Access::READ_WRITE, scope: Scope::Anyone };
    assert!(matches!(target.bind(&window), Err(TargetError::ReadOnly)));
    let reads = target.bind(&WindowSpec { range, access: Access::READ, scope: Scope::Anyone }).unwrap();
    let mut client = harness.client(WHO);
    for key in [region.key, reads] {
        assert_eq!(client.read(region.base, key, 9), Ok(9));
        let mut seen = [0; 9];
        client.memory.read(0, &mut seen);
        assert_eq!(&seen, b"the bytes");
        assert_eq!(client.write(region.base, key, 9), REFUSED);
        assert_eq!(client.add(region.base, key, 1), REFUSED);
    }
}

/// Local memory must be writable: a READ stores bytes there.
pub fn read_only_local_memory_is_refused<H: Harness>() {
    let harness = H::start();
    let mut endpoint = harness.connect(WHO).unwrap();
    let memory = Memory::create("written elsewhere", 4096).unwrap();
    let read_only = Memory::from_fd_read_only(memory.read_only_fd().unwrap(), 4096).unwrap();
    let refused = endpoint.register_local(Arc::new(read_only));
    assert!(matches!(refused, Err(EndpointError::ReadOnlyLocal)));
    assert!(endpoint.register_local(Arc::new(memory)).is_ok());
}
