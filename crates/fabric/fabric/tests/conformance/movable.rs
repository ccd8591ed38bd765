use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use aquifer_fabric::{
    Access, Memory, Region, Registration, RemoteAddr, Scope, TargetError, UnitMap, Verb, WindowSpec,
    WorkError, unit_map,
};

use super::harness::{Harness, WHO, signalled};

const REFUSED: Result<u64, WorkError> = Err(WorkError::RemoteAccess);
const UNIT: u64 = 8192;
const UNITS: u64 = 8;
/// Bytes of the memory, which is shorter than the region: not every unit has bytes of its own.
const MEMORY_BYTES: usize = 5 * 8192;

/// A movable region of whose units the first three have bytes: at 1, 3 and 0 units of the memory.
fn movable<H: Harness>(harness: &H) -> (Arc<Memory>, UnitMap, Region) {
    let memory = Arc::new(Memory::create("movable", MEMORY_BYTES).unwrap());
    let words = Arc::new(Memory::create("words", 4096).unwrap());
    let map = UnitMap { words, at: 512, units: UNITS, unit_bytes: UNIT };
    for (unit, place) in [1, 3, 0].into_iter().enumerate() {
        map.store(unit as u64, Some(place * UNIT));
    }
    let plain = Registration::plain(Arc::clone(&memory), Access::ALL, Scope::Anyone);
    let region = harness.target().register_as(Registration { map: Some(map.clone()), ..plain });
    (memory, map, region.unwrap())
}

fn at(offset: u64) -> usize {
    usize::try_from(offset).unwrap()
}

pub fn accesses_are_translated_unit_by_unit<H: Harness>() {
    let harness = H::start();
    let (memory, _map, region) = movable(&harness);
    assert_eq!(region.len, UNITS * UNIT);
    let mut client = harness.client(WHO);
    let pattern: Vec<u8> = (0..3 * UNIT).map(|n| (n % 251).to_le_bytes()[0]).collect();
    client.memory.write(0, &pattern);
    let whole = u32::try_from(3 * UNIT).unwrap();
    assert_eq!(client.write(region.base, region.key, whole), Ok(3 * UNIT));
    for (unit, place) in [1, 3, 0].into_iter().enumerate() {
        let mut seen = vec![0; at(UNIT)];
        memory.read(at(place * UNIT), &mut seen);
        assert!(seen == pattern[unit * at(UNIT)..][..at(UNIT)], "unit {unit}");
    }
    for (offset, len) in [(0, whole), (UNIT - 1, 2), (UNIT - 3, 13), (100, 9000), (2 * UNIT - 8, 16), (5, 0)]
    {
        client.memory.write(0, &vec![0xEE; at(3 * UNIT) + 8]);
        assert_eq!(client.read(region.base + offset, region.key, len), Ok(u64::from(len)));
        let mut seen = vec![0; len as usize + 1];
        client.memory.read(0, &mut seen);
        assert!(seen[..len as usize] == pattern[at(offset)..][..len as usize], "{len} bytes at {offset}");
        assert_eq!(seen[len as usize], 0xEE, "bytes beside were touched");
    }
    let word = region.base + UNIT + 64;
    memory.atomic_u64(at(3 * UNIT) + 64).store(5, Ordering::SeqCst);
    assert_eq!(client.add(word, region.key, 2), Ok(5));
    assert_eq!(client.swap(word, region.key, 7, 9), Ok(7));
    assert_eq!(memory.atomic_u64(at(3 * UNIT) + 64).load(Ordering::SeqCst), 9);
    // A window opens addresses, wherever their bytes are.
    let range = region.base + UNIT - 8..region.base + UNIT + 8;
    let window = WindowSpec { range: range.clone(), access: Access::READ, scope: Scope::Anyone };
    let key = harness.target().bind(&window).unwrap();
    assert_eq!(client.read(range.start, key, 16), Ok(16));
    assert_eq!(client.read(range.start, key, 17), REFUSED);
    assert_eq!(client.write(range.start, key, 8), REFUSED);
}

pub fn units_that_are_not_there_are_refused<H: Harness>() {
    let harness = H::start();
    let (memory, map, region) = movable(&harness);
    let mut client = harness.client(WHO);
    let third = region.base + 3 * UNIT;
    let wrong = [0, unit_map::encode(5 * UNIT), unit_map::encode(1 << 40), u64::MAX, 1 << 52, 1 << 63];
    for word in wrong {
        map.words.atomic_u64(map.at + 24).store(word, Ordering::Release);
        assert_eq!(client.read(third, region.key, 8), REFUSED, "{word:#x}");
        assert_eq!(client.read(third - 8, region.key, 16), REFUSED, "{word:#x}");
        assert_eq!(client.write(third, region.key, 8), REFUSED, "{word:#x}");
        assert_eq!(client.add(third, region.key, 1), REFUSED, "{word:#x}");
        assert_eq!(client.swap(third, region.key, 0, 1), REFUSED, "{word:#x}");
        assert_eq!(client.read(third - 8, region.key, 8), Ok(8), "the endpoint stays usable");
    }
    assert_eq!(client.read(region.base + region.len, region.key, 8), REFUSED);
    assert_eq!(client.read(region.base + region.len - 8, region.key, 8), REFUSED);
    // The memory has only the first bytes of this unit.
    map.store(3, Some(4 * UNIT + 4096));
    assert_eq!(client.read(third, region.key, 8), Ok(8));
    assert_eq!(client.read(third + UNIT - 4096 - 4, region.key, 8), REFUSED);
    assert_eq!(client.read(third + UNIT - 8, region.key, 8), REFUSED);
    // The last unit of the memory, at a multiple of 4096 that is no multiple of the unit.
    map.store(3, Some(3 * UNIT + 4096));
    memory.write(at(3 * UNIT + 4096), b"the last");
    assert_eq!(client.read(third, region.key, 8), Ok(8));
    let mut seen = [0; 8];
    client.memory.read(0, &mut seen);
    assert_eq!(&seen, b"the last");
}

