use std::sync::Arc;
use std::sync::atomic::Ordering;

use aquifer_fabric::{
    Access, Host, Identity, Key, KeyEntry, KeyTable, LocalKey, LocalSlice, Memory, Region, Registration,
    RemoteAddr, Scope, TargetError, Tenant, Verb, WindowSpec, Work, WorkError,
};

use super::harness::{Harness, REGION_BYTES, WHO, signalled};

const REFUSED: Result<u64, WorkError> = Err(WorkError::RemoteAccess);

pub fn ranges_are_enforced_to_the_byte<H: Harness>() {
    let harness = H::start();
    let (_, region) = harness.region(Access::ALL, Scope::Anyone);
    let range = region.base + 100..region.base + 148;
    let window = WindowSpec { range: range.clone(), access: Access::ALL, scope: Scope::Anyone };
    let key = harness.target().bind(&window).unwrap();
    let mut client = harness.client(WHO);
    let region_range = region.base..region.base + region.len;
    for (range, key) in [(range, key), (region_range, region.key)] {
        assert_eq!(client.read(range.start, key, 48), Ok(48));
        assert_eq!(client.write(range.end - 48, key, 48), Ok(48));
        assert_eq!(client.read(range.end - 1, key, 1), Ok(1));
        assert_eq!(client.read(range.start - 1, key, 1), REFUSED);
        assert_eq!(client.read(range.start - 1, key, 2), REFUSED);
        assert_eq!(client.read(range.end, key, 1), REFUSED);
        assert_eq!(client.read(range.end - 47, key, 48), REFUSED);
        assert_eq!(client.write(range.end - 47, key, 48), REFUSED);
        for addr in [0, u64::MAX, u64::MAX - 47, u64::MAX - 46, 1 << 63] {
            assert_eq!(client.read(addr, key, 48), REFUSED, "the end of {addr:#x} wraps");
            assert_eq!(client.add(addr & !7, key, 1), REFUSED);
        }
    }
    let inside = region.base + 104;
    assert_eq!(client.add(inside, key, 1), Ok(0));
    assert_eq!(client.add(region.base + 144, key, 1), REFUSED, "half of the word is outside");
}

pub fn rights_are_enforced<H: Harness>() {
    let harness = H::start();
    let (_, region) = harness.region(Access::READ, Scope::Anyone);
    let mut client = harness.client(WHO);
    let range = region.base..region.base + 64;
    let atomic = Access { read: false, write: false, atomic: true };
    let write = Access { read: false, write: true, atomic: false };
    for access in [Access::READ, Access::READ_WRITE, Access::ALL, atomic, write] {
        let window = WindowSpec { range: range.clone(), access, scope: Scope::Anyone };
        let key = harness.target().bind(&window).unwrap();
        assert_eq!(client.read(range.start, key, 8).is_ok(), access.read);
        assert_eq!(client.write(range.start, key, 8).is_ok(), access.write);
        assert_eq!(client.add(range.start, key, 0).is_ok(), access.atomic);
        assert_eq!(client.swap(range.start, key, 0, 0).is_ok(), access.atomic);
    }
    assert_eq!(client.write(range.start, region.key, 8), REFUSED);
    assert_eq!(client.read(range.start, region.key, 8), Ok(8));
}

