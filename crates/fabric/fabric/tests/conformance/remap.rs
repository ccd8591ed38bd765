//! Changing the pages of a region while a device uses it.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use super::harness::REGION_BYTES;
use super::*;

const HALF: u64 = REGION_BYTES as u64 / 2;
/// A READ of this length is one packet, so it finds the bytes of one page, old or new.
const PIECE: u32 = 64;

/// A movable region with one half of ones and one half of twos, and a window that opens the first
/// half.
fn halves(harness: &VerbsHarness) -> (Arc<Memory>, Region, Key) {
    let memory = Arc::new(Memory::create("movable", REGION_BYTES).unwrap());
    memory.write(0, &[1; REGION_BYTES / 2]);
    memory.write(REGION_BYTES / 2, &[2; REGION_BYTES / 2]);
    let target = harness.target.as_ref().unwrap();
    let region = target.register_movable(Arc::clone(&memory), Access::ALL, Scope::Anyone).unwrap();
    let range = region.base..region.base + HALF;
    let key = target.bind(&WindowSpec { range, access: Access::ALL, scope: Scope::Anyone }).unwrap();
    (memory, region, key)
}

fn first_byte(client: &harness::SuiteClient<'_, VerbsHarness>) -> u8 {
    let mut piece = [0; PIECE as usize];
    client.memory.read(0, &mut piece);
    assert!(piece.iter().all(|byte| *byte == piece[0]), "torn: {piece:?}");
    piece[0]
}

#[test]
fn pages_move_under_an_open_window_and_its_key_stays() {
    let harness = VerbsHarness::start();
    let (memory, region, key) = halves(&harness);
    let target = harness.target.as_ref().unwrap();
    let mut client = harness.client(WHO);
    assert_eq!(client.read(region.base, key, PIECE), Ok(64));
    assert_eq!(first_byte(&client), 1);
    let how = target.remap(region.base, HALF, HALF).unwrap();
    println!("memory is remapped by {how}");
    assert_eq!(client.read(region.base, key, PIECE), Ok(64));
    assert_eq!(first_byte(&client), 2);
    assert_eq!(client.read(region.base + HALF - 64, key, PIECE), Ok(64));
    assert_eq!(first_byte(&client), 2, "to the last page");

    client.memory.write(0, &[3; PIECE as usize]);
    assert_eq!(client.write(region.base + 8192, key, PIECE), Ok(64));
    assert_eq!(client.add(region.base + 16384, key, 5), Ok(u64::from_ne_bytes([2; 8])));
    let mut bytes = [0; PIECE as usize];
    memory.read(usize::try_from(HALF).unwrap() + 8192, &mut bytes);
    assert_eq!(bytes, [3; PIECE as usize], "the WRITE went to the new pages");
    let word = memory.atomic_u64(usize::try_from(HALF).unwrap() + 16384).load(Ordering::SeqCst);
    assert_eq!(word, u64::from_ne_bytes([2; 8]) + 5);
    for at in [8192, 16384] {
        memory.read(at, &mut bytes);
        assert_eq!(bytes, [1; PIECE as usize], "and not to the old ones");
    }
    // A part of it moves alone, and an invalidated key stays invalid.
    target.remap(region.base + 4096, 0, 4096).unwrap();
    assert_eq!(client.read(region.base + 4096, key, PIECE), Ok(64));
    assert_eq!(first_byte(&client), 1);
    assert_eq!(client.read(region.base, key, PIECE), Ok(64));
    assert_eq!(first_byte(&client), 2);
    target.invalidate(key).unwrap();
    target.remap(region.base, 0, HALF).unwrap();
    assert_eq!(client.read(region.base, key, PIECE), Err(WorkError::RemoteAccess));
}

#[test]
fn reads_and_writes_succeed_while_pages_move() {
    let harness = VerbsHarness::start();
    let (memory, region, key) = halves(&harness);
    let target = harness.target.as_ref().unwrap();
    let is_over = AtomicBool::new(false);
    let read_so_far = AtomicU64::new(0);
    let (reads, adds) = std::thread::scope(|scope| {
        let worker = scope.spawn(|| {
            let mut client = harness.client(WHO);
            let (mut reads, mut adds) = (0_u64, 0_u64);
            while !is_over.load(Ordering::SeqCst) || reads == 0 {
                assert_eq!(client.read(region.base, key, PIECE), Ok(64));
                assert!(matches!(first_byte(&client), 1 | 2));
                reads += 1;
                read_so_far.store(reads, Ordering::SeqCst);
                client.add(region.base + 8192, key, 1).unwrap();
                adds += 1;
            }
            (reads, adds)
        });
        let mut before = 0;
        for round in 0..10 {
            // The worker runs, and has run in each state of the pages.
            while read_so_far.load(Ordering::SeqCst) <= before && !worker.is_finished() {
                std::thread::yield_now();
            }
            before = read_so_far.load(Ordering::SeqCst);
            let from = if round % 2 == 0 { HALF } else { 0 };
            target.remap(region.base, from, HALF).unwrap();
        }
        is_over.store(true, Ordering::SeqCst);
        worker.join().unwrap()
    });
    // Refused work was not done, and is repeated once: each addition is in one of the two pages.
    let word = |at: u64| memory.atomic_u64(usize::try_from(at).unwrap()).load(Ordering::SeqCst);
    let begun = u64::from_ne_bytes([1; 8]).wrapping_add(u64::from_ne_bytes([2; 8]));
    assert_eq!(word(8192).wrapping_add(word(HALF + 8192)).wrapping_sub(begun), adds, "after {reads} READs");
}

#[test]
fn invalid_remaps_are_refused() {
    let harness = VerbsHarness::start();
    let (_memory, region, _key) = halves(&harness);
    let (_fixed_memory, fixed) = harness.region(Access::ALL, Scope::Anyone);
    let target = harness.target.as_ref().unwrap();
    for (addr, from, len) in [(fixed.base, 0, 4096), (region.base + HALF, 0, HALF + 4096), (0, 0, 4096)] {
        let refused = target.remap(addr, from, len).unwrap_err();
        assert!(matches!(refused, TargetError::OutOfRange { .. }), "{refused}");
    }
    for (addr, from, len) in [(region.base + 8, 0, 4096), (region.base, 8, 4096), (region.base, 0, 8)] {
        let refused = target.remap(addr, from, len).unwrap_err().to_string();
        assert!(refused.contains("not whole pages"), "{refused}");
    }
}
