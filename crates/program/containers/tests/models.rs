//! Containers behave like those of the standard library. The tests use memory like a segment's.

use std::alloc::{Layout, alloc, dealloc};
use std::collections::{BTreeMap, HashMap};
use std::ptr::NonNull;

use aquifer_containers::{
    Description, HeapFault, Map, Migratable, OrderedMap, SegmentAllocator, SegmentFull, SegmentHeap, Text,
    Vector, migratable,
};
use proptest::prelude::*;

const BYTES: usize = 4 << 20;

/// Memory of a segment.
struct Memory {
    start: NonNull<u8>,
    layout: Layout,
}

impl Memory {
    fn new(bytes: usize) -> Self {
        let layout = Layout::from_size_align(bytes, 4096).unwrap();
        // SAFETY: the layout has a size.
        let start = NonNull::new(unsafe { alloc(layout) }).unwrap();
        Self { start, layout }
    }

    fn create(&self, description: &str) -> Result<SegmentHeap, HeapFault> {
        // SAFETY: the memory has this length, and a test has one heap in it.
        unsafe { SegmentHeap::create(self.start, self.layout.size(), description) }
    }

    fn open(&self, description: &str) -> Result<SegmentHeap, HeapFault> {
        // SAFETY: the memory has this length, and a test has one heap in it.
        unsafe { SegmentHeap::open(self.start, self.layout.size(), description) }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: the memory was allocated with this layout.
        unsafe { dealloc(self.start.as_ptr(), self.layout) }
    }
}

/// Runs a test with the allocator of a segment.
fn with_allocator(bytes: usize, test: impl FnOnce(SegmentAllocator)) {
    let memory = Memory::new(bytes);
    let heap = memory.create("test").unwrap();
    test(heap.into());
}

#[derive(Clone, Debug)]
enum Step {
    Insert(u16, u32),
    Remove(u16),
    Get(u16),
    Range(u16),
    Retain(u32),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let key = || 0..600_u16;
    let step = prop_oneof![
        6 => (key(), any::<u32>()).prop_map(|(key, value)| Step::Insert(key, value)),
        4 => key().prop_map(Step::Remove),
        2 => key().prop_map(Step::Get),
        1 => key().prop_map(Step::Range),
        1 => (2..5_u32).prop_map(Step::Retain),
    ];
    prop::collection::vec(step, 0..3000)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, ..ProptestConfig::default() })]

    #[test]
    fn a_map_behaves_like_the_standard_hash_map(steps in steps()) {
        with_allocator(BYTES, |allocator| {
            let (mut ours, mut theirs) = (Map::new(allocator).unwrap(), HashMap::new());
            for step in steps {
                match step {
                    Step::Insert(key, value) => {
                        assert_eq!(ours.insert(key, value).unwrap(), theirs.insert(key, value));
                    }
                    Step::Remove(key) => assert_eq!(ours.remove(&key), theirs.remove(&key)),
                    Step::Get(key) | Step::Range(key) => assert_eq!(ours.get(&key), theirs.get(&key)),
                    Step::Retain(rest) => {
                        ours.retain(|_, value| *value % rest > 0);
                        theirs.retain(|_, value| *value % rest > 0);
                    }
                }
                assert_eq!(ours.len(), theirs.len());
            }
            let all: HashMap<u16, u32> = ours.iter().map(|(key, value)| (*key, *value)).collect();
            assert_eq!(all, theirs);
        });
    }

    #[test]
    fn an_ordered_map_behaves_like_the_standard_btree_map(steps in steps()) {
        with_allocator(BYTES, |allocator| {
            let (mut ours, mut theirs) = (OrderedMap::new(allocator), BTreeMap::new());
            for step in steps {
                match step {
                    Step::Insert(key, value) => {
                        assert_eq!(ours.insert(key, value).unwrap(), theirs.insert(key, value));
                    }
                    Step::Remove(key) => assert_eq!(ours.remove(&key), theirs.remove(&key)),
                    Step::Get(key) => assert_eq!(ours.get_mut(&key), theirs.get_mut(&key)),
                    Step::Range(key) => {
                        assert!(ours.range_from(&key).take(100).eq(theirs.range(key..).take(100)));
                    }
                    Step::Retain(rest) => {
                        let is_chosen = |key: &u16| u32::from(*key) % rest == 0;
                        let keys: Vec<u16> = theirs.keys().copied().filter(is_chosen).collect();
                        keys.iter().for_each(|key| assert_eq!(ours.remove(key), theirs.remove(key)));
                    }
                }
                assert_eq!(ours.len(), theirs.len());
            }
            assert!(ours.iter().eq(theirs.iter()));
        });
    }
}

