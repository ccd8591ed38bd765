//! Linearisability: several clients use a store in many orders of their operations, and some are
//! killed. Their results must be those of some sequence of whole operations.

mod history;

use std::cell::Cell;
use std::collections::HashMap;
use std::panic::catch_unwind;
use std::sync::LazyLock;

use aquifer_kv::layout::hash;
use aquifer_kv::mutation::Mutation;
use aquifer_kv::objects::{Objects, Written};
use aquifer_kv::store::{KvError, KvStore};
use aquifer_mutation::Mutations as _;
use aquifer_objects::class::ClassId;
use aquifer_objects::header::ObjectNumber;
use aquifer_objects::pointer::Pointer;
use shuttle::rand::{Rng, thread_rng};
use shuttle::sync::{Arc, Mutex};
use shuttle::thread;

use history::{History, Operation};

const NAME: &str = "store";
/// The secret of the hash of keys.
const SECRET: [u64; 2] = [1, 2];
const CLIENTS: usize = 3;
const OPERATIONS: usize = 4;
const SCHEDULES: usize = 3000;
/// Difference in bytes between the size classes of this heap.
const CLASS_BYTES: usize = 64;

/// The error of an operation of a killed client.
#[derive(Debug, thiserror::Error)]
#[error("killed")]
struct Killed;

/// A heap in the memory of the test. Each operation is one step.
#[derive(Clone)]
struct ModelHeap {
    objects: Arc<Mutex<HashMap<u64, Vec<u8>>>>,
    next: Arc<Mutex<u64>>,
    /// Number of operations until the client is killed.
    left: Cell<u32>,
    /// Number of objects that can be allocated until the heap is full.
    room: Cell<u32>,
}

const ROOT: u64 = 1;

fn pointer(number: u64, bytes: usize) -> Pointer {
    let class = ClassId(u8::try_from(bytes.div_ceil(CLASS_BYTES).min(255)).expect("small"));
    let number = ObjectNumber::new(number).expect("not 0");
    Pointer { node: 1, heap: 0, class, address: 0, number }
}

impl ModelHeap {
    fn new() -> Self {
        let objects = HashMap::from([(ROOT, vec![0; 4096])]);
        Self {
            objects: Arc::new(Mutex::new(objects)),
            next: Arc::new(Mutex::new(ROOT + 1)),
            left: Cell::new(u32::MAX),
            room: Cell::new(u32::MAX),
        }
    }

    /// Returns a handle to this heap for another client, killed after `operations` operations.
    fn client(&self, operations: u32) -> Self {
        Self { left: Cell::new(operations), ..self.clone() }
    }

    fn step<T>(&self, operation: impl FnOnce(&mut HashMap<u64, Vec<u8>>) -> T) -> Result<T, Killed> {
        let left = self.left.get().checked_sub(1).ok_or(Killed)?;
        self.left.set(left);
        let done = operation(&mut self.objects.lock().expect("no client panics"));
        // The last operation is carried out, but the client receives no answer.
        if left == 0 { Err(Killed) } else { Ok(done) }
    }
}

impl Objects for ModelHeap {
    type Error = Killed;

    fn root(&mut self, _: u32) -> Result<Pointer, Killed> {
        Ok(pointer(ROOT, 4096))
    }

    fn create(&mut self, contents: &[u8]) -> Result<Pointer, Killed> {
        self.room.set(self.room.get().checked_sub(1).ok_or(Killed)?);
        let mut bytes = contents.to_vec();
        bytes.resize(bytes.len().next_multiple_of(CLASS_BYTES), 0);
        let number = {
            let mut next = self.next.lock().expect("no client panics");
            *next += 1;
            *next - 1
        };
        let created = pointer(number, bytes.len());
        self.step(|objects| objects.insert(number, bytes))?;
        Ok(created)
    }

    fn read(&mut self, pointer: &mut Pointer, out: &mut Vec<u8>) -> Result<bool, Killed> {
        self.step(|objects| {
            let Some(bytes) = objects.get(&pointer.number.get()) else { return false };
            out.clone_from(bytes);
            true
        })
    }

    fn read_many(&mut self, pointers: &mut [Pointer], outs: &mut [Vec<u8>]) -> Result<bool, Killed> {
        let mut are_all = true;
        for (pointer, out) in pointers.iter_mut().zip(outs) {
            are_all &= self.read(pointer, out)?;
        }
        Ok(are_all)
    }

    fn write_if(&mut self, pointer: &mut Pointer, expected: u64, bytes: &[u8]) -> Result<Written, Killed> {
        self.step(|objects| {
            let Some(object) = objects.get_mut(&pointer.number.get()) else { return Written::Gone };
            if object[..8] != expected.to_le_bytes() {
                return Written::Changed;
            }
            object[..bytes.len()].copy_from_slice(bytes);
            Written::Done { is_old: bytes.len().is_multiple_of(5) }
        })
    }