pub fn a_stored_word_moves_addresses_and_keeps_keys<H: Harness>() {
    let harness = H::start();
    let (memory, map, region) = movable(&harness);
    let mut client = harness.client(WHO);
    (0..5).for_each(|place: u8| memory.write(usize::from(place) * at(UNIT), &[place; 64]));
    let read = |client: &mut super::harness::SuiteClient<'_, H>, unit: u64| {
        assert_eq!(client.read(region.base + unit * UNIT, region.key, 64), Ok(64));
        let mut seen = [0; 64];
        client.memory.read(0, &mut seen);
        assert!(seen.iter().all(|byte| *byte == seen[0]));
        seen[0]
    };
    assert_eq!([0, 1, 2].map(|unit| read(&mut client, unit)), [1, 3, 0]);
    map.store(0, Some(3 * UNIT));
    map.store(1, Some(4 * UNIT));
    harness.target().expel(region.base..region.base + 2 * UNIT);
    assert_eq!([0, 1, 2].map(|unit| read(&mut client, unit)), [3, 4, 0]);
    assert_eq!((map.offset(0), map.offset(1), map.offset(3)), (Some(3 * UNIT), Some(4 * UNIT), None));
}

/// A later READ of a batch finds nothing older than an earlier one, however long the earlier is.
pub fn reads_of_a_batch_find_memory_in_order<H: Harness>() {
    const ROUNDS: u64 = 300;
    let harness = H::start();
    let (fixed, plain) = harness.region(Access::ALL, Scope::Anyone);
    let (moving, _map, movable) = movable(&harness);
    let mut client = harness.client(WHO);
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        // The bytes at 4096 of each region are written after those at 0. In the first unit of the
        // movable region these are at 1 unit of the memory.
        scope.spawn(|| {
            for round in 1.. {
                for (memory, start) in [(&fixed, 0), (&moving, at(UNIT))] {
                    memory.atomic_u64(start + 4096).store(round, Ordering::SeqCst);
                    memory.atomic_u64(start + 2040).store(round, Ordering::SeqCst);
                }
                if is_over.load(Ordering::SeqCst) {
                    return;
                }
                std::thread::yield_now();
            }
        });
        // Counted and asserted later: a panic would leave the other thread running.
        let mut disorder = 0;
        for _ in 0..ROUNDS {
            for region in [&plain, &movable] {
                let remote = |offset| RemoteAddr { addr: region.base + offset, key: region.key };
                let long = Verb::Read { local: client.slice(0, 2048), remote: remote(0) };
                let short = Verb::Read { local: client.slice(4096, 8), remote: remote(4096) };
                client.run(&[signalled(1, long), signalled(2, short)]);
                let word = |offset| client.memory.atomic_u64(offset).load(Ordering::SeqCst);
                // The word that the first READ finds is written after the word of the second READ.
                disorder += u32::from(word(4096) < word(2040));
            }
        }
        is_over.store(true, Ordering::SeqCst);
        assert_eq!(disorder, 0, "a READ found older bytes than the one before it");
    });
}

pub fn a_map_must_fit_and_an_old_key_has_its_old_addresses<H: Harness>() {
    let harness = H::start();
    let target = harness.target();
    let memory = Arc::new(Memory::create("movable", MEMORY_BYTES).unwrap());
    let words = Arc::new(Memory::create("words", 4096).unwrap());
    let register = |at, units, unit_bytes, key| {
        let map = UnitMap { words: Arc::clone(&words), at, units, unit_bytes };
        let plain = Registration::plain(Arc::clone(&memory), Access::ALL, Scope::Anyone);
        target.register_as(Registration { map: Some(map), key, ..plain })
    };
    for (at, units, unit_bytes) in
        [(0, 513, 4096), (4, 1, 4096), (0, 1, 2048), (0, 0, 4096), (0, 1, 256 << 20)]
    {
        let refused = register(at, units, unit_bytes, None);
        assert!(matches!(refused, Err(TargetError::BadUnits { .. })), "{at} {units} {unit_bytes}");
    }
    let first = register(0, 8, 4096, None).unwrap();
    let second = register(64, 8, 2 << 20, None).unwrap();
    assert!(second.base >= first.base + first.len || first.base >= second.base + second.len);
    assert!(matches!(register(0, 8, 4096, Some(first.key)), Err(TargetError::NoSuchKey(_))), "in use");
    target.deregister(first.key).unwrap();
    target.deregister(second.key).unwrap();
    assert_eq!(register(64, 8, 2 << 20, Some(second.key)).unwrap(), second, "in any order");
    assert_eq!(register(0, 8, 4096, Some(first.key)).unwrap(), first);
}
