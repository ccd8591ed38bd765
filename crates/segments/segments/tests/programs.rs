//! A program builds a list in a segment, and another one continues with it: the pointers are valid,
//! and the pages are pulled when they are accessed.

mod support;

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use aquifer_arena::{ARENA_START, Arena, ArenaError, Mapping, Touch};
use aquifer_fabric::Memory;
use aquifer_segments::host::{SegmentHost, SegmentKey};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use support::{Records, name, open};

const TENANT: u32 = 1000;
const SEGMENT: SegmentKey = SegmentKey { tenant: TENANT, id: 5 };
const BYTES: usize = 8 << 20;
const ADDRESS: usize = ARENA_START;
/// Words of an entry: the address of the next one, and a number.
const ENTRY_WORDS: usize = 2;
const ENTRIES: usize = BYTES / 8 / ENTRY_WORDS;
/// Entries between an entry and the next one in the list. The list visits all entries, and
/// neighbours in it are far apart.
const STRIDE: usize = 7919;

fn hosts<const N: usize>(records: &Records) -> [SegmentHost; N] {
    std::array::from_fn(|at| {
        let host = records.start(u16::try_from(at).unwrap() + 1, 1 << 30, &Arc::default());
        open(&host, TENANT);
        host
    })
}

/// Links all entries to a ring by their addresses.
fn build(words: &[AtomicU64]) {
    for entry in 0..ENTRIES {
        let next = (entry + STRIDE) % ENTRIES * ENTRY_WORDS;
        words[entry * ENTRY_WORDS].store((ADDRESS + next * 8) as u64, Ordering::Relaxed);
        words[entry * ENTRY_WORDS + 1].store(entry as u64, Ordering::Relaxed);
    }
}

/// Follows the pointers through `count` entries from the first, and adds to each number.
fn walk(words: &[AtomicU64], count: usize, visits: u64) {
    let mut at = 0;
    for step in 0..count {
        let entry = step * STRIDE % ENTRIES;
        let number = words[at + 1].fetch_add(ENTRIES as u64, Ordering::Relaxed);
        assert_eq!(number, entry as u64 + visits * ENTRIES as u64, "entry {entry}");
        let next = words[at].load(Ordering::Relaxed);
        at = (usize::try_from(next).unwrap() - ADDRESS) / 8;
    }
}

/// Runs `program` with the mapping of a segment that it has received, whose faults are served.
/// Returns how long the withdrawal took.
fn use_armed<'a>(
    arena: &'a Arena,
    host: &SegmentHost,
    memory: &Memory,
    pulls_ahead: bool,
    program: impl FnOnce(&mut Mapping<'a>),
) -> Duration {
    let mut mapping = Mapping::new(arena, ADDRESS, BYTES, memory.fd()).unwrap();
    let uffd = mapping.arm(Touch::Waits, None).unwrap();
    host.serve_faults(SEGMENT, uffd, pulls_ahead).unwrap();
    program(&mut mapping);
    let began = Instant::now();
    mapping.withdraw().unwrap();
    let took = began.elapsed();
    assert!(mapping.words().is_empty());
    took
}

fn transfer(from: &SegmentHost, to: &SegmentHost) -> (Arc<Memory>, Duration) {
    from.connect(SEGMENT, &name(to)).unwrap();
    let began = Instant::now();
    from.transfer(SEGMENT).unwrap();
    let arrival = to.receive(TENANT, &name(to), Duration::from_secs(10)).unwrap();
    (arrival.data, began.elapsed())
}

