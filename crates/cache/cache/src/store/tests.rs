//! Tests of a whole store.

use std::collections::HashMap;

use super::epochs::Epochs;
use super::hash::HashSecret;
use super::item::States;
use super::partition::{Cas, Change, Put};
use super::slot::RUN_BYTES;
use super::*;

fn options(limit: u64, partitions: usize) -> StoreOptions {
    let hasher = KeyHasher::new(HashSecret([1, 2]));
    StoreOptions { limit, partitions, threads: 1, has_cas: true, evicts: true, pool: 0, hasher }
}

fn store(limit: u64, partitions: usize) -> Store {
    Store::new(&options(limit, partitions)).unwrap()
}

fn put(value: &[u8], expires_s: u32) -> Put<'_> {
    Put {
        client_flags: 0,
        expires_s,
        states: States::NONE,
        cas: Cas::Next,
        is_fetched: false,
        value: [value, b""],
    }
}

fn set(store: &Store, key: &[u8], value: &[u8], expires_s: u32, now_s: u32) {
    for _ in 0..100 {
        let pin = store.pin(0);
        if store.update(&pin, store.key(key), now_s, |_| Change::Put(put(value, expires_s))).is_ok() {
            return;
        }
    }
    panic!("no room for {} bytes", value.len());
}

fn get(store: &Store, key: &[u8], now_s: u32) -> Option<Vec<u8>> {
    let pin = store.pin(0);
    store.look_up(&pin, store.key(key), now_s, true).ok().map(|item| item.value.to_vec())
}

/// A small generator of random numbers (xorshift64*).
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 16) % limit
    }
}

#[test]
fn a_store_without_evictions_is_a_map() {
    let store = store(64 << 20, 4);
    let mut expected: HashMap<Vec<u8>, (Vec<u8>, u32)> = HashMap::new();
    let mut random = Random(7);
    let mut now_s = 1;
    for step in 0..200_000u64 {
        let key = format!("key-{}", random.below(20_000)).into_bytes();
        let found = expected.get(&key).filter(|(_, expires_s)| *expires_s == 0 || *expires_s > now_s);
        assert_eq!(get(&store, &key, now_s).as_ref(), found.map(|(value, _)| value), "step {step}");
        match random.below(10) {
            0 => {
                let pin = store.pin(0);
                store.update(&pin, store.key(&key), now_s, |_| Change::Remove).unwrap();
                expected.remove(&key);
            }
            1 => now_s += u32::from(random.below(50) == 0),
            choice => {
                let len = if random.below(1000) == 0 { 200_000 } else { random.below(300) };
                let value = vec![u8::try_from(step % 251).unwrap(); usize::try_from(len).unwrap()];
                let ttl = u32::try_from(random.below(30) + 1).unwrap();
                let expires_s = if choice < 4 { now_s + ttl } else { 0 };
                set(&store, &key, &value, expires_s, now_s);
                expected.insert(key, (value, expires_s));
            }
        }
        if step % 5000 == 0 {
            store.expire(now_s);
        }
    }
    assert_eq!(store.removed().evicted, 0);
    (0..store.partitions().len()).for_each(|partition| assert!(store.flush(&store.pin(0), partition)));
    assert!(expected.keys().all(|key| get(&store, key, now_s).is_none()));
    for _ in 0..20 {
        store.expire(now_s);
    }
    let content = store.content();
    assert_eq!((content.items, content.item_bytes), (0, 0));
    // Each partition may keep the pages of one run.
    let kept = 4 * RUN_BYTES as u64;
    assert!(store.budget().used() <= content.index_bytes + kept + 4 * 4096, "{}", store.budget().used());
}

#[test]
fn a_full_store_accepts_long_items_after_short_ones() {
    let store = store(16 << 20, 16);
    for number in 0..200_000u32 {
        set(&store, &number.to_le_bytes(), &[1; 200], 0, 1);
    }
    assert!(store.removed().evicted > 100_000);
    assert!(store.budget().used() <= 16 << 20, "{}", store.budget().used());
    for number in 0..200u32 {
        let key = format!("long-{number}");
        set(&store, key.as_bytes(), &vec![2; 500_000], 0, 1);
        assert_eq!(get(&store, key.as_bytes(), 1).map(|value| value.len()), Some(500_000));
    }
    assert!(store.budget().used() <= 16 << 20, "{}", store.budget().used());
    for number in 0..100_000u32 {
        set(&store, &number.to_le_bytes(), &[3; 200], 0, 1);
        assert_eq!(get(&store, &number.to_le_bytes(), 1), Some(vec![3; 200]));
    }
}

