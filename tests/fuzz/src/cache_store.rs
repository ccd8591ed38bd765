//! The items of the cache: operations of clients on keys of which many have the same hash.

use std::collections::BTreeMap;

use aquifer_cache::store::hash::{HashSecret, KeyHasher};
use aquifer_cache::store::index::Mutation;
use aquifer_cache::store::item::States;
use aquifer_cache::store::partition::{Cas, Change, Partition, Put};
use aquifer_cache::store::presence::{Place, Presence};
use aquifer_cache::store::{Refusal, Store, StoreOptions, Until};
use aquifer_cache_cluster::copying::{Copy, CopyError, Piece, Source};
use aquifer_fabric::Memory;
use aquifer_mutation::Mutations;

use crate::Target;

pub(crate) const STORE: Target = Target {
    name: "cache-store",
    run: play,
    seeds,
    with_mutation: |work| Mutation::ChainTooLong.while_active(work),
};

/// The second of all steps: nothing expires.
const NOW_S: u32 = 100;
/// The bits that are left of each hash, by the first byte of the input.
const MASKS: [u64; 4] = [0, 1 << 6, 0x3F << 6, u64::MAX];
/// Bytes of a value that fills almost a run.
const LONG_BYTES: usize = 60_000;
/// Most steps, so that an input takes little time.
const STEPS_MAX: usize = 200;
/// Calls that free what was flushed.
const EXPIRE_CALLS: usize = 20;

/// A store and its expected items.
struct Model {
    store: Store,
    options: StoreOptions,
    /// The last version that was stored for each key. It may have been evicted.
    expected: BTreeMap<u16, u32>,
    versions: u32,
    moves: u64,
}

/// Reads the memory of a partition of the same process.
struct Local {
    from: Memory,
    to: Memory,
}

impl Local {
    fn new(from: &Partition, to: &Partition) -> Self {
        let map = |partition: &Partition| {
            let memory = partition.descriptor().expect("there are descriptors");
            Memory::from_fd(memory, partition.layout().bytes()).expect("the memory can be mapped")
        };
        Self { from: map(from), to: map(to) }
    }
}

impl Source for Local {
    fn read(&mut self, pieces: &[Piece]) -> Result<(), CopyError> {
        let offset = |at: u64| usize::try_from(at).expect("64 bits");
        for piece in pieces {
            let mut bytes = vec![0; piece.len as usize];
            self.from.read(offset(piece.from), &mut bytes);
            self.to.write(offset(piece.to), &bytes);
        }
        Ok(())
    }
}

/// Carries out the steps that the bytes encode, and compares the items that are read with those
/// that were stored.
fn play(bytes: &[u8]) -> bool {
    let Some((&first, steps)) = bytes.split_first() else { return false };
    let mask = MASKS[usize::from(first) % MASKS.len()];
    let hasher = KeyHasher::new(HashSecret([1, 2])).with_mask(mask);
    let evicts = first & 0x80 == 0;
    let options =
        StoreOptions { limit: 2 << 20, partitions: 1, threads: 1, has_cas: true, evicts, pool: 0, hasher };
    let store = Store::new(&options).expect("there is memory for a small store");
    let mut model = Model { store, options, expected: BTreeMap::new(), versions: 0, moves: 0 };
    let steps: Vec<_> = steps.chunks_exact(3).take(STEPS_MAX).collect();
    for step in &steps {
        let key = u16::from_le_bytes([step[1], step[2]]);
        match step[0] % 10 {
            0 => model.set(key, usize::from(step[2])),
            // Many keys, so that chains grow and buckets are split.
            1 => (0..u16::from(step[2])).for_each(|more| model.set(u16::from(step[1]) * 64 + more, 9)),
            2 => model.check(key),
            3 => model.delete(key),
            4 => model.set(key, LONG_BYTES),
            5 => model.store.expire(NOW_S),
            6 => model.flush(),
            7 => model.move_away(),
            8 => model.restart(),
            _ => model.leave_and_stay(),
        }
    }
    model.check_all();
    steps.len() > 1
}

impl Model {
    fn set(&mut self, key: u16, len: usize) {
        self.versions += 1;
        let (name, value) = (name(key), value(key, self.versions, len));
        let put = Put {
            client_flags: 0,
            expires_s: 0,
            states: States::NONE,
            cas: Cas::Next,
            is_fetched: false,
            value: [&value, b""],
        };
        let set = || {
            let pin = self.store.pin(0);
            self.store.update(&pin, self.store.key(&name), NOW_S, |_| Change::Put(put))
        };
        let stored = match set() {
            // There is room when the turn has ended.
            Err(Refusal::Again(Until::NextTurn)) => set(),
            other => other,
        };
        match stored {
            Ok(_) => {
                self.expected.insert(key, self.versions);
                assert_eq!(self.get(key), Some(self.versions), "what was stored is read");
            }
            Err(refusal) => assert!(
                refusal == Refusal::Again(Until::NextTurn)
                    || refusal == Refusal::Full && !self.options.evicts,
                "{refusal:?}"
            ),
        }
    }

