//! Readers of the index find each item while a writer moves it.

use std::panic::catch_unwind;

use aquifer_cache::store::index::{Index, IndexLayout, Mutation, Search, Words};
use aquifer_cache::store::slot::{Location, Slot};
use aquifer_mutation::Mutations as _;
use shuttle::rand::{Rng, thread_rng};
use shuttle::sync::Arc;
use shuttle::sync::atomic::{AtomicU64, Ordering};
use shuttle::thread;

const SCHEDULES: usize = 2000;
const LAYOUT: IndexLayout = IndexLayout {
    count: 0,
    overflow_count: 1,
    overflow_free: 2,
    buckets: 8,
    buckets_max: 128,
    overflow: 8 + 128 * 8,
    overflow_max: 16,
};
/// Items of one bucket, which has two overflow buckets.
const ITEMS: u32 = 17;

#[derive(Clone)]
struct ModelWords(Arc<Vec<AtomicU64>>);

impl Words for ModelWords {
    fn load(&self, at: usize) -> u64 {
        self.0[at].load(Ordering::SeqCst)
    }

    fn store(&self, at: usize, value: u64) {
        self.0[at].store(value, Ordering::SeqCst);
    }

    fn replace(&self, at: usize, expected: u64, value: u64) -> bool {
        self.0[at].compare_exchange(expected, value, Ordering::SeqCst, Ordering::SeqCst).is_ok()
    }

    fn prefetch(&self, _at: usize) {}
}

/// The hash of an item of bucket 0. Odd items move when the bucket is split.
fn hash(item: u32) -> u64 {
    u64::from(item & 1) << 6 | u64::from(item) << 8
}

fn location(item: u32) -> Location {
    Location { run: item + 1, offset: 0 }
}

fn slot(item: u32) -> Slot {
    Slot::new(hash(item), location(item), 0)
}

/// Runs one schedule: readers search items from 3 on, which stay in the index. The writer removes
/// the first three, splits the bucket, and adds them again.
fn play() {
    let len = LAYOUT.overflow + 16 * 8;
    let words = ModelWords(Arc::new((0..len).map(|_| AtomicU64::new(0)).collect()));
    let index = Arc::new(Index::new(words, LAYOUT));
    for item in 0..ITEMS {
        index.insert(hash(item), slot(item)).unwrap();
    }
    let readers = (0..2).map(|_| {
        let index = Arc::clone(&index);
        thread::spawn(move || {
            for _ in 0..4 {
                let item = thread_rng().gen_range(3..ITEMS);
                match index.search(hash(item), |found| found == location(item)) {
                    Search::Found(found) => {
                        assert_eq!(found.slot.location(), location(item));
                        index.count_read(found);
                    }
                    Search::Inconclusive => {}
                    Search::Missing => panic!("item {item} is missing"),
                }
                assert!(!matches!(index.search(hash(90), |found| found == location(90)), Search::Found(_)));
            }
        })
    });
    let readers: Vec<_> = readers.collect();
    for item in 0..3 {
        let found = index.search_locked(hash(item), |found| found == location(item)).unwrap();
        index.remove(found);
    }
    index.split();
    for item in 0..3 {
        index.insert(hash(item), slot(item)).unwrap();
    }
    for reader in readers {
        reader.join().unwrap();
    }
    for item in 0..ITEMS {
        let found = index.search_locked(hash(item), |found| found == location(item));
        assert!(found.is_some(), "item {item} was lost");
    }
    let mut count = 0;
    index.for_each(|_| count += 1);
    assert_eq!(count, ITEMS);
}

#[test]
fn readers_find_items_while_they_move() {
    shuttle::check_random(play, SCHEDULES);
    shuttle::check_pct(play, SCHEDULES, 2);
}

#[test]
fn each_broken_step_is_detected() {
    // A chain that is too long needs no second thread: the store's tests detect it.
    for mutation in Mutation::ALL.iter().filter(|mutation| **mutation != Mutation::ChainTooLong) {
        let play = move || mutation.while_active(play);
        // A reader that is preempted for long between two steps is rare in random schedules.
        let outcome = catch_unwind(|| shuttle::check_pct(play, 20 * SCHEDULES, 2));
        assert!(outcome.is_err(), "{mutation:?} is not detected");
    }
}