#[test]
fn a_list_moves_between_programs_with_its_pointers() {
    let records = Records::new();
    let hosts: [SegmentHost; 3] = hosts(&records);
    let arena = Arena::reserve().unwrap();
    assert!(matches!(Arena::reserve(), Err(ArenaError::InUse)));
    for (address, bytes) in [(ADDRESS + 4096, BYTES), (ADDRESS, 5), (ADDRESS, 0), (4096, BYTES)] {
        assert!(matches!(Arena::check(address, bytes), Err(ArenaError::Range { .. })));
    }

    let arrival = hosts[0].allocate(SEGMENT, BYTES as u64, &name(&hosts[0])).unwrap();
    assert_eq!(arrival.address, ADDRESS as u64);
    let mut mapping = Mapping::new(&arena, ADDRESS, BYTES, arrival.data.fd()).unwrap();
    build(mapping.words());
    walk(mapping.words(), ENTRIES, 0);
    mapping.withdraw().unwrap();
    mapping.restore().unwrap();
    walk(mapping.words(), ENTRIES, 1);
    mapping.withdraw().unwrap();
    drop(mapping);
    // The segment is handed over several times before all pages are pulled, and returns to its
    // first host.
    let mut owner = 0;
    for (visits, to) in (2..).zip([1, 2, 0, 1, 0, 2]) {
        let (memory, took) = transfer(&hosts[owner], &hosts[to]);
        owner = to;
        // The program changes the first entries each time, which are on different pages.
        let pulls_ahead = visits % 2 == 0;
        let walk_some = |mapping: &mut Mapping<'_>| walk(mapping.words(), 700, visits);
        let away = use_armed(&arena, &hosts[to], &memory, pulls_ahead, walk_some);
        println!("handed over in {took:?}, withdrawn in {away:?}");
    }
    let began = Instant::now();
    hosts[owner].pull_all(SEGMENT).unwrap();
    println!("{BYTES} bytes at most pulled in {:?}", began.elapsed());
    let (memory, _) = transfer(&hosts[owner], &hosts[1]);
    use_armed(&arena, &hosts[1], &memory, false, |mapping| walk(mapping.words(), 700, 8));
    let began = Instant::now();
    hosts[1].pull_all(SEGMENT).unwrap();
    println!("the rest of {BYTES} bytes pulled in {:?}", began.elapsed());
    // All pages are present. Each number counts the visits of its entry.
    let mapping = Mapping::new(&arena, ADDRESS, BYTES, memory.fd()).unwrap();
    walk(mapping.words(), 700, 9);
    let numbers = mapping.words().iter().skip(1).step_by(ENTRY_WORDS);
    let visited = numbers.map(|number| number.load(Ordering::Relaxed) / ENTRIES as u64);
    assert_eq!(visited.sum::<u64>(), 2 * ENTRIES as u64 + 8 * 700);
}

#[test]
fn a_page_that_was_never_written_is_zero_at_each_host() {
    let records = Records::new();
    let hosts: [SegmentHost; 2] = hosts(&records);
    let arena = Arena::reserve().unwrap();
    let _memory = hosts[0].allocate(SEGMENT, BYTES as u64, &name(&hosts[0])).unwrap();
    let is_zero = |mapping: &mut Mapping<'_>, page: usize| {
        assert_eq!(mapping.words()[page * 512].load(Ordering::Relaxed), 0);
    };
    // At the target, then back at the source, where the page is a hole of the file; page 3 is read
    // at both.
    for (from, to, pages) in [(0, 1, [3, 4]), (1, 0, [3, 5])] {
        let (memory, _) = transfer(&hosts[from], &hosts[to]);
        use_armed(&arena, &hosts[to], &memory, false, |mapping| {
            pages.into_iter().for_each(|page| is_zero(mapping, page));
        });
    }
}

#[test]
fn a_fault_from_before_the_faults_are_served_is_served() {
    let records = Records::new();
    let hosts: [SegmentHost; 2] = hosts(&records);
    let arena = Arena::reserve().unwrap();
    let _memory = hosts[0].allocate(SEGMENT, BYTES as u64, &name(&hosts[0])).unwrap();
    for turn in 0..100 {
        let to = &hosts[(turn + 1) % 2];
        let (memory, _) = transfer(&hosts[turn % 2], to);
        // A fault on a present page is resolved sooner than one on a missing page.
        if turn % 3 > 0 {
            to.pull(SEGMENT, u32::try_from(turn).unwrap()).unwrap();
        }
        let mut mapping = Mapping::new(&arena, ADDRESS, BYTES, memory.fd()).unwrap();
        let uffd = mapping.arm(Touch::Waits, None).unwrap();
        std::thread::scope(|scope| {
            let touch = scope.spawn(|| mapping.words()[turn * 512].fetch_add(1, Ordering::Relaxed));
            while !touch.is_finished() && !is_readable(&uffd) {
                std::thread::yield_now();
            }
            to.serve_faults(SEGMENT, uffd, false).unwrap();
        });
        if turn % 5 == 4 {
            to.pull_all(SEGMENT).unwrap();
        }
        mapping.withdraw().unwrap();
    }
}

fn is_readable(fd: &OwnedFd) -> bool {
    let mut fds = [PollFd::new(fd, PollFlags::IN)];
    poll(&mut fds, Some(&Timespec::default())).unwrap() > 0
}
