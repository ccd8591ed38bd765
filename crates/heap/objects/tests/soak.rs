//! A soak: objects come and go, blocks are merged, and all old pointers are released. Memory and
//! addresses must be at the end what they were at the start.

use aquifer_objects::bytes::HeapBytes;
use aquifer_objects::class::{Class, ClassId, Classes};
use aquifer_objects::header::ObjectNumber;
use aquifer_objects::heap::{Heap, HeapSettings};
use aquifer_objects::layout::{Layout, slot_word};
use aquifer_objects::ledger::Ledger;
use aquifer_objects::slot::Words;

const FRAMES: u32 = 8192;
const OBJECTS: usize = 4000;
const SIZES: [u32; 4] = [24, 100, 500, 2000];

/// An object, and its pointer.
#[derive(Clone, Copy)]
struct Held {
    address: u64,
    id: u64,
    class: ClassId,
    shape: Class,
}

struct Soak {
    heap: Heap,
    ledger: Ledger<HeapBytes>,
    held: Vec<Held>,
    next: u64,
    random: u64,
    merges: u64,
}

impl Soak {
    fn new() -> Self {
        let settings = HeapSettings {
            classes: Classes::standard().clone(),
            may_split: true,
            workers: 2,
            frames_max: FRAMES,
        };
        let bytes = HeapBytes::create(FRAMES).unwrap();
        let ledger = Ledger::create(bytes, Layout::new(FRAMES));
        Self { heap: Heap::new(settings), ledger, held: Vec::new(), next: 1, random: 88, merges: 0 }
    }

    fn below(&mut self, bound: usize) -> usize {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        usize::try_from(self.random >> 33).unwrap() % bound
    }

    fn allocate(&mut self) {
        let size = SIZES[self.below(SIZES.len())];
        let worker = u16::try_from(self.below(2)).unwrap();
        let class = self.heap.classes().class_for(size).unwrap();
        let shape = self.heap.classes().get(class).unwrap();
        self.ledger.reserve_number(self.next);
        let next = &mut self.next;
        let mut draw = || std::mem::replace(next, *next + 1);
        let allocated = self.heap.allocate(worker, class, &mut draw, &mut self.ledger).unwrap();
        let number = ObjectNumber::new(allocated.id).unwrap();
        let at = slot_word(allocated.frames, allocated.slot, shape);
        self.ledger.create_object(at, number, &[allocated.id]);
        self.held.push(Held { address: allocated.address, id: allocated.id, class, shape });
    }

    fn free(&mut self) {
        let at = self.below(self.held.len());
        let Held { address, id, shape, .. } = self.held.swap_remove(at);
        let found = self.heap.locate(address, id).unwrap();
        let number = ObjectNumber::new(id).unwrap();
        self.ledger.free_object(slot_word(found.frames, found.slot, shape), number).unwrap();
        self.heap.free(address, id, &mut self.ledger).unwrap();
    }

    /// Most objects go, the rest is merged, and all pointers are released.
    fn round(&mut self) {
        while self.held.len() < OBJECTS {
            self.allocate();
        }
        while self.held.len() > OBJECTS / 5 {
            self.free();
        }
        let mut classes: Vec<ClassId> = self.held.iter().map(|held| held.class).collect();
        classes.sort_unstable();
        classes.dedup();
        for class in classes {
            self.merges += self.heap.compact(class, u64::MAX, &mut self.ledger);
        }
        for at in 0..self.held.len() {
            let Held { address, id, shape, .. } = self.held[at];
            self.held[at].address = self.heap.release(address, id, &mut self.ledger).unwrap();
            let found = self.heap.locate(self.held[at].address, id).unwrap();
            assert!(!found.is_old, "the pointer was released");
            let word = self.ledger.words.load(slot_word(found.frames, found.slot, shape) + 1);
            assert_eq!(word, id, "the bytes have moved with the object");
        }
        self.heap.expire_released(&mut self.ledger);
        self.heap.expire_released(&mut self.ledger);
        self.heap.clear_free_frames(&mut self.ledger);
    }

    /// Bytes of objects, bytes of tables, and addresses in use and ever used.
    fn usage(&self) -> (u64, u64, (usize, usize)) {
        let (data, tables) = self.ledger.words.allocated_bytes().unwrap();
        (data, tables, self.heap.addresses())
    }
}

fn soak(rounds: usize) {
    let mut soak = Soak::new();
    (0..10).for_each(|_| soak.round());
    let (data, tables, (_, ever)) = soak.usage();
    (0..rounds).for_each(|_| soak.round());
    let (data_after, tables_after, (in_use, ever_after)) = soak.usage();
    println!(
        "{} merges; {data} → {data_after}, {tables} → {tables_after}, addresses {ever} → {ever_after}",
        soak.merges
    );
    assert!(soak.merges > rounds as u64, "{} merges", soak.merges);
    assert!(data_after <= data + data / 4, "objects take {data_after} bytes and not {data}");
    // The homes of slots take at most a quarter of what blocks take.
    assert!(tables_after <= tables + data / 4, "tables take {tables_after} bytes and not {tables}");
    assert!(ever_after <= ever + ever / 4, "{ever_after} addresses were used, and not {ever}");
    let blocks = soak.heap.usage().held_bytes / 4096;
    assert!(in_use as u64 <= blocks, "{in_use} addresses for at most {blocks} blocks");
    while !soak.held.is_empty() {
        soak.free();
    }
    soak.heap.expire_released(&mut soak.ledger);
    soak.heap.expire_released(&mut soak.ledger);
    let (data, _, (in_use, _)) = soak.usage();
    assert_eq!((data, in_use), (0, 0), "all is free");
}

#[test]
fn memory_and_addresses_stay_as_they_are() {
    soak(60);
}

mod long {
    #[test]
    fn memory_and_addresses_stay_as_they_are_for_millions_of_objects() {
        super::soak(2000);
    }
}
