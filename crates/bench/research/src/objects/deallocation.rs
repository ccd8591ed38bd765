//! Figure 17: memory in use after objects of one size were allocated and a part of them was freed.

use std::collections::{BTreeMap, HashSet};

use aquifer_bench::BenchError;
use aquifer_bench::support::bytes::float;
use aquifer_bench::support::interrupt;
use aquifer_bench::support::random::Random;
use aquifer_bench::support::report::{Column, Row, Table, Target};
use aquifer_bench::support::spread::Spread;
use aquifer_objects::block::{Block, BlockId, ObjectRecord};
use aquifer_objects::class::ClassId;
use aquifer_objects::packing::Packer;
use aquifer_objects::pointer::BlockAddress;

use super::conflict_packer::ConflictPacker;
use super::id_mode::IdMode;
use super::schemes::{ALL, NUMBERS, SPLIT, Scheme};

const BLOCK_BYTES: u32 = 1 << 20;
const SIZES: [u32; 7] = [256, 512, 1024, 2048, 4096, 8192, 16_384];
/// Percentages of the objects that are freed.
const FREED: [u64; 6] = [40, 50, 60, 70, 80, 90];
/// Objects of the paper. Results are scaled to them.
const OBJECTS: u64 = 8_000_000;
/// Number of bounds that are tried.
const BOUNDS: u64 = 40;
const GIB: f64 = 1024.0 * 1024.0 * 1024.0;
const IDEAL: &str = "ideal";
const WHOLE: &str = "best whole";

/// The tables in GiB, and the targets.
///
/// # Errors
/// If the bench is interrupted.
pub fn tables(objects: u64) -> Result<(Vec<Table>, Vec<Target>), BenchError> {
    let mut tables = Vec::new();
    let (mut worst_whole, mut worst_split): (f64, f64) = (0.0, 0.0);
    for size in SIZES {
        let mut rows = Vec::new();
        for freed in FREED {
            interrupt::check()?;
            let case = Case { size, freed, objects };
            let figures = case.figures();
            let of = |name: &str| figures.get(name).map_or(f64::NAN, |spread: &Spread| spread.median);
            worst_whole = worst_whole.max(of(NUMBERS.name) / of(WHOLE));
            worst_split = worst_split.max(of(SPLIT.name) / of(IDEAL));
            rows.push(Row { name: format!("{freed} % freed"), figures });
        }
        let names = ALL.iter().map(|scheme| scheme.name).chain([WHOLE, IDEAL]);
        tables.push(Table {
            title: format!("Fig. 17: GiB in use after 8 M objects of {size} B, blocks of 1 MiB"),
            columns: names.map(Column::middle).collect(),
            pictured: None,
            ratio: None,
            rows,
        });
    }
    let target = |name: &str, worst: f64| Target {
        name: name.into(),
        value: Spread { min: worst, median: worst, max: worst },
        bound: 1.05,
        at_most: true,
    };
    let targets = vec![
        target("Fig. 17: Aquifer ÷ the best packing of whole blocks, worst cell", worst_whole),
        target("Fig. 17: Aquifer with splits ÷ ideal slots, worst cell", worst_split),
    ];
    Ok((tables, targets))
}

#[derive(Clone, Copy, Debug)]
struct Case {
    size: u32,
    freed: u64,
    objects: u64,
}

impl Case {
    fn figures(self) -> BTreeMap<&'static str, Spread> {
        let mut figures = BTreeMap::new();
        let mut add = |name, blocks: f64, slot_bytes: f64| {
            let scale = float(OBJECTS) / float(self.objects);
            let gib = blocks * f64::from(self.slots()) * slot_bytes * scale / GIB;
            figures.extend(Spread::of(&[gib]).map(|spread| (name, spread)));
        };
        for scheme in ALL {
            let blocks = self.blocks(scheme);
            let lives: Vec<u32> =
                blocks.iter().map(|(_, block)| block.live()).filter(|live| *live > 0).collect();
            if scheme == NUMBERS {
                let ours = NUMBERS.slot_bytes(self.size);
                add(WHOLE, float(best_whole(&lives, self.slots())), ours);
                let live: u64 = lives.iter().map(|live| u64::from(*live)).sum();
                add(IDEAL, float(live) / f64::from(self.slots()), ours);
            }
            add(scheme.name, float(packed(scheme, self.slots(), blocks)), scheme.slot_bytes(self.size));
        }
        figures
    }

    fn slots(self) -> u32 {
        BLOCK_BYTES / self.size
    }

    /// The blocks after all objects were allocated and a part of them was freed.
    fn blocks(self, scheme: Scheme) -> Vec<(BlockId, Block)> {
        // All schemes free the same slots, and their ids come from another generator.
        let (mut freeing, mut drawing) = (Random::new(17), Random::new(18));
        let count = u32::try_from(self.objects.div_ceil(u64::from(self.slots()))).expect("scaled down");
        let block = |number: u32| {
            let home = BlockAddress { order: 8, number };
            let mut block = Block::new(home, ClassId(0), self.slots());
            let mut ids = IdDrawer::new(scheme.mode, self.slots());
            for slot in 0..self.slots() {
                let id = ids.draw(slot, &mut drawing);
                if freeing.word_below(100) >= self.freed {
                    block.put(slot, ObjectRecord { id, home });
                }
            }
            (BlockId(number), block)
        };
        (0..count).map(block).collect()
    }
}

