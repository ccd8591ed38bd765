//! Keys that all have the same hash, or one of few hashes: searches find the stored items.

use std::collections::HashMap;

use proptest::prelude::*;

use super::epochs::Pin;
use super::hash::HashSecret;
use super::index::{CHAIN_MAX, Mutation};
use super::item::States;
use super::partition::{Cas, Change, Put};
use super::*;
use aquifer_mutation::Mutations as _;

/// Most items of a chain.
const ITEMS_MAX: usize = CHAIN_MAX * 7;

/// A store whose hashes have only the bits of `mask`.
fn store(mask: u64, evicts: bool) -> Store {
    let hasher = KeyHasher::new(HashSecret([1, 2])).with_mask(mask);
    let options =
        StoreOptions { limit: 4 << 20, partitions: 1, threads: 1, has_cas: true, evicts, pool: 0, hasher };
    Store::new(&options).unwrap()
}

fn put(value: &[u8]) -> Put<'_> {
    let (states, cas) = (States::NONE, Cas::Next);
    Put { client_flags: 0, expires_s: 0, states, cas, is_fetched: false, value: [value, b""] }
}

fn set(store: &Store, key: &[u8], value: &[u8]) -> Result<u64, Refusal> {
    update(store, &store.pin(0), key, |_| Change::Put(put(value)))
}

fn update<'p>(
    store: &'p Store,
    pin: &'p Pin<'_>,
    key: &[u8],
    decide: impl FnMut(Option<&Item<'p>>) -> Change<'p>,
) -> Result<u64, Refusal> {
    store.update(pin, store.key(key), 1, decide)
}

fn get(store: &Store, key: &[u8]) -> Option<Vec<u8>> {
    let pin = store.pin(0);
    store.look_up(&pin, store.key(key), 1, true).ok().map(|item| item.value.to_vec())
}

fn key(number: usize) -> Vec<u8> {
    format!("key-{number}").into_bytes()
}

#[test]
fn items_beyond_a_full_chain_are_evicted() {
    let store = store(0, true);
    for number in 0..3 * ITEMS_MAX {
        set(&store, &key(number), &key(number)).unwrap();
        assert_eq!(get(&store, &key(number)), Some(key(number)), "a stored item is read");
        assert_eq!(get(&store, &key(0)), Some(key(0)), "an item that is read is not evicted");
    }
    let readable = (0..3 * ITEMS_MAX).filter(|number| get(&store, &key(*number)).is_some()).count();
    assert_eq!(readable, ITEMS_MAX);
    let evicted = usize::try_from(store.removed().evicted).unwrap();
    assert_eq!((store.content().items, evicted), (ITEMS_MAX as u64, 2 * ITEMS_MAX));
}

#[test]
fn a_store_without_evictions_refuses_items_beyond_a_full_chain() {
    let store = store(0, false);
    for number in 0..ITEMS_MAX {
        set(&store, &key(number), b"first").unwrap();
    }
    assert_eq!(set(&store, b"another", b"value"), Err(Refusal::Full));
    assert_eq!(get(&store, b"another"), None);
    for number in 0..ITEMS_MAX {
        set(&store, &key(number), &key(number)).unwrap();
        assert_eq!(get(&store, &key(number)), Some(key(number)));
    }
    update(&store, &store.pin(0), &key(7), |_| Change::Remove).unwrap();
    set(&store, b"another", b"value").unwrap();
    assert_eq!(store.content().items, ITEMS_MAX as u64);
}

#[test]
fn a_chain_that_is_longer_than_a_search_is_detected() {
    let outcome = std::panic::catch_unwind(|| {
        Mutation::ChainTooLong.while_active(items_beyond_a_full_chain_are_evicted);
    });
    assert!(outcome.is_err());
}

/// A command of a client for one of few keys.
#[derive(Clone, Copy, Debug)]
enum Step {
    Set(usize, u8),
    Add(usize, u8),
    Get(usize),
    Delete(usize),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let keys = 0..2 * ITEMS_MAX;
    let step = prop_oneof![
        4 => (keys.clone(), any::<u8>()).prop_map(|(key, value)| Step::Set(key, value)),
        1 => (keys.clone(), any::<u8>()).prop_map(|(key, value)| Step::Add(key, value)),
        2 => keys.clone().prop_map(Step::Get),
        1 => keys.prop_map(Step::Delete),
    ];
    proptest::collection::vec(step, 1..2500)
}

fn play(steps: &[Step], mask: u64, evicts: bool) -> Result<(), TestCaseError> {
    let store = store(mask, evicts);
    let mut expected: HashMap<usize, u8> = HashMap::new();
    for step in steps {
        match *step {
            Step::Set(number, value) => match set(&store, &key(number), &[value; 9]) {
                Ok(_) => drop(expected.insert(number, value)),
                Err(refusal) => prop_assert_eq!((refusal, evicts), (Refusal::Full, false)),
            },
            Step::Add(number, value) => {
                let new = [value; 9];
                let mut was_there = false;
                let added = update(&store, &store.pin(0), &key(number), |item| {
                    was_there = item.is_some();
                    if was_there { Change::Keep } else { Change::Put(put(&new)) }
                });
                prop_assert!(evicts || was_there == expected.contains_key(&number));
                if added.is_ok() && !was_there {
                    expected.insert(number, value);
                }
            }
            Step::Get(number) => {
                let found = get(&store, &key(number));
                let last = expected.get(&number).map(|value| vec![*value; 9]);
                prop_assert!(found == last || found.is_none() && evicts, "{found:?} instead of {last:?}");
            }
            Step::Delete(number) => {
                update(&store, &store.pin(0), &key(number), |_| Change::Remove).unwrap();
                expected.remove(&number);
            }
        }
    }
    expected.retain(|number, value| {
        let found = get(&store, &key(*number));
        assert!(found.is_none() || found == Some(vec![*value; 9]));
        found.is_some()
    });
    prop_assert_eq!(store.content().items, expected.len() as u64, "each counted item can be read");
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn colliding_keys_are_a_map(
        steps in steps(),
        mask in prop_oneof![Just(0), Just(1 << 6), Just(0x7 << 30), Just(u64::MAX)],
        evicts in any::<bool>(),
    ) {
        play(&steps, mask, evicts)?;
    }
}