#[test]
fn an_insert_into_a_full_segment_fails_and_changes_nothing() {
    with_allocator(64 << 10, |allocator| {
        let mut map: Map<u64, Text> = Map::new(allocator).unwrap();
        let mut ordered = OrderedMap::new(allocator);
        let add = |key: u64, map: &mut Map<u64, Text>, ordered: &mut OrderedMap<u64, u64>| {
            map.insert(key, Text::new(allocator, "a text that takes some bytes")?)?;
            ordered.insert(key, key)
        };
        let keys = (0..).take_while(|key| add(*key, &mut map, &mut ordered).is_ok()).count() as u64;
        assert!((100..2000).contains(&keys), "{keys}");
        assert_eq!(Text::new(allocator, &"x".repeat(64 << 10)), Err(SegmentFull));
        for key in 0..keys {
            assert_eq!(map.get(&key).map(|text| &**text), Some("a text that takes some bytes"));
            assert_eq!(ordered.get(&key), Some(&key));
        }
        // Freed memory can be allocated again.
        map.clear();
        assert!(add(0, &mut map, &mut ordered).is_ok());
    });
}

#[test]
fn all_memory_is_freed_with_the_containers() {
    with_allocator(1 << 20, |allocator| {
        for _ in 0..200 {
            let mut map = Map::new(allocator).unwrap();
            for key in 0..200_u64 {
                let mut values = Vector::new(allocator);
                values.extend_from_slice(&[key; 100]).unwrap();
                map.insert(key, values).expect("what was used before is free");
            }
        }
    });
}

#[test]
fn a_map_can_be_used_by_the_process_that_opens_the_segment() {
    let memory = Memory::new(BYTES);
    let heap = memory.create("test").unwrap();
    let mut map = Map::new(heap.into()).unwrap();
    (0..1000_u32).for_each(|key| assert_eq!(map.insert(key, key), Ok(None)));
    // A process that is killed during an allocation leaves the lock held.
    // SAFETY: the address is that of the lock, behind the magic number.
    unsafe { memory.start.cast::<u32>().add(2).write(1) };
    assert_eq!(memory.open("test").unwrap(), heap);
    (1000..2000_u32).for_each(|key| assert_eq!(map.insert(key, key), Ok(None)));
    assert!((0..2000).all(|key| map.get(&key) == Some(&key)));
}

#[test]
fn containers_of_another_type_are_refused() {
    let memory = Memory::new(BYTES);
    // SAFETY: the memory has this length.
    unsafe { memory.start.write_bytes(0, 8192) };
    assert_eq!(memory.open("test"), Err(HeapFault::NoContainers));
    memory.create("counts").unwrap();
    let error = memory.open("words").unwrap_err().to_string();
    assert_eq!(error, "the segment has «counts», and this program expects «words»");
    // SAFETY: the address is that of the description's length.
    unsafe { memory.start.cast::<u32>().add(3).write(u32::MAX) };
    assert_eq!(memory.open("counts"), Err(HeapFault::NoContainers));
    assert!(matches!(Memory::new(4096).create("test"), Err(HeapFault::TooSmall { bytes: 4096 })));
    assert!(matches!(memory.create(&"x".repeat(3000)), Err(HeapFault::LongDescription { bytes: 3000 })));
}

migratable! {
    /// An order.
    #[derive(Debug)]
    pub struct Order: 1 {
        number: u64,
        lines: Vector<(Text, u32)>,
    }
}

mod changed {
    use super::{Text, Vector, migratable};

    migratable! {
        /// An order with the same name and size, and other fields.
        #[derive(Debug)]
        pub struct Order: 1 {
            number: u64,
            lines: Vector<(Text, i32)>,
        }
    }
}

mod newer {
    use super::{Text, Vector, migratable};

    migratable! {
        /// An order with the same fields in another meaning.
        #[derive(Debug)]
        pub struct Order: 2 {
            number: u64,
            lines: Vector<(Text, u32)>,
        }
    }
}

#[test]
fn each_change_of_a_type_changes_its_description() {
    fn of<T: Migratable>() -> String {
        Description::of::<T>()
    }
    let all = [
        of::<Order>(),
        of::<changed::Order>(),
        of::<newer::Order>(),
        of::<Vector<Order>>(),
        of::<[u64; 5]>(),
    ];
    for (at, one) in all.iter().enumerate() {
        assert!(all[..at].iter().all(|other| other != one), "{one}");
    }
    assert!(all[0].contains(env!("CARGO_PKG_VERSION")), "{}", all[0]);
}
