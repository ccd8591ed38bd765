//! The case study of FineMem (OSDI 2025) for a key-value store: throughput and memory by the size
//! of blocks. The heap is in this process, in real memory; blocks of all classes have the same
//! size.

use std::time::Instant;

use aquifer_bench::BenchError;
use aquifer_bench::support::bytes::float;
use aquifer_bench::support::interrupt;
use aquifer_bench::support::random::Random;
use aquifer_bench::support::report::{Column, Row, Table};
use aquifer_bench::support::spread::Spread;
use aquifer_objects::bytes::HeapBytes;
use aquifer_objects::class::{Class, ClassId, Classes};
use aquifer_objects::header::{HEADER_BYTES, ObjectNumber};
use aquifer_objects::heap::{Allocated, Heap, HeapSettings};
use aquifer_objects::layout::slot_word;
use aquifer_objects::ledger::Ledger;

const ROUNDS: usize = 3;
const FRAMES: u32 = 256 << 8;
/// Sizes of items in bytes. All are equally frequent.
const SIZES: [u32; 6] = [40, 90, 200, 500, 1200, 2800];
const ORDERS: [(u8, &str); 5] = [(0, "4 KiB"), (2, "16 KiB"), (4, "64 KiB"), (6, "256 KiB"), (8, "1 MiB")];
const COLUMNS: [&str; 5] = ["puts k/s", "held ÷ live", "half deleted", "compacted", "compaction ms"];

/// Measures each size of blocks.
pub fn table(keys: usize) -> Result<Table, BenchError> {
    let mut rows = Vec::new();
    for (order, name) in ORDERS {
        let mut measured: [Vec<f64>; 5] = Default::default();
        for round in 0..ROUNDS {
            interrupt::check()?;
            let values = Items::new(order, round as u64)?.play(keys)?;
            measured.iter_mut().zip(values).for_each(|(measured, value)| measured.push(value));
        }
        let spread = |values: &Vec<f64>| Spread::of(values).expect("they were measured");
        let figures = COLUMNS.into_iter().zip(measured.iter().map(spread)).collect();
        rows.push(Row { name: format!("blocks of {name}"), figures });
    }
    Ok(Table {
        title: "items of 40 to 2,800 bytes by the size of blocks: puts of other sizes, and memory".into(),
        columns: COLUMNS.map(Column::full).to_vec(),
        pictured: None,
        ratio: None,
        rows,
    })
}

/// The items of a store, each with its class.
struct Items {
    heap: Heap,
    ledger: Ledger<HeapBytes>,
    classes: Classes,
    items: Vec<(Allocated, ClassId)>,
    next: u64,
    random: Random,
}

fn failed(error: impl std::fmt::Display) -> BenchError {
    BenchError::Heap { reason: error.to_string() }
}

impl Items {
    fn new(order: u8, seed: u64) -> Result<Self, BenchError> {
        let bytes = HeapBytes::create(FRAMES).map_err(failed)?;
        let layout = bytes.layout();
        let slot_bytes = |size: u32| (size + HEADER_BYTES).next_multiple_of(8);
        let classes = Classes::of(SIZES.map(|size| Class { slot_bytes: slot_bytes(size), order }).to_vec());
        let settings =
            HeapSettings { classes: classes.clone(), may_split: false, workers: 1, frames_max: FRAMES };
        let (heap, ledger) = (Heap::new(settings), Ledger::create(bytes, layout));
        Ok(Self { heap, ledger, classes, items: Vec::new(), next: 1, random: Random(seed) })
    }

    fn play(mut self, keys: usize) -> Result<[f64; 5], BenchError> {
        for _ in 0..keys {
            let item = self.allocate()?;
            self.items.push(item);
        }
        let began = Instant::now();
        for _ in 0..2 * keys {
            let at = self.random.below(self.items.len());
            let new = self.allocate()?;
            let old = std::mem::replace(&mut self.items[at], new);
            self.free(old)?;
        }
        let puts = float(2 * keys as u64) / began.elapsed().as_secs_f64() / 1e3;
        let full = self.held_for_live();
        for _ in 0..keys / 2 {
            let at = self.random.below(self.items.len());
            let item = self.items.swap_remove(at);
            self.free(item)?;
        }
        let deleted = self.held_for_live();
        let began = Instant::now();
        let classes: Vec<ClassId> = self.classes.iter().map(|(id, _)| id).collect();
        for class in classes {
            while self.heap.compact(class, u64::MAX, &mut self.ledger) > 0 {}
        }
        let compaction_ms = began.elapsed().as_secs_f64() * 1e3;
        Ok([puts, full, deleted, self.held_for_live(), compaction_ms])
    }

    fn held_for_live(&self) -> f64 {
        let usage = self.heap.usage();
        float(usage.held_bytes) / float(usage.live_bytes)
    }

    fn shape(&self, class: ClassId) -> Class {
        self.classes.get(class).expect("it was found")
    }

    fn allocate(&mut self) -> Result<(Allocated, ClassId), BenchError> {
        let size = SIZES[self.random.below(SIZES.len())];
        let class = self.classes.class_for(size).expect("it is no large object");
        self.ledger.reserve_number(self.next);
        let next = &mut self.next;
        let mut draw = || {
            *next += 1;
            *next - 1
        };
        let allocated = self.heap.allocate(0, class, &mut draw, &mut self.ledger).map_err(failed)?;
        let shape = self.shape(class);
        let payload = vec![allocated.id; shape.payload_bytes() as usize / 8];
        let number = ObjectNumber::new(allocated.id).expect("it is not 0");
        self.ledger.create_object(slot_word(allocated.frames, allocated.slot, shape), number, &payload);
        Ok((allocated, class))
    }

    fn free(&mut self, (allocated, class): (Allocated, ClassId)) -> Result<(), BenchError> {
        let found = self.heap.locate(allocated.address, allocated.id).map_err(failed)?;
        let at = slot_word(found.frames, found.slot, self.shape(class));
        let number = ObjectNumber::new(allocated.id).expect("it is not 0");
        self.ledger.free_object(at, number).map_err(|error| failed(format!("{error:?}")))?;
        self.heap.free(allocated.address, allocated.id, &mut self.ledger).map_err(failed)
    }
}