#[test]
fn the_second_in_which_an_item_was_stored_is_known() {
    let store = store(4 << 20, 1);
    let stored = |key: &[u8]| {
        let pin = store.pin(0);
        let item = store.look_up(&pin, store.key(key), 1, true).unwrap();
        store.stored_s(&pin, store.key(key).hash, item.place.unwrap())
    };
    for number in 0..500u32 {
        set(&store, &number.to_le_bytes(), b"value", 0, 1 + number / 7);
    }
    for number in 0..500u32 {
        assert_eq!(stored(&number.to_le_bytes()), 1 + number / 7);
    }
    // Items that were read survive while others are stored, and keep their time within a minute.
    for number in 500..60_000u32 {
        set(&store, &number.to_le_bytes(), &[1; 100], 0, 1000);
    }
    assert!(store.removed().evicted > 0);
    for number in 0..500u32 {
        assert!(stored(&number.to_le_bytes()).abs_diff(1 + number / 7) <= 60, "{number}");
    }
}

#[test]
fn items_that_are_read_are_not_evicted() {
    let store = store(4 << 20, 4);
    for number in 0..100u32 {
        set(&store, format!("hot-{number}").as_bytes(), &[1; 100], 0, 1);
    }
    for number in 0..200_000u32 {
        set(&store, &number.to_le_bytes(), &[2; 100], 0, 1);
        assert!(get(&store, format!("hot-{}", number % 100).as_bytes(), 1).is_some(), "{number}");
    }
}

#[test]
fn the_memory_of_expired_items_is_reused() {
    let store = store(4 << 20, 4);
    for now_s in 1..200 {
        for number in 0..500u32 {
            set(&store, &(now_s * 1000 + number).to_le_bytes(), &[2; 100], now_s + 10, now_s);
        }
        store.expire(now_s);
    }
    assert_eq!(store.removed().evicted, 0);
    assert!(store.removed().expired > 80_000);
}

#[test]
fn an_item_of_120_bytes_uses_at_most_20_more_and_26_with_cas() {
    for (has_cas, most) in [(false, 20), (true, 26)] {
        let options = StoreOptions { has_cas, ..options(256 << 20, PARTITIONS) };
        let store = Store::new(&options).unwrap();
        for number in 0..400_000u32 {
            set(&store, format!("{number:020}").as_bytes(), &[2; 100], 0, 1);
            if number >= 200_000 && number % 25_000 == 0 {
                let items = u64::from(number + 1);
                let overhead = store.budget().used() / items - 120;
                assert!(overhead <= most, "{items} items: {overhead} bytes beside key and value");
            }
        }
    }
}

#[test]
fn retired_memory_is_free_when_no_earlier_pin_remains() {
    let epochs = Epochs::new(2);
    let first = epochs.pin(0);
    let retired = epochs.retire();
    let second = epochs.pin(1);
    assert!(epochs.oldest() <= retired);
    drop(first);
    assert!(epochs.oldest() > retired);
    let retired = epochs.retire();
    assert!(epochs.oldest() <= retired);
    drop(second);
    assert_eq!(epochs.oldest(), u64::MAX);
}