    fn get(&self, key: u16) -> Option<u32> {
        let name = name(key);
        let pin = self.store.pin(0);
        let item = self.store.look_up(&pin, self.store.key(&name), NOW_S, true).ok()?;
        assert_eq!(item.key, name);
        let version = item.value.get(2..6).and_then(|bytes| bytes.first_chunk().copied());
        let version = u32::from_le_bytes(version.expect("a value has a version"));
        let is_whole = item.value == value(key, version, item.value.len() - 6);
        assert!(is_whole, "a value that was never stored for key {key}");
        Some(version)
    }

    fn check(&self, key: u16) {
        let (found, last) = (self.get(key), self.expected.get(&key).copied());
        assert!(
            found == last || found.is_none() && self.options.evicts,
            "key {key}: {found:?}, not {last:?}"
        );
    }

    fn check_all(&self) {
        self.expected.keys().for_each(|key| self.check(*key));
        let readable = self.expected.keys().filter(|key| self.get(**key).is_some()).count();
        assert_eq!(self.store.content().items, readable as u64, "each item is one that can be read");
    }

    fn delete(&mut self, key: u16) {
        let name = name(key);
        let pin = self.store.pin(0);
        let deleted = self.store.update(&pin, self.store.key(&name), NOW_S, |_| Change::Remove);
        drop(pin);
        assert!(deleted.is_ok(), "{deleted:?}");
        self.expected.remove(&key);
        self.check(key);
    }

    fn flush(&mut self) {
        assert!(self.store.flush(&self.store.pin(0), 0));
        self.expected.keys().for_each(|key| assert_eq!(self.get(*key), None));
        for _ in 0..EXPIRE_CALLS {
            self.store.expire(NOW_S);
        }
        assert_eq!(self.store.content().items, 0);
        self.expected.clear();
    }

    /// Moves the partition to another store.
    fn move_away(&mut self) {
        let target = Store::new(&self.options).expect("there is memory for a small store");
        target.begin_absent();
        let (from, to) = (&self.store.partitions()[0], &target.partitions()[0]);
        let (mut local, mut copy) = (Local::new(from, to), Copy::new(to, *from.layout()));
        let round = copy.round(from.runs_end(), &mut local, &mut |_| true);
        assert!(round.is_ok(), "{round:?}");
        let departure = self.store.leave(0, NOW_S);
        let finished = copy.finish(&departure, &mut local, &mut |_| true);
        assert!(finished.is_ok(), "{finished:?}");
        let arrived = target.arrive(0, &departure, NOW_S);
        assert!(arrived.is_ok(), "{arrived:?}");
        target.stay(0);
        self.moves += 1;
        let place = Presence::Elsewhere(Place { server: 1, generation: self.moves });
        self.store.forget(0, place).expect("the memory can be returned");
        assert_eq!(self.store.content().items, 0);
        self.store = target;
        self.check_all();
    }

    /// Adopts the memory in another store, as after a restart.
    fn restart(&mut self) {
        let kept = self.store.keep(&self.options, 0, NOW_S, 0).expect("there are descriptors");
        let kept = kept.into_iter().map(|memory| (0, memory)).collect();
        let next = Store::with_kept(&self.options, kept, NOW_S, 0).expect("there is memory");
        // A store that is a little over its limit is not adopted.
        if next.adopted().is_empty() {
            self.expected.clear();
        }
        next.stay(0);
        self.store = next;
        self.check_all();
    }

    /// Begins to move the partition, and cancels the move.
    fn leave_and_stay(&mut self) {
        self.store.leave(0, NOW_S);
        self.store.stay(0);
        self.check_all();
    }
}

fn name(key: u16) -> Vec<u8> {
    format!("key-{key}").into_bytes()
}

/// A value with its key and its version.
fn value(key: u16, version: u32, len: usize) -> Vec<u8> {
    let mut bytes = [&key.to_le_bytes()[..], &version.to_le_bytes()].concat();
    let pattern = [key.to_le_bytes()[0], version.to_le_bytes()[0], 7];
    bytes.extend(pattern.iter().cycle().take(len));
    bytes
}

fn seeds() -> Vec<(&'static str, Vec<u8>)> {
    let input = |first: u8, steps: &[[u8; 3]]| [&[first][..], &steps.concat()].concat();
    let keys = [[0, 1, 0], [0, 2, 0], [0, 3, 0], [2, 1, 0], [3, 2, 0], [2, 2, 0]];
    vec![
        ("one-hash", input(0, &keys)),
        ("two-hashes", input(0x81, &keys)),
        ("split", input(3, &[[1, 0, 255], [1, 4, 255], [2, 5, 0]])),
        ("long", input(3, &[[4, 1, 0], [4, 2, 0], [2, 1, 0]])),
        ("move", input(2, &[[1, 0, 90], [7, 0, 0], [0, 1, 0], [9, 0, 0], [8, 0, 0]])),
        ("flush", input(1, &[[1, 0, 40], [6, 0, 0], [0, 1, 0], [5, 0, 0]])),
    ]
}