pub fn foreign_keys_are_refused<H: Harness>() {
    let harness = H::start();
    let (_, region) = harness.region(Access::ALL, Scope::Tenant(WHO.tenant));
    let window = WindowSpec {
        range: region.base..region.base + 64,
        access: Access::ALL,
        scope: Scope::Host(WHO.host),
    };
    let for_host = harness.target().bind(&window).unwrap();
    let mut own = harness.client(WHO);
    let other_tenant = Identity { tenant: Tenant(71), ..WHO };
    let mut other_tenant = harness.client(other_tenant);
    let mut other_host = harness.client(Identity { host: Host(8), ..WHO });
    let base = region.base;
    assert_eq!(own.read(base, region.key, 8), Ok(8));
    assert_eq!(other_tenant.read(base, region.key, 8), REFUSED);
    assert_eq!(other_tenant.add(base, region.key, 1), REFUSED);
    assert_eq!(other_host.read(base, region.key, 8), Ok(8), "the tenant may read");
    assert_eq!(own.read(base, for_host, 8), Ok(8));
    assert_eq!(other_tenant.read(base, for_host, 8), Ok(8), "the host may read");
    assert_eq!(other_host.read(base, for_host, 8), REFUSED);
    assert_eq!(own.endpoint.regions()[0].key, region.key);
    assert_eq!(other_tenant.endpoint.regions(), [], "regions of others are not announced");
}

pub fn forged_keys_are_refused<H: Harness>() {
    let harness = H::start();
    let (_, region) = harness.region(Access::ALL, Scope::Anyone);
    let mut client = harness.client(WHO);
    assert_eq!(client.read(region.base, Key(0), 8), REFUSED);
    for bit in 0..32 {
        let forged = Key(region.key.0 ^ (1 << bit));
        assert_eq!(client.read(region.base, forged, 8), REFUSED, "bit {bit} flipped");
    }
    assert_eq!(client.read(region.base, Key(u32::MAX), 8), REFUSED);
    assert!(matches!(harness.target().invalidate(Key(0)), Err(TargetError::NoSuchKey(_))));
    assert!(harness.target().invalidate(Key(u32::MAX)).is_err());
    assert_eq!(client.read(region.base, region.key, 8), Ok(8));
}

pub fn a_stale_key_stays_invalid_when_its_slot_is_bound_again<H: Harness>() {
    let harness = H::start();
    let (_, region) = harness.region(Access::ALL, Scope::Anyone);
    let mut client = harness.client(WHO);
    let range = region.base..region.base + 64;
    let window = WindowSpec { range, access: Access::ALL, scope: Scope::Anyone };
    let mut stale: Vec<Key> = Vec::new();
    for _ in 0..100 {
        let key = harness.target().bind(&window).unwrap();
        assert!(!stale.contains(&key), "{key:?} was handed out twice");
        assert_eq!(client.read(region.base, key, 8), Ok(8));
        harness.target().invalidate(key).unwrap();
        assert!(matches!(harness.target().invalidate(key), Err(TargetError::NoSuchKey(_))));
        stale.push(key);
        for &key in &stale {
            assert_eq!(client.read(region.base, key, 8), REFUSED);
        }
    }
    harness.target().invalidate(region.key).unwrap();
    assert_eq!(client.read(region.base, region.key, 8), REFUSED);
    let key = harness.target().bind(&window).unwrap();
    assert_eq!(client.read(region.base, key, 8), Ok(8), "the region itself is still there");
}

pub fn windows_lie_inside_one_region<H: Harness>() {
    let harness = H::start();
    let (_, region) = harness.region(Access::ALL, Scope::Anyone);
    let (_, second) = harness.region(Access::ALL, Scope::Anyone);
    let end = region.base + region.len;
    let outside = [
        region.base - 1..region.base + 8,
        end - 8..end + 1,
        end..end + 8,
        region.base..second.base + 8,
        region.base..region.base,
        0..0,
        region.base..u64::MAX,
    ];
    for range in outside {
        let window = WindowSpec { range, access: Access::ALL, scope: Scope::Anyone };
        let refused = harness.target().bind(&window);
        assert!(matches!(refused, Err(TargetError::OutOfRange { .. })), "{window:?}");
    }
}

const ROW: u64 = 2 << 20;
const ENTRIES_AT: u64 = 4096;

