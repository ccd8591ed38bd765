use std::sync::Arc;

use aquifer_fabric::handshake::RefusalCode;
use aquifer_fabric::{
    Access, EndpointError, Memory, PostError, RemoteAddr, Scope, TargetError, Verb, WindowSpec, WorkError,
};

use super::harness::{ENDPOINTS_MAX, Harness, LIMITS, REGIONS_MAX, SuiteClient, WHO, WINDOWS_MAX, signalled};

pub fn the_queue_is_bounded<H: Harness>() {
    let harness = H::start();
    let (memory, region) = harness.region(Access::ALL, Scope::Anyone);
    let mut client = harness.client(WHO);
    let remote = RemoteAddr { addr: region.base, key: region.key };
    let depth = LIMITS.queue_depth;
    let batch: Vec<_> =
        (0..depth as u64 + 5).map(|id| signalled(id, Verb::FetchAdd { remote, add: 1 })).collect();
    assert_eq!(client.endpoint.limits(), LIMITS);
    assert_eq!(client.endpoint.post(&batch[..depth - 1]), Ok(()));
    assert_eq!(client.endpoint.post(&batch[..3]), Err(PostError::QueueFull { accepted: 1 }));
    assert_eq!(client.endpoint.post(&batch[..1]), Err(PostError::QueueFull { accepted: 0 }));
    assert_eq!(client.wait(2).len(), 2);
    assert_eq!(client.endpoint.post(&batch), Err(PostError::QueueFull { accepted: 2 }));
    assert_eq!(client.wait(depth).len(), depth);
    assert_eq!(client.endpoint.post(&batch[..depth]), Ok(()));
    client.wait(depth);
    let word = memory.atomic_u64(0).load(std::sync::atomic::Ordering::SeqCst);
    assert_eq!(word, 2 * depth as u64 + 2, "operations that were not accepted were not done");
}

pub fn long_transfers_are_refused<H: Harness>() {
    let harness = H::start();
    let (_, region) = harness.region(Access::ALL, Scope::Anyone);
    let mut client = harness.client(WHO);
    let limit = LIMITS.transfer_bytes_max;
    assert_eq!(client.read(region.base, region.key, limit), Ok(u64::from(limit)));
    assert_eq!(client.read(region.base, region.key, limit + 1), Err(WorkError::TooLong));
    assert_eq!(client.write(region.base, region.key, limit + 1), Err(WorkError::TooLong));
    assert_eq!(client.write(region.base, region.key, u32::MAX), Err(WorkError::TooLong));
    assert_eq!(client.write(region.base, region.key, limit), Ok(u64::from(limit)));
}

pub fn endpoints_are_bounded_and_their_slots_reused<H: Harness>() {
    let harness = H::start();
    let (_, region) = harness.region(Access::ALL, Scope::Anyone);
    let mut clients: Vec<_> = (0..ENDPOINTS_MAX).map(|_| harness.client(WHO)).collect();
    match harness.connect(WHO) {
        Err(EndpointError::Refused { refusal, .. }) => {
            assert_eq!(refusal.code, RefusalCode::NoRoom);
            assert!(refusal.reason.contains(&format!("{ENDPOINTS_MAX} endpoints")), "{refusal}");
        }
        other => panic!("one endpoint too many: {other:?}"),
    }
    for _ in 0..20 {
        clients.remove(0);
        let mut client = client_when_there_is_room(&harness);
        assert_eq!(client.read(region.base, region.key, 8), Ok(8));
        clients.push(client);
        assert!(harness.connect(WHO).is_err());
    }
    for client in &mut clients {
        assert_eq!(client.read(region.base, region.key, 8), Ok(8));
    }
}

/// Connects as soon as there is room: the target detects a hang-up with a delay.
fn client_when_there_is_room<H: Harness>(harness: &H) -> SuiteClient<'_, H> {
    loop {
        match harness.connect(WHO) {
            Ok(endpoint) => return harness.client_of(endpoint),
            Err(EndpointError::Refused { .. }) => harness.pass_time(),
            Err(other) => panic!("{other}"),
        }
    }
}

pub fn windows_are_bounded<H: Harness>() {
    let harness = H::start();
    let (_, region) = harness.region(Access::ALL, Scope::Anyone);
    let range = region.base..region.base + 64;
    let window = WindowSpec { range, access: Access::ALL, scope: Scope::Anyone };
    let keys: Vec<_> = (0..WINDOWS_MAX).map(|_| harness.target().bind(&window).unwrap()).collect();
    let full = harness.target().bind(&window);
    assert!(matches!(full, Err(TargetError::Full { what: "windows", limit: WINDOWS_MAX })));
    let mut client = harness.client(WHO);
    for &key in &keys {
        assert_eq!(client.read(region.base, key, 64), Ok(64));
    }
    harness.target().invalidate(keys[2]).unwrap();
    let fresh = harness.target().bind(&window).unwrap();
    assert_eq!(client.read(region.base, fresh, 64), Ok(64));
    assert!(harness.target().bind(&window).is_err());
}

pub fn regions_are_bounded<H: Harness>() {
    let harness = H::start();
    let regions: Vec<_> = (0..REGIONS_MAX).map(|_| harness.region(Access::ALL, Scope::Anyone).1).collect();
    let memory = Arc::new(Memory::create("too many", 4096).unwrap());
    let full = harness.target().register(memory, Access::ALL, Scope::Anyone);
    assert!(matches!(full, Err(TargetError::Full { what: "regions", limit: REGIONS_MAX })));
    let mut client = harness.client(WHO);
    assert_eq!(client.endpoint.regions(), regions);
    for region in &regions {
        assert_eq!(client.read(region.base, region.key, 64), Ok(64));
    }
}

pub fn local_regions_are_bounded<H: Harness>() {
    let harness = H::start();
    let mut endpoint = harness.connect(WHO).unwrap();
    let memory = Arc::new(Memory::create("local", 4096).unwrap());
    let limit = LIMITS.local_regions_max;
    let mut keys: Vec<_> =
        (0..limit).map(|_| endpoint.register_local(Arc::clone(&memory)).unwrap()).collect();
    keys.dedup();
    assert_eq!(keys.len(), limit);
    let full = endpoint.register_local(memory).unwrap_err();
    assert!(matches!(full, EndpointError::TooManyLocal { limit: l } if l == limit));
}
