//! The addresses of blocks and the frames of a heap's memory.
//!
//! An address of a block names one or two blocks. It is used again when no object has it as its
//! home any more (§3.3).

use std::collections::BTreeSet;

use crate::block::BlockId;
use crate::class::BLOCK_ORDERS;
use crate::pointer::BlockAddress;

/// A run of 2^`order` frames of the heap's memory.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
pub struct FrameRun {
    /// The first frame.
    pub first: u32,
    /// Size, as a power of two.
    pub order: u8,
}

/// Sizes of runs: 4 KiB to 64 MiB.
const RUN_ORDERS: usize = 15;

/// Allocates runs of frames, by the buddy system.
#[derive(Clone, Debug)]
pub struct Frames {
    /// The free runs of each size.
    free: [BTreeSet<u32>; RUN_ORDERS],
    used: u32,
}

impl Frames {
    /// Memory of `max` frames, all free.
    #[must_use]
    pub fn new(max: u32) -> Self {
        let mut free: [BTreeSet<u32>; RUN_ORDERS] = Default::default();
        let mut first = 0;
        while first < max {
            let fits = |order: &usize| first % (1 << order) == 0 && max - first >= 1 << order;
            let order = (0..RUN_ORDERS).rev().find(fits).expect("a single frame fits");
            free[order].insert(first);
            first += 1 << order;
        }
        Self { free, used: 0 }
    }

    /// Number of frames in use.
    #[must_use]
    pub fn used(&self) -> u32 {
        self.used
    }

    /// Allocates a run; `None` if none is large enough.
    pub fn allocate(&mut self, order: u8) -> Option<FrameRun> {
        let wanted = usize::from(order);
        let larger = (wanted..RUN_ORDERS).find(|order| !self.free[*order].is_empty())?;
        let first = self.free[larger].pop_first()?;
        for half in wanted..larger {
            self.free[half].insert(first + (1 << half));
        }
        self.used += 1 << order;
        Some(FrameRun { first, order })
    }

    /// Frees a run.
    pub fn release(&mut self, mut run: FrameRun) {
        self.used -= 1 << run.order;
        while usize::from(run.order) + 1 < RUN_ORDERS {
            let buddy = run.first ^ (1 << run.order);
            if !self.free[usize::from(run.order)].remove(&buddy) {
                break;
            }
            run = FrameRun { first: run.first.min(buddy), order: run.order + 1 };
        }
        let is_new = self.free[usize::from(run.order)].insert(run.first);
        assert!(is_new, "{run:?} is freed twice");
    }
}

/// Addresses of blocks for each that the heap's memory has room for: merges leave addresses behind.
const ADDRESSES_PER_BLOCK: u64 = 4;

/// The most addresses of blocks of a size in a heap of `frames_max` frames.
#[must_use]
pub fn addresses_max(frames_max: u32, order: u8) -> u64 {
    let addresses = u64::from(frames_max) * ADDRESSES_PER_BLOCK;
    (addresses >> order).max(ADDRESSES_PER_BLOCK)
}

/// What an address names.
#[derive(Clone, Copy, Debug, Default)]
struct AddressRecord {
    /// The blocks: none if the address is not in use. Two after the objects of a block were split.
    named: [Option<BlockId>; 2],
    /// Objects that have the address as their home.
    homed: u32,
}

/// The addresses of a heap's blocks.
#[derive(Clone, Debug, Default)]
pub struct Addresses {
    records: [Vec<AddressRecord>; BLOCK_ORDERS],
    free: [Vec<u32>; BLOCK_ORDERS],
}

impl Addresses {
    /// An address for a new block; `None` if `max` addresses are in use.
    pub fn allocate(&mut self, order: u8, block: BlockId, max: u64) -> Option<BlockAddress> {
        let (records, free) = (&mut self.records[usize::from(order)], &mut self.free[usize::from(order)]);
        let number = match free.pop() {
            Some(number) => number,
            None if (records.len() as u64) < max => {
                records.push(AddressRecord::default());
                u32::try_from(records.len() - 1).ok()?
            }
            None => return None,
        };
        records[number as usize] = AddressRecord { named: [Some(block), None], homed: 0 };
        Some(BlockAddress { order, number })
    }

    /// The blocks that an address names; none if it is not in use.
    pub fn named(&self, address: BlockAddress) -> impl Iterator<Item = BlockId> + use<> {
        let record = self.records[usize::from(address.order)].get(address.number as usize);
        record.copied().unwrap_or_default().named.into_iter().flatten()
    }