/// Memory with a key table: a row of entries, then at the next multiple of 2 MiB the data.
fn keyed<H: Harness>(harness: &H) -> (Arc<Memory>, Region) {
    let memory = Arc::new(Memory::create("keyed", 4 << 20).unwrap());
    let table = KeyTable { entries_at: ENTRIES_AT, data: ROW..2 * ROW };
    let plain = Registration::plain(Arc::clone(&memory), Access::ALL, Scope::Host(WHO.host));
    let registered = harness.target().register_as(Registration { table: Some(table), ..plain });
    (memory, registered.unwrap())
}

/// The address of an entry.
fn entry(region: &Region, number: u64) -> u64 {
    region.base + ENTRIES_AT + number * 8
}

/// A host that may write the table binds and revokes keys by one-sided operations.
pub fn a_table_opens_runs_to_tenants<H: Harness>() {
    let harness = H::start();
    let (memory, region) = keyed(&harness);
    let mut own = harness.client(WHO);
    let mut friend = harness.client(Identity { host: Host(8), ..WHO });
    let mut foreign = harness.client(Identity { host: Host(9), tenant: Tenant(71), ..WHO });
    let data = region.base + ROW;
    // A page, 64 KiB, 256 KiB and the whole row, each with the index of its entry.
    for (class, offset, number) in
        [(0, 5 << 12, 32 + 5), (4, 7 << 16, 32 + 7 * 16), (6, 1 << 18, 16 + 2), (9, 0, 0)]
    {
        let (key, bytes) = (Key::of_run(class, 0x5a5_a5a5), 4096 << class);
        let addr = data + offset;
        assert_eq!(friend.read(addr, key, 8), REFUSED, "not bound yet");
        let bound = KeyEntry::open(key, WHO.tenant).0;
        assert_eq!(own.swap(entry(&region, number), region.key, 0, bound), Ok(0));
        let last = addr + bytes - 8;
        memory.write(usize::try_from(last - region.base).unwrap(), b"the last");
        for client in [&mut own, &mut friend] {
            assert_eq!(client.read(last, key, 8), Ok(8));
            let mut found = [0; 8];
            client.memory.read(0, &mut found);
            assert_eq!(&found, b"the last");
            assert_eq!(client.write(addr, key, 64), Ok(64));
            assert_eq!(client.read(last, key, 9), REFUSED, "beyond the run");
            assert_eq!(client.add(addr, key, 0), REFUSED, "no atomics");
            assert_eq!(client.read(addr, Key(key.0 ^ 1), 8), REFUSED, "another key");
            assert_eq!(client.read(addr, Key::of_run(class ^ 1, 0x5a5_a5a5), 8), REFUSED, "another length");
            assert_eq!(client.read(region.base, key, 8), REFUSED, "the table itself");
            assert_eq!(client.read(addr, region.key, 8), REFUSED, "the region's key opens no data");
            assert_eq!(client.read(data + 2 * ROW, key, 8), REFUSED);
        }
        if class < 9 {
            assert_eq!(friend.read(addr - 8, key, 8), REFUSED, "a neighbour");
            assert_eq!(friend.read(addr + bytes, key, 8), REFUSED, "a neighbour");
        }
        assert_eq!(foreign.read(addr, key, 8), REFUSED, "another tenant");
        assert_eq!(foreign.read(entry(&region, number), region.key, 8), REFUSED, "the table is not for all");
        assert_eq!(own.swap(entry(&region, number), region.key, bound, 0), Ok(bound));
        harness.target().expel(addr..addr + bytes);
        assert_eq!(own.write(addr, key, 8), REFUSED, "struck");
        assert_eq!(friend.read(addr, key, 8), REFUSED, "struck");
    }
}