    fn free(&mut self, pointer: Pointer) -> Result<(), Killed> {
        self.step(|objects| drop(objects.remove(&pointer.number.get())))
    }

    fn is_of_class(&self, of: Pointer, bytes: usize) -> bool {
        pointer(1, bytes).class == of.class
    }
}

/// Keys of one bucket: one more than the capacity of a new bucket.
static KEYS: LazyLock<Vec<Vec<u8>>> = LazyLock::new(|| {
    let bucket = |key: &[u8]| hash(SECRET, key) >> 54;
    let keys = (0..).map(|number: u32| number.to_string().into_bytes());
    keys.filter(|key| bucket(key) == bucket(b"0")).take(11).collect()
});

/// A value with this number. Lengths vary, so that some values share a size class.
fn value(number: u64) -> Vec<u8> {
    let mut bytes = number.to_le_bytes().to_vec();
    bytes.resize(8 + usize::try_from(number % 3).expect("small") * 40, 7);
    bytes
}

fn number_of(bytes: &[u8]) -> u64 {
    let number = u64::from_le_bytes(bytes[..8].try_into().expect("8 bytes"));
    assert_eq!(bytes, value(number), "a value is whole");
    number
}

fn operate(
    store: &mut KvStore<ModelHeap>,
    key: &[u8],
    history: &History,
    number: u64,
) -> Result<(), KvError<Killed>> {
    match thread_rng().gen_range(0..8) {
        0..3 => {
            let pending = history.begin(Operation::Get(None));
            let found = store.get(key)?.map(|bytes| number_of(&bytes));
            history.end(pending, Operation::Get(found));
        }
        3..6 => {
            let pending = history.begin(Operation::Put(number));
            store.put(key, &value(number))?;
            history.end(pending, Operation::Put(number));
        }
        6 => {
            let pending = history.begin(Operation::Delete(false));
            let was_there = store.delete(key)?;
            history.end(pending, Operation::Delete(was_there));
        }
        _ => {
            let pending = history.begin(Operation::Get(None));
            let found = store.get_many(&[key])?.remove(0).map(|bytes| number_of(&bytes));
            history.end(pending, Operation::Get(found));
        }
    }
    Ok(())
}

fn play(may_kill: bool) {
    let heap = ModelHeap::new();
    KvStore::create_with_secret(&mut heap.clone(), NAME, 1, SECRET).expect("no client is killed");
    // Clients use the first two keys. The other keys fill the bucket, so that the second one makes
    // it grow.
    let fillers = if thread_rng().gen_bool(0.5) { &KEYS[2..] } else { &[] };
    let mut store = KvStore::open(heap.clone(), NAME).expect("the store exists");
    fillers.iter().for_each(|key| store.put(key, b"filler").expect("no client is killed"));
    let keys = [KEYS[0].clone(), KEYS[1].clone()];
    let histories = [History::new(), History::new()];
    let clients: Vec<_> = (0..CLIENTS)
        .map(|client| {
            let left =
                if may_kill && thread_rng().gen_bool(0.5) { thread_rng().gen_range(6..40) } else { u32::MAX };
            let (heap, keys, histories) = (heap.client(left), keys.clone(), histories.clone());
            thread::spawn(move || {
                let Ok(mut store) = KvStore::open(heap, NAME) else { return };
                for step in 0..OPERATIONS {
                    let at = usize::from(thread_rng().gen_bool(0.3));
                    let number = (client * OPERATIONS + step) as u64 + 1;
                    match operate(&mut store, &keys[at], &histories[at], number) {
                        Ok(()) => {}
                        Err(KvError::Objects(Killed) | KvError::NotCreated(Killed)) => return,
                        Err(error) => panic!("{error}"),
                    }
                }
            })
        })
        .collect();
    clients.into_iter().for_each(|client| client.join().expect("no client panics"));
    let mut store = KvStore::open(heap.clone(), NAME).expect("the store exists");
    let mut live = 0;
    for (key, history) in keys.iter().zip(&histories) {
        let pending = history.begin(Operation::Get(None));
        let found = store.get(key).expect("no client is killed").map(|bytes| number_of(&bytes));
        live += usize::from(found.is_some());
        history.end(pending, Operation::Get(found));
        history.check();
    }
    let (items, _) = store.scan(store.bucket_of(&keys[0])).expect("no client is killed");
    let live = live + fillers.len();
    assert_eq!(items.len(), live, "a scan finds what gets find");
    if !may_kill {
        // The catalog, the head, one segment, at most one bucket, and the items.
        let objects = heap.objects.lock().expect("no client panics").len();
        assert!((3 + live..=4 + live).contains(&objects), "{objects} objects for {live} keys");
    }
}