    /// Whether an address names one block only.
    #[must_use]
    pub fn is_single(&self, address: BlockAddress) -> bool {
        self.named(address).count() == 1
    }

    /// Makes an address name `next` where it named `last`. With two blocks it must have named
    /// `last` only.
    ///
    /// # Panics
    /// If it would have to name three blocks.
    pub fn rename(&mut self, address: BlockAddress, last: BlockId, next: &[BlockId]) {
        let record = &mut self.records[usize::from(address.order)][address.number as usize];
        let mut named: Vec<BlockId> = record.named.into_iter().flatten().filter(|id| *id != last).collect();
        for id in next {
            if !named.contains(id) {
                named.push(*id);
            }
        }
        assert!(named.len() <= 2, "an address names at most two blocks");
        record.named = [named.first().copied(), named.get(1).copied()];
    }

    /// Counts an object that has an address as its home.
    pub fn add_homed(&mut self, address: BlockAddress) {
        self.records[usize::from(address.order)][address.number as usize].homed += 1;
    }

    /// Counts an object less. Returns whether no object has the address as its home any more.
    pub fn remove_homed(&mut self, address: BlockAddress) -> bool {
        let record = &mut self.records[usize::from(address.order)][address.number as usize];
        record.homed -= 1;
        record.homed == 0
    }

    /// Number of objects that have an address as their home.
    #[must_use]
    pub fn homed(&self, address: BlockAddress) -> u32 {
        self.records[usize::from(address.order)].get(address.number as usize).map_or(0, |record| record.homed)
    }

    /// Frees an address, which names nothing any more.
    pub fn release(&mut self, address: BlockAddress) {
        let record = &mut self.records[usize::from(address.order)][address.number as usize];
        debug_assert_eq!(record.homed, 0, "objects have {address:?} as their home");
        *record = AddressRecord::default();
        self.free[usize::from(address.order)].push(address.number);
    }

    /// Number of addresses in use, and of those that were ever in use.
    #[must_use]
    pub fn counts(&self) -> (usize, usize) {
        let all: usize = self.records.iter().map(Vec::len).sum();
        (all - self.free.iter().map(Vec::len).sum::<usize>(), all)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn runs_never_overlap_and_all_memory_comes_back(
            steps in prop::collection::vec((any::<bool>(), 0_u8..7, any::<prop::sample::Index>()), 0..200),
        ) {
            let mut frames = Frames::new(200);
            let mut held: Vec<FrameRun> = Vec::new();
            for (allocate, order, which) in steps {
                if allocate {
                    if let Some(run) = frames.allocate(order) {
                        prop_assert_eq!(run.first % (1 << order), 0, "aligned");
                        let end = |run: FrameRun| run.first + (1 << run.order);
                        prop_assert!(end(run) <= 200);
                        let is_apart =
                            |other: &FrameRun| end(*other) <= run.first || end(run) <= other.first;
                        prop_assert!(held.iter().all(is_apart));
                        held.push(run);
                    }
                } else if !held.is_empty() {
                    frames.release(held.swap_remove(which.index(held.len())));
                }
                prop_assert_eq!(frames.used(), held.iter().map(|run| 1 << run.order).sum::<u32>());
            }
            held.into_iter().for_each(|run| frames.release(run));
            prop_assert_eq!(frames.used(), 0);
            // 128 frames in one run again, wherever pieces of them were.
            prop_assert!(frames.allocate(7).is_some());
        }
    }

    #[test]
    fn an_address_names_up_to_two_blocks() {
        let mut addresses = Addresses::default();
        let ids: Vec<BlockId> = (0..4).map(BlockId).collect();
        let address = addresses.allocate(2, ids[0], 1).unwrap();
        assert_eq!(addresses.allocate(2, ids[0], 1), None, "at the limit");
        addresses.rename(address, ids[0], &[ids[1], ids[2]]);
        assert_eq!(addresses.named(address).collect::<Vec<_>>(), [ids[1], ids[2]]);
        addresses.rename(address, ids[1], &[ids[2]]);
        assert!(addresses.is_single(address), "both parts are in one block now");
        addresses.add_homed(address);
        assert!(addresses.remove_homed(address));
        addresses.release(address);
        assert_eq!(addresses.named(address).count(), 0);
        assert_eq!(addresses.allocate(2, ids[3], 1), Some(address), "addresses are used again");
        assert_eq!(addresses.counts(), (1, 1));
    }
}