#[test]
fn a_store_adopts_the_memory_that_another_one_has_completed() {
    let options = options(8 << 20, 3);
    let file = tempfile::tempfile_in("/dev/shm").unwrap();
    file.set_len(Store::file_bytes(&options)).unwrap();
    let open = || Store::open(&options, file.try_clone().unwrap().into()).unwrap();
    let (store, seconds) = open();
    assert_eq!(seconds, None);
    let key = |number: u32| format!("key-{number}").into_bytes();
    for number in 0..5000u32 {
        let len = if number % 500 == 0 { 100_000 } else { 100 };
        set(&store, &key(number), &vec![u8::try_from(number % 251).unwrap(); len], 100 * (number % 2), 1);
        if number % 3 == 0 {
            set(&store, &key(number), b"again", 0, 1);
        }
    }
    let before = (store.content(), store.budget().used());
    let expected: Vec<_> = (0..5000).map(|number| get(&store, &key(number), 1)).collect();
    let cas = |store: &Store| store.look_up(&store.pin(0), store.key(b"key-3"), 1, false).unwrap().header.cas;
    let first_cas = cas(&store);
    store.complete(&options, 50, 1_000_000);
    drop(store);

    let (store, seconds) = open();
    assert_eq!(seconds, Some((50, 1_000_000)));
    let after = (store.content(), store.budget().used());
    assert_eq!((after.0.items, after.0.item_bytes), (before.0.items, before.0.item_bytes));
    assert!(after.1 <= before.1, "{} bytes instead of {}", after.1, before.1);
    for (number, value) in (0..).zip(&expected) {
        assert_eq!(get(&store, &key(number), 1).as_ref(), value.as_ref(), "{number}");
    }
    assert!(expected.iter().flatten().count() > 1000);
    assert_eq!(cas(&store), first_cas);
    set(&store, b"key-3", b"new", 0, 1);
    assert!(cas(&store) > first_cas);
    for number in 0..100_000u32 {
        set(&store, &number.to_le_bytes(), &[2; 100], 0, 1);
    }
    assert!(store.removed().evicted > 0, "adopted items are evicted");
    drop(store);

    let (store, seconds) = open();
    assert_eq!((seconds, store.content().items), (None, 0), "the memory was not completed");
    store.complete(&options, 50, 0);
    let other = StoreOptions { has_cas: false, ..options };
    let (store, seconds) = Store::open(&other, file.try_clone().unwrap().into()).unwrap();
    assert_eq!((seconds, store.content().items), (None, 0), "another store has completed it");
}

/// A value from which a reader can check its key and that it is whole.
fn checked_value(key: u64, version: u64, len: usize) -> Vec<u8> {
    let word = (key << 32 | version).wrapping_mul(0x9E37_79B9_7F4A_7C15).to_le_bytes();
    let mut value = [key.to_le_bytes(), version.to_le_bytes()].concat();
    value.extend(word.iter().cycle().take(len));
    value
}

#[test]
fn threads_see_whole_values_while_others_are_evicted() {
    const THREADS: usize = 4;
    const KEYS: u64 = 20_000;
    let options = StoreOptions { threads: THREADS, ..options(3 << 20, 3) };
    let store = Store::new(&options).unwrap();
    let run = |thread: usize| {
        let mut random = Random(77 + thread as u64);
        let (mut hits, mut step) = (0, 0);
        // Nothing is freed while a thread with a pin does not run, so a fixed number of steps may
        // evict too few items.
        while step < 15_000 || hits <= 300 || store.removed().evicted <= 2000 {
            step += 1;
            let pin = store.pin(thread);
            // Some keys are read and written much more often than others.
            let key = random.below(KEYS).min(random.below(KEYS)).min(random.below(KEYS));
            let name = format!("key-{key}").into_bytes();
            if random.below(3) == 0 {
                let len = if random.below(200) == 0 { 100_000 } else { random.below(400) };
                let value = checked_value(key, step, usize::try_from(len).unwrap());
                let change = |_: Option<&item::Item<'_>>| Change::Put(put(&value, 0));
                // Without room the value is not stored; a server would retry later.
                let _stored = store.update(&pin, store.key(&name), 1, change);
            } else if let Ok(item) = store.look_up(&pin, store.key(&name), 1, true) {
                // Items stay unchanged while the pin lives.
                for _ in 0..2 {
                    let version = u64::from_le_bytes(item.value[8..16].try_into().unwrap());
                    assert!(item.key == name, "another key");
                    assert!(item.value == checked_value(key, version, item.value.len() - 16), "not whole");
                    std::thread::yield_now();
                }
                hits += 1;
            }
        }
    };
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            scope.spawn(move || run(thread));
        }
    });
    let content = store.content();
    (0..store.partitions().len()).for_each(|partition| assert!(store.flush(&store.pin(0), partition)));
    for _ in 0..50 {
        store.expire(1);
        drop(store.pin(0));
    }
    assert!(content.items > 1000);
    assert_eq!((store.content().items, store.content().item_bytes), (0, 0));
    let left = store.budget().used() - content.index_bytes;
    assert!(left <= 3 * (RUN_BYTES as u64 + 2 * 4096), "{left} bytes are lost");
}
