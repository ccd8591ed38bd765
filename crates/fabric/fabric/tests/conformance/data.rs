use aquifer_fabric::{Access, RemoteAddr, Scope, Verb, Work, WorkError};

use super::harness::{Harness, LIMITS, REGION_BYTES, WHO, signalled};

pub fn every_size_and_alignment_arrives<H: Harness>() {
    let harness = H::start();
    let (memory, region) = harness.region(Access::ALL, Scope::Anyone);
    let mut client = harness.client(WHO);
    let pattern: Vec<u8> = (0..REGION_BYTES).map(|n| (n % 251).to_le_bytes()[0]).collect();
    let sizes = (0..=72).chain([255, 256, 257, 4095, 4096, 4097, LIMITS.transfer_bytes_max]);
    for len in sizes {
        let bytes = len as usize;
        for shift in [0_u8, 1, 4, 7, 8] {
            let (there, here) = (64 + usize::from(shift), 128 + usize::from(shift / 2));
            memory.write(0, &vec![0xEE; bytes + 256]);
            client.memory.write(here, &pattern[3..3 + bytes]);
            let remote = RemoteAddr { addr: region.base + there as u64, key: region.key };
            let local = client.slice(here as u64, len);
            assert_eq!(client.one(Verb::Write { local, remote }), Ok(u64::from(len)));
            let mut seen = vec![0; bytes + 2];
            memory.read(there - 1, &mut seen);
            assert_eq!(seen[1..=bytes], pattern[3..3 + bytes], "{len} bytes, shifted by {shift}");
            assert_eq!((seen[0], seen[bytes + 1]), (0xEE, 0xEE), "bytes beside were touched");
            client.memory.write(here, &vec![0; bytes]);
            assert_eq!(client.one(Verb::Read { local, remote }), Ok(u64::from(len)));
            let mut back = vec![0; bytes];
            client.memory.read(here, &mut back);
            assert_eq!(back, pattern[3..3 + bytes]);
        }
    }
}

pub fn a_batch_takes_effect_in_order<H: Harness>() {
    let harness = H::start();
    let (_, region) = harness.region(Access::ALL, Scope::Anyone);
    let mut client = harness.client(WHO);
    let remote = RemoteAddr { addr: region.base + 8, key: region.key };
    for round in 0..50_u64 {
        client.memory.atomic_u64(0).store(round * 10, std::sync::atomic::Ordering::Relaxed);
        let done = client.run(&[
            signalled(1, Verb::Write { local: client.slice(0, 8), remote }),
            signalled(2, Verb::FetchAdd { remote, add: 1 }),
            signalled(3, Verb::CompareSwap { remote, expected: round * 10 + 1, desired: round * 10 + 2 }),
            signalled(4, Verb::Read { local: client.slice(8, 8), remote }),
        ]);
        let outcomes: Vec<_> = done.iter().map(|done| (done.id, done.outcome)).collect();
        let expected = [(1, Ok(8)), (2, Ok(round * 10)), (3, Ok(round * 10 + 1)), (4, Ok(8))];
        assert_eq!(outcomes, expected);
        let read = client.memory.atomic_u64(8).load(std::sync::atomic::Ordering::Relaxed);
        assert_eq!(read, round * 10 + 2);
    }
}