/// When a run passes to another tenant, no operation of the first tenant is in flight any more.
pub fn expel_ends_accesses_by_revoked_keys<H: Harness>() {
    let harness = H::start();
    let (memory, region) = keyed(&harness);
    let mut old = harness.client(WHO);
    let mut new = harness.client(Identity { host: Host(8), tenant: Tenant(71), ..WHO });
    let (addr, offset) = (region.base + ROW, usize::try_from(ROW).unwrap());
    let place = memory.atomic_u64(usize::try_from(ENTRIES_AT).unwrap());
    for turn in 0..50 {
        let mine = Key::of_run(9, turn);
        place.store(KeyEntry::open(mine, WHO.tenant).0, Ordering::SeqCst);
        old.memory.write(0, &[1; 4096]);
        let (local, remote) = (old.slice(0, 4096), RemoteAddr { addr, key: mine });
        let works: Vec<Work> = (0..8).map(|id| signalled(id, Verb::Write { local, remote })).collect();
        old.endpoint.post(&works).unwrap();
        // Either outcome of the operations in flight is correct.
        place.store(KeyEntry::closed(WHO.tenant).0, Ordering::SeqCst);
        harness.target().expel(addr..addr + ROW);
        memory.write(offset, &[0; 4096]);
        let theirs = Key::of_run(9, turn + 1000);
        place.store(KeyEntry::open(theirs, Tenant(71)).0, Ordering::SeqCst);
        for done in old.wait(works.len()) {
            assert!(matches!(done.outcome, Ok(4096) | Err(WorkError::RemoteAccess)), "{done:?}");
        }
        assert_eq!(old.write(addr, mine, 4096), REFUSED);
        assert_eq!(new.read(addr, theirs, 4096), Ok(4096));
        let mut found = [9; 4096];
        new.memory.read(0, &mut found);
        assert!(found == [0; 4096], "turn {turn}: the new owner reads bytes of the old one");
        place.store(0, Ordering::SeqCst);
        harness.target().expel(addr..addr + ROW);
    }
}

pub fn a_table_must_fit_its_region<H: Harness>() {
    let harness = H::start();
    let memory = Arc::new(Memory::create("keyed", 4 << 20).unwrap());
    let outside = [
        (4096, ROW..3 * ROW),
        (4096, 0..0),
        (4096, 4096..ROW),
        (4097, ROW..2 * ROW),
        (u64::MAX - 7, ROW..2 * ROW),
    ];
    for (entries_at, data) in outside {
        let table = KeyTable { entries_at, data };
        let plain = Registration::plain(Arc::clone(&memory), Access::ALL, Scope::Anyone);
        let refused = harness.target().register_as(Registration { table: Some(table.clone()), ..plain });
        assert!(matches!(refused, Err(TargetError::BadTable { .. })), "{table:?}");
    }
    assert!(harness.target().register(memory, Access::ALL, Scope::Anyone).is_ok(), "no slot is in use");
}

pub fn unregistered_local_memory_is_refused<H: Harness>() {
    let harness = H::start();
    let (_, region) = harness.region(Access::ALL, Scope::Anyone);
    let mut client = harness.client(WHO);
    let remote = RemoteAddr { addr: region.base, key: region.key };
    let size = REGION_BYTES as u64;
    let own = client.local;
    let bad = [
        LocalSlice { key: LocalKey(0), offset: 0, len: 8 },
        LocalSlice { key: LocalKey(own.0 + 1), offset: 0, len: 8 },
        LocalSlice { key: LocalKey(u32::MAX), offset: 0, len: 8 },
        LocalSlice { key: own, offset: size - 7, len: 8 },
        LocalSlice { key: own, offset: size + 1, len: 0 },
        LocalSlice { key: own, offset: u64::MAX - 3, len: 8 },
    ];
    for local in bad {
        let refused = Err(WorkError::LocalAccess);
        assert_eq!(client.one(Verb::Read { local, remote }), refused, "{local:?}");
        assert_eq!(client.one(Verb::Write { local, remote }), refused, "{local:?}");
        assert_eq!(client.one(Verb::Send { local }), refused, "{local:?}");
    }
    let last = LocalSlice { key: own, offset: size - 8, len: 8 };
    assert_eq!(client.one(Verb::Read { local: last, remote }), Ok(8));
}
