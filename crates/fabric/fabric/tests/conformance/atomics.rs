use std::sync::atomic::Ordering;

use aquifer_fabric::{Access, Host, Identity, RemoteAddr, Scope, Verb, Work, WorkError};

use super::harness::{Harness, WHO, signalled};

pub fn compare_swap_returns_the_value_found<H: Harness>() {
    let harness = H::start();
    let (memory, region) = harness.region(Access::ALL, Scope::Anyone);
    let mut client = harness.client(WHO);
    memory.atomic_u64(40).store(u64::MAX, Ordering::SeqCst);
    let addr = region.base + 40;
    assert_eq!(client.swap(addr, region.key, 1, 2), Ok(u64::MAX));
    assert_eq!(memory.atomic_u64(40).load(Ordering::SeqCst), u64::MAX);
    assert_eq!(client.swap(addr, region.key, u64::MAX, 2), Ok(u64::MAX));
    assert_eq!(memory.atomic_u64(40).load(Ordering::SeqCst), 2);
    assert_eq!(client.add(addr, region.key, u64::MAX), Ok(2));
    assert_eq!(client.add(addr, region.key, 0), Ok(1), "addition wraps");
}

/// Every endpoint increments one word by FAA and another by optimistic CAS, all interleaved.
pub fn increments_of_several_endpoints_are_not_lost<H: Harness>() {
    const ROUNDS: usize = 200;
    let harness = H::start();
    let (memory, region) = harness.region(Access::ALL, Scope::Anyone);
    let added = RemoteAddr { addr: region.base, key: region.key };
    let swapped = RemoteAddr { addr: region.base + 8, key: region.key };
    let who = |host| Identity { host: Host(host), ..WHO };
    let mut clients: Vec<_> = (1..=4).map(|host| harness.client(who(host))).collect();
    let mut believed = [0_u64; 4];
    let mut swaps = 0;
    for _ in 0..ROUNDS {
        for (client, expected) in clients.iter_mut().zip(believed) {
            let add = Work { id: 0, verb: Verb::FetchAdd { remote: added, add: 1 }, signalled: false };
            let desired = expected + 1;
            let swap = Verb::CompareSwap { remote: swapped, expected, desired };
            client.endpoint.post(&[add, add, signalled(1, swap)]).unwrap();
        }
        for (client, expected) in clients.iter_mut().zip(&mut believed) {
            let found = client.wait(1)[0].outcome.unwrap();
            swaps += u64::from(found == *expected);
            *expected = if found == *expected { found + 1 } else { found };
        }
    }
    let rounds = ROUNDS as u64;
    assert_eq!(memory.atomic_u64(0).load(Ordering::SeqCst), rounds * 8);
    assert_eq!(memory.atomic_u64(8).load(Ordering::SeqCst), swaps);
    assert!(swaps >= rounds, "in each round at least one swap succeeds");
}

pub fn misaligned_atomics_are_refused<H: Harness>() {
    let harness = H::start();
    let (memory, region) = harness.region(Access::ALL, Scope::Anyone);
    let mut client = harness.client(WHO);
    for shift in 1..8 {
        assert_eq!(client.add(region.base + shift, region.key, 1), Err(WorkError::Misaligned));
        let swap = client.swap(region.base + shift, region.key, 0, 1);
        assert_eq!(swap, Err(WorkError::Misaligned));
    }
    assert_eq!(client.add(region.base + 8, region.key, 1), Ok(0), "the endpoint stays usable");
    assert_eq!(memory.atomic_u64(0).load(Ordering::SeqCst), 0);
}
