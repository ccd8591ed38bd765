//! Figures 8 and 15, and Table 3: the cost of the steps of a compaction, and the headers.

use std::sync::Arc;
use std::time::Instant;

use aquifer_bench::BenchError;
use aquifer_bench::support::bytes::float;
use aquifer_bench::support::interrupt;
use aquifer_bench::support::random::Random;
use aquifer_bench::support::report::{Column, Row, Table};
use aquifer_bench::support::spread::Spread;
use aquifer_fabric::Memory;
use aquifer_fabric::unit_map::UnitMap;
use aquifer_objects::bytes::HeapBytes;
use aquifer_objects::class::{Class, ClassId, Classes};
use aquifer_objects::header::ObjectNumber;
use aquifer_objects::heap::{Heap, HeapSettings};
use aquifer_objects::layout::slot_word;
use aquifer_objects::ledger::Ledger;

const ROUNDS: usize = 7;
const SLOT_BYTES: u32 = 256;
/// Part of the objects that are left.
const LEFT_PERCENT: usize = 30;

fn table(title: String, columns: &[&'static str], rows: Vec<Row>) -> Table {
    let columns = columns.iter().map(|column| Column::full(column)).collect();
    Table { title, columns, pictured: None, ratio: None, rows }
}

/// Figure 8: the time to change the memory behind an address.
pub fn remaps() -> Result<Table, BenchError> {
    const STORES: u64 = 1_000_000;
    let columns = ["store in the table ns", "mmap and munmap µs"];
    let mut rows = Vec::new();
    for (name, bytes) in [("4 KiB", 4 << 10), ("64 KiB", 64 << 10), ("1 MiB", 1 << 20)] {
        let words = Arc::new(Memory::create("aquifer-bench-words", 4096).map_err(BenchError::heap)?);
        let map = UnitMap { words, at: 0, units: 512, unit_bytes: bytes };
        let memory = Memory::create("aquifer-bench-block", usize::try_from(bytes).expect("small"));
        let memory = memory.map_err(BenchError::heap)?;
        let (mut stores, mut maps) = (Vec::new(), Vec::new());
        for _ in 0..ROUNDS {
            interrupt::check()?;
            let began = Instant::now();
            for unit in 0..STORES {
                map.store(unit % 512, Some(unit % 64 * 4096));
            }
            stores.push(began.elapsed().as_secs_f64() * 1e9 / float(STORES));
            let began = Instant::now();
            for _ in 0..1000 {
                let fd = memory.fd().try_clone_to_owned().map_err(BenchError::heap)?;
                drop(Memory::from_fd(fd, memory.len()).map_err(BenchError::heap)?);
            }
            maps.push(began.elapsed().as_secs_f64() * 1e6 / 1e3);
        }
        let spread = |values: &[f64]| Spread::of(values).expect("they were measured");
        let figures = columns.into_iter().zip([spread(&stores), spread(&maps)]).collect();
        rows.push(Row { name: name.into(), figures });
    }
    let title = "figure 8: to change the memory behind the addresses of a block".into();
    Ok(table(title, &columns, rows))
}

/// Figure 15: the time of collection and of merges.
pub fn compactions(is_quick: bool) -> Result<Vec<Table>, BenchError> {
    let sizes = if is_quick {
        [(0, "4 KiB"), (4, "64 KiB"), (6, "256 KiB")]
    } else {
        [(0, "4 KiB"), (4, "64 KiB"), (8, "1 MiB")]
    };
    let columns = ["2 blocks µs", "16 blocks µs", "128 blocks µs"];
    let mut rows = Vec::new();
    for (order, name) in sizes {
        let mut row = Row { name: format!("blocks of {name}"), figures: Default::default() };
        for (column, blocks) in columns.into_iter().zip([2, 16, 128]) {
            let times: Result<Vec<f64>, _> =
                (0..ROUNDS).map(|_| Fragmented::new(order, blocks, 1, LEFT_PERCENT)?.compact()).collect();
            row.figures.insert(column, Spread::of(&times?).expect("they were measured"));
        }
        rows.push(row);
    }
    let merges = table(
        format!("figure 15: to compact blocks that are {LEFT_PERCENT} % full, with slots of {SLOT_BYTES} B"),
        &columns,
        rows,
    );
    let columns = ["16 blocks each µs", "128 blocks each µs"];
    let mut rows = Vec::new();
    for workers in [1, 2, 4, 8, 16, 32] {
        let mut row = Row { name: format!("{workers} workers"), figures: Default::default() };
        for (column, blocks) in columns.into_iter().zip([16, 128]) {
            // No blocks can be merged, so only the collection is measured.
            let times: Result<Vec<f64>, _> = (0..ROUNDS)
                .map(|_| Fragmented::new(0, blocks * usize::from(workers), workers, 90)?.compact())
                .collect();
            row.figures.insert(column, Spread::of(&times?).expect("they were measured"));
        }
        rows.push(row);
    }
    let collection = table(
        "figure 15: to collect the blocks of all workers, which are 90 % full and 4 KiB".into(),
        &columns,
        rows,
    );
    Ok(vec![merges, collection])
}

/// A heap in real memory, whose blocks are partly empty.
struct Fragmented {
    heap: Heap,
    ledger: Ledger<HeapBytes>,
}

impl Fragmented {
    fn new(order: u8, blocks: usize, workers: u16, left_percent: usize) -> Result<Self, BenchError> {
        let class = Class { slot_bytes: SLOT_BYTES, order };
        let frames = u32::try_from(blocks << order).expect("small").next_multiple_of(512);
        let bytes = HeapBytes::create(frames).map_err(BenchError::heap)?;
        let layout = bytes.layout();
        let settings =
            HeapSettings { classes: Classes::of(vec![class]), may_split: false, workers, frames_max: frames };
        let (mut heap, mut ledger) = (Heap::new(settings), Ledger::create(bytes, layout));
        let payload = vec![1; class.payload_bytes() as usize / 8];
        let mut random = Random(5);
        let mut next = 1_u64;
        let slots = class.slots() as usize;
        let mut freed = Vec::new();
        for block in 0..blocks {
            let worker = u16::try_from(block % usize::from(workers)).expect("small");
            for _ in 0..slots {
                ledger.reserve_number(next);
                let mut draw = || {
                    next += 1;
                    next - 1
                };
                let allocated =
                    heap.allocate(worker, ClassId(0), &mut draw, &mut ledger).map_err(BenchError::heap)?;
                let number = ObjectNumber::new(allocated.id).expect("it is not 0");
                ledger.create_object(slot_word(allocated.frames, allocated.slot, class), number, &payload);
                if random.below(100) >= left_percent {
                    freed.push(allocated);
                }
            }
        }
        for allocated in freed {
            let number = ObjectNumber::new(allocated.id).expect("it is not 0");
            let at = slot_word(allocated.frames, allocated.slot, class);
            ledger.free_object(at, number).map_err(|error| BenchError::heap(format!("{error:?}")))?;
            heap.free(allocated.address, allocated.id, &mut ledger).map_err(BenchError::heap)?;
        }
        Ok(Self { heap, ledger })
    }

    /// The time of a whole compaction, in µs.
    fn compact(mut self) -> Result<f64, BenchError> {
        interrupt::check()?;
        let began = Instant::now();
        self.heap.compact(ClassId(0), u64::MAX, &mut self.ledger);
        Ok(began.elapsed().as_secs_f64() * 1e6)
    }
}

/// Table 3: bits of each object.
pub fn headers() -> Table {
    let columns = ["id bits", "home address bits", "lock and version bits", "bytes"];
    let row = |name: &str, values: [f64; 4]| {
        let spread = |value: f64| Spread::of(&[value]).expect("there is one");
        Row { name: name.into(), figures: columns.into_iter().zip(values.map(spread)).collect() }
    };
    let rows = vec![
        row("Mesh (no header)", [0.0, 0.0, 0.0, 0.0]),
        row("CoRM-0", [0.0, 28.0, 0.0, 3.5]),
        row("CoRM-8", [8.0, 28.0, 0.0, 4.5]),
        row("CoRM-12", [12.0, 28.0, 0.0, 5.0]),
        row("CoRM-16", [16.0, 28.0, 0.0, 5.5]),
        row("Aquifer (the home is in tables of the service)", [44.0, 0.0, 20.0, 8.0]),
    ];
    table("table 3: the header of each object".into(), &columns, rows)
}