pub fn a_read_returns_the_bytes_before_later_operations<H: Harness>() {
    let harness = H::start();
    let (memory, region) = harness.region(Access::ALL, Scope::Anyone);
    let mut client = harness.client(WHO);
    let at = |offset| RemoteAddr { addr: region.base + offset, key: region.key };
    // The greatest length of which two copies and a few words fit into the memories.
    let len = u32::try_from(memory.len().min(client.memory.len()) / 2 - 64).unwrap().min(4096) & !7;
    let (first, second) = (0, u64::from(len));
    for round in 1..40_u8 {
        memory.write(0, &vec![round; len as usize]);
        client.memory.write(0, &vec![0; 2 * len as usize]);
        let done = client.run(&[
            signalled(1, Verb::Read { local: client.slice(first, len), remote: at(0) }),
            signalled(2, Verb::FetchAdd { remote: at(8), add: 1 }),
            signalled(3, Verb::Read { local: client.slice(second, len), remote: at(0) }),
            signalled(4, Verb::CompareSwap { remote: at(16), expected: 0, desired: 1 }),
            signalled(5, Verb::FetchAdd { remote: at(8), add: 1 }),
        ]);
        assert_eq!(done.iter().map(|done| done.id).collect::<Vec<_>>(), [1, 2, 3, 4, 5]);
        let word = u64::from_le_bytes([round; 8]);
        let read = |offset: u64| {
            let mut bytes = [0; 8];
            client.memory.read(usize::try_from(offset).unwrap() + 8, &mut bytes);
            u64::from_le_bytes(bytes)
        };
        assert_eq!((read(first), read(second)), (word, word + 1), "each READ at its place");
    }
}

pub fn only_signalled_work_completes_unless_it_fails<H: Harness>() {
    let harness = H::start();
    let (memory, region) = harness.region(Access::ALL, Scope::Anyone);
    let mut client = harness.client(WHO);
    let remote = RemoteAddr { addr: region.base, key: region.key };
    let beyond = RemoteAddr { addr: region.base + region.len, key: region.key };
    let quiet = |id, remote| Work { id, verb: Verb::FetchAdd { remote, add: 1 }, signalled: false };
    let batch = [
        quiet(1, remote),
        quiet(2, beyond),
        quiet(3, remote),
        signalled(4, Verb::FetchAdd { remote, add: 1 }),
    ];
    client.endpoint.post(&batch).unwrap();
    let done = client.wait(2);
    assert_eq!((done[0].id, done[0].outcome), (2, Err(WorkError::RemoteAccess)));
    assert_eq!((done[1].id, done[1].outcome), (4, Ok(2)));
    let total = memory.atomic_u64(0).load(std::sync::atomic::Ordering::SeqCst);
    assert_eq!(total, 3);
    assert_eq!(client.endpoint.poll(&mut Vec::new(), 10), 0);
}

pub fn empty_transfers_succeed<H: Harness>() {
    let harness = H::start();
    let (_, region) = harness.region(Access::ALL, Scope::Anyone);
    let mut client = harness.client(WHO);
    assert_eq!(client.read(region.base + region.len, region.key, 0), Ok(0));
    assert_eq!(client.read(region.base + region.len + 1, region.key, 0), Err(WorkError::RemoteAccess));
    assert_eq!(client.endpoint.post(&[]), Ok(()));
    assert_eq!(client.send(b""), Ok(0));
    assert_eq!(harness.target().receive(&mut Vec::new()).map(|from| from.who), Some(WHO));
}

pub fn regions_are_announced_and_apart<H: Harness>() {
    let harness = H::start();
    let (one, first) = harness.region(Access::ALL, Scope::Anyone);
    let early = harness.client(WHO);
    let (two, second) = harness.region(Access::ALL, Scope::Anyone);
    let mut late = harness.client(WHO);
    assert_eq!(early.endpoint.regions(), std::slice::from_ref(&first));
    assert_eq!(late.endpoint.regions(), [first.clone(), second.clone()]);
    assert!(first.base > 0 && second.base > first.base + first.len, "a run past the end hits one");
    assert_ne!(first.key, second.key);
    assert_eq!(late.add(first.base, first.key, 1), Ok(0));
    assert_eq!(late.add(second.base, second.key, 2), Ok(0));
    let word =
        |memory: &aquifer_fabric::Memory| memory.atomic_u64(0).load(std::sync::atomic::Ordering::SeqCst);
    assert_eq!((word(&one), word(&two)), (1, 2));
    assert_eq!(late.add(first.base, second.key, 1), Err(WorkError::RemoteAccess));
}
