//! Figure 7: the probability that two random blocks of 4 KiB can be merged.

use std::collections::BTreeMap;

use aquifer_bench::support::bytes::float;
use aquifer_bench::support::random::Random;
use aquifer_bench::support::report::{Column, Row, Table, Target};
use aquifer_bench::support::spread::Spread;
use aquifer_objects::block::{Block, ObjectRecord};
use aquifer_objects::class::ClassId;
use aquifer_objects::pointer::BlockAddress;

use super::id_mode::{IdMode, IdSet, can_merge, merge_probability};

const BLOCK_BYTES: u32 = 4096;
const SIZES: [u32; 8] = [16, 32, 64, 128, 256, 512, 1024, 2048];
/// Parts of the slots that are in use, in eighths.
const OCCUPANCIES: [u32; 4] = [1, 2, 3, 4];
const COLUMNS: [&str; 6] = ["Mesh", "formula", "8 bits", "formula ", "16 bits", "formula  "];

/// The tables, and the target that formula and simulation agree.
pub fn tables(pairs: u64) -> (Vec<Table>, Target) {
    let mut random = Random::new(7);
    let mut worst: f64 = 0.0;
    let mut table = |eighths: u32| {
        let rows = SIZES.map(|size| row(size, eighths, pairs, &mut random, &mut worst));
        Table {
            title: format!(
                "Fig. 7: probability that two blocks of 4 KiB merge, {} % in use",
                f64::from(eighths) * 12.5
            ),
            columns: COLUMNS.map(Column::middle).to_vec(),
            pictured: None,
            ratio: None,
            rows: rows.into(),
        }
    };
    let tables = OCCUPANCIES.map(&mut table).into();
    let target = Target {
        name: "Fig. 7: largest difference between simulation and formula".into(),
        value: Spread { min: worst, median: worst, max: worst },
        // Four standard deviations.
        bound: 4.0 * (0.25 / float(pairs)).sqrt(),
        at_most: true,
    };
    (tables, target)
}

fn row(size: u32, eighths: u32, pairs: u64, random: &mut Random, worst: &mut f64) -> Row {
    let slots = BLOCK_BYTES / size;
    let objects = (slots * eighths / 8).max(1);
    let modes = [IdMode::Offsets, IdMode::Random { bits: 8 }, IdMode::Random { bits: 16 }];
    let ids = [u64::from(slots), 1 << 8, 1 << 16];
    let mut figures = BTreeMap::new();
    for ((mode, ids), columns) in modes.into_iter().zip(ids).zip(COLUMNS.chunks(2)) {
        let expected = merge_probability(slots, ids, (objects, objects));
        let merged = (0..pairs).filter(|_| random_pair_merges(mode, slots, objects, random)).count();
        let found = float(merged as u64) / float(pairs);
        *worst = worst.max((found - expected).abs());
        for (column, value) in columns.iter().zip([found, expected]) {
            figures.extend(Spread::of(&[value]).map(|spread| (*column, spread)));
        }
    }
    Row { name: format!("{size} B"), figures }
}

fn random_pair_merges(mode: IdMode, slots: u32, objects: u32, random: &mut Random) -> bool {
    let (one, other) =
        (random_block(mode, slots, objects, random), random_block(mode, slots, objects, random));
    let mut ids = IdSet::default();
    ids.fill(&one, mode);
    can_merge(mode, &one, &ids, &other)
}

/// A block with this number of objects in random slots.
fn random_block(mode: IdMode, slots: u32, objects: u32, random: &mut Random) -> Block {
    let home = BlockAddress { order: 0, number: 0 };
    let mut block = Block::new(home, ClassId(0), slots);
    let mut free: Vec<u32> = (0..slots).collect();
    while block.live() < objects {
        let at = usize::try_from(random.word_below(free.len() as u64)).expect("it is an index");
        let slot = free.swap_remove(at);
        let id = loop {
            let id = match mode {
                IdMode::Random { bits } => random.word_below(1 << bits),
                _ => u64::from(slot),
            };
            if block.find(id, 0).is_none() {
                break id;
            }
        };
        block.put(slot, ObjectRecord { id, home });
    }
    block
}