#[test]
fn a_put_into_a_full_heap_leaves_nothing() {
    let played = || {
        let heap = ModelHeap::new();
        KvStore::create_with_secret(&mut heap.clone(), NAME, 1, SECRET).expect("no client is killed");
        let mut store = KvStore::open(heap.clone(), NAME).expect("the store exists");
        for key in &KEYS[1..] {
            store.put(key, b"value").expect("no client is killed");
        }
        let objects = || heap.objects.lock().expect("no client panics").len();
        let before = objects();
        // There is room for the item, and not for the larger bucket that it needs.
        store.objects().room.set(1);
        let refused = store.put(&KEYS[0], b"value");
        assert!(matches!(refused, Err(KvError::NotCreated(_))), "{refused:?}");
        assert_eq!(objects(), before);
        store.objects().room.set(2);
        store.put(&KEYS[0], b"value").expect("there is room");
        assert_eq!(store.get(&KEYS[0]).expect("no client is killed"), Some(b"value".to_vec()));
        // A bucket that has an entry for a missing item is damaged: the client does not retry.
        let mut store = KvStore::open(heap.clone(), NAME).expect("the store exists");
        let items: Vec<u64> = heap.objects.lock().expect("no client panics").keys().copied().collect();
        for number in items.iter().filter(|number| **number > 3) {
            let mut objects = heap.objects.lock().expect("no client panics");
            if objects[number][..8] == 1_u64.to_le_bytes() && objects[number].len() == CLASS_BYTES {
                objects.remove(number);
            }
        }
        assert!(matches!(store.get(&KEYS[1]), Err(KvError::Damaged)));
        assert!(matches!(store.scan(store.bucket_of(&KEYS[1])), Err(KvError::Damaged)));
    };
    shuttle::check_random(played, 1);
}

#[test]
fn an_item_at_an_old_address_is_replaced_by_the_next_put() {
    let played = || {
        let heap = ModelHeap::new();
        KvStore::create_with_secret(&mut heap.clone(), NAME, 1, SECRET).expect("no client is killed");
        let mut store = KvStore::open(heap.clone(), NAME).expect("the store exists");
        let allocated = || *heap.next.lock().expect("no client panics");
        // In this heap, only items of 40 bytes are at addresses of merged blocks.
        for (bytes, items) in [([1; 23].as_slice(), 2), (&[1; 21], 0)] {
            let key = [bytes.len().to_le_bytes()[0]];
            store.put(&key, bytes).expect("no client is killed");
            let before = allocated();
            for _ in 0..4 {
                store.put(&key, bytes).expect("no client is killed");
            }
            assert_eq!(allocated() - before, items, "{} bytes", bytes.len());
        }
    };
    shuttle::check_random(played, 1);
}

#[test]
fn operations_of_several_clients_are_linearisable() {
    shuttle::check_random(|| play(false), SCHEDULES);
}

#[test]
fn operations_are_linearisable_although_clients_are_killed() {
    shuttle::check_random(|| play(true), SCHEDULES);
}

#[test]
fn each_broken_step_is_detected() {
    for mutation in [Mutation::ReplaceUnmarked, Mutation::DeleteUnmarked, Mutation::GrowUnmarked] {
        let play = move || mutation.while_active(|| play(false));
        let outcome = catch_unwind(|| shuttle::check_random(play, 20 * SCHEDULES));
        assert!(outcome.is_err(), "{mutation:?} is not noticed");
    }
}

#[test]
fn a_store_grows_is_scanned_and_is_deleted() {
    shuttle::check_random(
        || {
            let mut heap = ModelHeap::new();
            KvStore::create_with_secret(&mut heap, NAME, 1, SECRET).unwrap();
            assert!(matches!(KvStore::create(&mut heap, NAME, 1), Err(KvError::Exists)));
            let mut store = KvStore::open(heap.clone(), NAME).unwrap();
            let key = |number: u64| number.to_le_bytes();
            for number in 0..20_000 {
                store.put(&key(number), &value(number)).unwrap();
            }
            for number in (0..20_000).step_by(3) {
                assert!(store.delete(&key(number)).unwrap() && !store.delete(&key(number)).unwrap());
            }
            let mut other = KvStore::open(heap.clone(), NAME).unwrap();
            let (mut found, mut next) = (0, Some(0));
            while let Some(bucket) = next {
                let (items, following) = other.scan(bucket).unwrap();
                assert!(items.iter().all(|(_, bytes)| !number_of(bytes).is_multiple_of(3)));
                found += items.len();
                next = following;
            }
            assert_eq!(found, 13_333);
            assert_eq!(other.get(&key(7)).unwrap().map(|bytes| number_of(&bytes)), Some(7));
            assert!(matches!(other.put(b"", b""), Err(KvError::Key)));
            KvStore::drop_store(heap.clone(), NAME).unwrap();
            assert!(matches!(KvStore::open(heap.clone(), NAME), Err(KvError::NoStore)));
            assert_eq!(heap.objects.lock().unwrap().len(), 1, "the catalog is left");
            for is_new in [true, false] {
                let mut store = KvStore::open_or_create(heap.clone(), NAME, 1).unwrap();
                assert_eq!(store.get(&key(7)).unwrap().is_none(), is_new);
                store.put(&key(7), &value(7)).unwrap();
            }
        },
        1,
    );
}