/// Draws ids that are unique in one block.
struct IdDrawer {
    mode: IdMode,
    drawn: Vec<bool>,
    can_be_unique: bool,
}

impl IdDrawer {
    fn new(mode: IdMode, slots: u32) -> Self {
        let drawn = match mode {
            IdMode::Random { bits } => vec![false; 1 << bits],
            _ => Vec::new(),
        };
        Self { mode, drawn, can_be_unique: mode.can_compact(slots) }
    }

    fn draw(&mut self, slot: u32, random: &mut Random) -> u64 {
        if self.drawn.is_empty() || !self.can_be_unique {
            debug_assert!(self.mode != IdMode::Offsets || self.drawn.is_empty());
            return u64::from(slot);
        }
        loop {
            let id = random.word_below(self.drawn.len() as u64);
            let place = &mut self.drawn[usize::try_from(id).expect("it is an index")];
            if !std::mem::replace(place, true) {
                return id;
            }
        }
    }
}

/// The number of blocks that are left after a compaction.
fn packed(scheme: Scheme, slots: u32, blocks: Vec<(BlockId, Block)>) -> u64 {
    let blocks = blocks.into_iter().filter(|(_, block)| block.live() > 0);
    if !scheme.merges {
        return blocks.count() as u64;
    }
    if scheme.mode == IdMode::Numbers {
        return packed_by_room(scheme, slots, blocks);
    }
    let mut packer = ConflictPacker::new(scheme.mode, slots, blocks);
    while packer.merge().is_some() {}
    packer.into_blocks().len() as u64
}

/// The number of blocks that the product's packing leaves, for which ids do not matter.
fn packed_by_room(scheme: Scheme, slots: u32, blocks: impl Iterator<Item = (BlockId, Block)>) -> u64 {
    let mut packer = Packer::new(scheme.may_split, slots, blocks);
    // Addresses that name two blocks already are not split again.
    let mut shared = HashSet::new();
    let next = |packer: &mut Packer, shared: &HashSet<BlockAddress>| {
        packer.next_merge(|block| !shared.contains(&block.address()))
    };
    while let Some(merge) = next(&mut packer, &shared) {
        packer.apply(&merge);
        if merge.into.len() == 2 {
            let shares = merge.into.iter().filter_map(|id| packer.block(*id));
            shared.extend(shares.map(Block::address).collect::<Vec<_>>());
        }
    }
    packer.into_blocks().len() as u64
}

/// No packing of whole blocks needs fewer blocks: the bounds of Fekete and Schepers for bin
/// packing.
///
/// Each replaces the sizes by others of which no more than one block's worth fits into a block:
/// for each k, a size that is not a multiple of 1/(k + 1) is rounded down to one, and multiplied by
/// (k + 1)/k.
fn best_whole(lives: &[u32], slots: u32) -> u64 {
    let bound = |k: u64| {
        let slots = u64::from(slots);
        // In units of 1/(k · slots).
        let rounded = |live: &u32| {
            let (whole, rest) = (u64::from(*live) * (k + 1) / slots, u64::from(*live) * (k + 1) % slots);
            if rest == 0 { u64::from(*live) * k } else { whole * slots }
        };
        lives.iter().map(rounded).sum::<u64>().div_ceil(k * slots)
    };
    let all: u64 = lives.iter().map(|live| u64::from(*live)).sum();
    (1..=BOUNDS).map(bound).chain([all.div_ceil(u64::from(slots))]).max().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_packing_is_better_than_the_bound() {
        assert_eq!(best_whole(&[6, 6, 6], 10), 3, "no two fit");
        assert_eq!(best_whole(&[5, 5, 5, 5], 10), 2);
        assert_eq!(best_whole(&[1; 21], 10), 3);
        assert_eq!(best_whole(&[7, 4, 6, 3], 10), 2);
    }

    #[test]
    fn splits_come_near_the_ideal_and_whole_blocks_near_their_best() {
        let case = Case { size: 4096, freed: 60, objects: 100_000 };
        let figures = case.figures();
        let of = |name: &str| figures[name].median;
        assert!(of(NUMBERS.name) <= 1.05 * of(WHOLE), "{figures:?}");
        assert!(of(SPLIT.name) <= 1.05 * of(IDEAL), "{figures:?}");
        assert!(of("Mesh") > of(NUMBERS.name));
    }
}
