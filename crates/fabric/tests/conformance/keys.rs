use aquifer_fabric::{
    Access, Host, Identity, Key, LocalKey, LocalSlice, RemoteAddr, Scope, TargetError, Tenant, Verb,
    WindowSpec, WorkError,
};

use crate::harness::{Harness, REGION_BYTES, WHO};

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
    assert_eq!(other_host.read(base, region.key, 8), Ok(8), "its tenant may");
    assert_eq!(own.read(base, for_host, 8), Ok(8));
    assert_eq!(other_tenant.read(base, for_host, 8), Ok(8), "its host may");
    assert_eq!(other_host.read(base, for_host, 8), REFUSED);
    assert_eq!(own.endpoint.regions()[0].key, region.key);
    assert_eq!(other_tenant.endpoint.regions()[0].key, Key(0), "not told what it may not use");
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

pub fn a_stale_key_stays_stale_when_its_slot_is_bound_again<H: Harness>() {
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
