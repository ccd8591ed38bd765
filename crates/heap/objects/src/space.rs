//! The addresses of blocks and the frames of a heap's memory.
//!
//! An address of a block names one or two blocks. It is reused when no object has it as its home
//! any more (§3.3), and only by blocks of its class. So old pointers always point at headers, and
//! never at bytes of an object that could be mistaken for one.

use std::collections::{BTreeSet, HashMap};

use crate::block::BlockId;
use crate::class::{BLOCK_ORDERS, ClassId};
use crate::mutation::Mutation;
use crate::pointer::BlockAddress;

/// A run of frames of the heap's memory.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
pub struct FrameRun {
    /// The first frame.
    pub first: u32,
    /// Number of frames.
    pub count: u32,
}

impl FrameRun {
    /// The first frame behind the run.
    #[must_use]
    pub fn end(self) -> u32 {
        self.first + self.count
    }
}

/// Sizes of free runs: 4 KiB to 128 MiB.
const RUN_ORDERS: usize = BLOCK_ORDERS;

/// Allocates runs of frames, by the buddy system. A run whose length is no power of two leaves the
/// rest of that power of two free.
#[derive(Clone, Debug)]
pub struct Frames {
    /// The free runs of each size.
    free: [BTreeSet<u32>; RUN_ORDERS],
    used: u32,
}

impl Frames {
    /// Creates an allocator of `max` frames, all free.
    #[must_use]
    pub fn new(max: u32) -> Self {
        Self::with_used(max, [])
    }

    /// Creates an allocator of `max` frames. The runs `used` are in use, in ascending order.
    #[must_use]
    pub fn with_used(max: u32, used: impl IntoIterator<Item = FrameRun>) -> Self {
        let mut frames = Self { free: Default::default(), used: 0 };
        let mut first = 0;
        for run in used {
            frames.add_free(first, run.first);
            first = run.end();
            frames.used += run.count;
        }
        frames.add_free(first, max);
        frames
    }

    /// Adds free frames, as few runs as possible.
    fn add_free(&mut self, mut first: u32, end: u32) {
        while first < end {
            let fits = |order: &usize| first.is_multiple_of(1 << order) && end - first >= 1 << order;
            let order = (0..RUN_ORDERS).rev().find(fits).expect("a single frame fits");
            self.add_run(first, order);
            first += 1 << order;
        }
    }

    /// Adds a free run, and joins it with its buddies.
    fn add_run(&mut self, mut first: u32, mut order: usize) {
        while order + 1 < RUN_ORDERS && self.free[order].remove(&(first ^ (1 << order))) {
            first &= !(1 << order);
            order += 1;
        }
        let is_new = self.free[order].insert(first);
        assert!(is_new, "frame {first} is freed twice");
    }

    /// Number of frames in use.
    #[must_use]
    pub fn used(&self) -> u32 {
        self.used
    }

    /// The free runs.
    pub fn free_runs(&self) -> impl Iterator<Item = FrameRun> + '_ {
        let of_order = |(order, runs): (u32, &'_ BTreeSet<u32>)| {
            runs.iter().map(move |first| FrameRun { first: *first, count: 1 << order }).collect::<Vec<_>>()
        };
        (0..).zip(&self.free).flat_map(of_order)
    }

    /// Allocates a run of `count` frames, at least 1; `None` if there is none.
    pub fn allocate(&mut self, count: u32) -> Option<FrameRun> {
        let order = count.next_power_of_two().trailing_zeros() as usize;
        let larger = (order..RUN_ORDERS).find(|order| !self.free[*order].is_empty());
        let run = match larger {
            Some(larger) => {
                let first = self.free[larger].pop_first()?;
                self.add_free(first + count, first + (1 << larger));
                FrameRun { first, count }
            }
            None => self.allocate_over_runs(count)?,
        };
        self.used += count;
        Some(run)
    }

    /// Allocates the lowest `count` consecutive free frames, which may lie in several runs.
    fn allocate_over_runs(&mut self, count: u32) -> Option<FrameRun> {
        let mut runs: Vec<FrameRun> = self.free_runs().collect();
        runs.sort_unstable();
        let mut span = FrameRun { first: 0, count: 0 };
        for run in runs {
            span = if run.first == span.end() {
                FrameRun { count: span.count + run.count, ..span }
            } else {
                run
            };
            if span.count >= count {
                self.remove_free(span);
                self.add_free(span.first + count, span.end());
                return Some(FrameRun { first: span.first, count });
            }
        }
        None
    }

    fn remove_free(&mut self, span: FrameRun) {
        for runs in &mut self.free {
            runs.retain(|first| !(span.first..span.end()).contains(first));
        }
    }

    /// Frees a run.
    pub fn release(&mut self, run: FrameRun) {
        self.used -= run.count;
        self.add_free(run.first, run.end());
    }
}

/// Addresses of blocks for each that the heap's memory has room for: each class has its own, and
/// merges leave some behind.
const ADDRESSES_PER_BLOCK: u64 = 16;

/// The most addresses of blocks of a size in a heap of `frames_max` frames.
#[must_use]
pub fn addresses_max(frames_max: u32, order: u8) -> u64 {
    let addresses = u64::from(frames_max) * ADDRESSES_PER_BLOCK;
    (addresses >> order).max(ADDRESSES_PER_BLOCK)
}

/// The record of an address: the blocks that it names, and the objects that need it.
#[derive(Clone, Copy, Debug)]
struct AddressRecord {
    /// The blocks: none if the address is not in use. Two after the objects of a block were split.
    named: [Option<BlockId>; 2],
    /// Objects that have the address as their home.
    homed: u32,
    /// The round in which the last of them was released; 0 if it was not.
    released_in: u64,
    /// The class of the blocks that it names, and of those that it will name.
    class: ClassId,
}

/// The class whose free addresses a class uses.
fn free_list(class: ClassId) -> ClassId {
    if Mutation::MixClasses.is_active() { ClassId(0) } else { class }
}

/// The addresses of a heap's blocks.
#[derive(Clone, Debug, Default)]
pub struct Addresses {
    records: [Vec<AddressRecord>; BLOCK_ORDERS],
    /// The numbers that are free again, by class.
    free: HashMap<ClassId, Vec<u32>>,
}

impl Addresses {
    /// An address for a new block; `None` if `max` addresses are in use.
    pub fn allocate(&mut self, class: ClassId, order: u8, block: BlockId, max: u64) -> Option<BlockAddress> {
        let records = &mut self.records[usize::from(order)];
        let number = match self.free.get_mut(&free_list(class)).and_then(Vec::pop) {
            Some(number) => number,
            None if (records.len() as u64) < max => {
                records.push(AddressRecord { named: [None; 2], homed: 0, released_in: 0, class });
                u32::try_from(records.len() - 1).ok()?
            }
            None => return None,
        };
        records[number as usize] =
            AddressRecord { named: [Some(block), None], homed: 0, released_in: 0, class };
        Some(BlockAddress { order, number })
    }

    /// The blocks that an address names; none if it is not in use.
    pub fn named(&self, address: BlockAddress) -> impl Iterator<Item = BlockId> + use<> {
        let record = self.records[usize::from(address.order)].get(address.number as usize);
        record.map_or([None; 2], |record| record.named).into_iter().flatten()
    }

    /// Whether an address names one block only.
    #[must_use]
    pub fn is_single(&self, address: BlockAddress) -> bool {
        self.named(address).count() == 1
    }

    /// Replaces `last` by `next` among the blocks that an address names. Two blocks in `next` need
    /// an address that names `last` only.
    ///
    /// # Panics
    /// If the address would name three blocks.
    pub fn rename(&mut self, address: BlockAddress, last: BlockId, next: &[BlockId]) {
        let record = &mut self.records[usize::from(address.order)][address.number as usize];
        // `next` takes the place of `last`, so that the order of the blocks stays.
        let mut named: Vec<BlockId> = Vec::with_capacity(3);
        let replaced = record.named.into_iter().flatten();
        for id in replaced.flat_map(|id| if id == last { next.to_vec() } else { vec![id] }) {
            if !named.contains(&id) {
                named.push(id);
            }
        }
        assert!(named.len() <= 2, "an address names at most two blocks");
        record.named = [named.first().copied(), named.get(1).copied()];
    }

    /// Records the round in which the last object was released from an address.
    pub fn set_released(&mut self, address: BlockAddress, round: u64) {
        self.records[usize::from(address.order)][address.number as usize].released_in = round;
    }

    /// The round in which the last object was released from an address; 0 if it was not.
    #[must_use]
    pub fn released_in(&self, address: BlockAddress) -> u64 {
        let record = self.records[usize::from(address.order)].get(address.number as usize);
        record.map_or(0, |record| record.released_in)
    }

    /// Adds the next address of a size that was in use before. If it names no block, it is free.
    pub fn restore(&mut self, order: u8, class: ClassId, named: [Option<BlockId>; 2]) {
        let records = &mut self.records[usize::from(order)];
        if named == [None; 2] {
            let number = u32::try_from(records.len()).expect("fewer than 2^32 addresses");
            self.free.entry(free_list(class)).or_default().push(number);
        }
        records.push(AddressRecord { named, homed: 0, released_in: 0, class });
    }

    /// Counts an object that has an address as its home.
    pub fn add_homed(&mut self, address: BlockAddress) {
        self.records[usize::from(address.order)][address.number as usize].homed += 1;
    }

    /// Uncounts an object. Returns true if no object has the address as its home any more.
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

    /// Frees an address. Must be called when no object has it as its home.
    pub fn release(&mut self, address: BlockAddress) {
        let record = &mut self.records[usize::from(address.order)][address.number as usize];
        debug_assert_eq!(record.homed, 0, "objects have {address:?} as their home");
        let class = record.class;
        *record = AddressRecord { named: [None; 2], homed: 0, released_in: 0, class };
        self.free.entry(free_list(class)).or_default().push(address.number);
    }

    /// Number of addresses in use, and of those that were ever in use.
    #[must_use]
    pub fn counts(&self) -> (usize, usize) {
        let all: usize = self.records.iter().map(Vec::len).sum();
        (all - self.free.values().map(Vec::len).sum::<usize>(), all)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn runs_never_overlap_and_all_memory_is_freed(
            steps in prop::collection::vec((any::<bool>(), 1_u32..70, any::<prop::sample::Index>()), 0..200),
        ) {
            let mut frames = Frames::new(200);
            let mut held: Vec<FrameRun> = Vec::new();
            for (allocate, count, which) in steps {
                if allocate {
                    let is_free = |frame: &u32| {
                        !held.iter().any(|run| (run.first..run.end()).contains(frame))
                    };
                    let spans: Vec<bool> = (0..200).map(|frame| is_free(&frame)).collect();
                    let mut longest = spans.split(|is_free| !is_free).map(<[bool]>::len);
                    let fits = longest.any(|len| len >= count as usize);
                    let run = frames.allocate(count);
                    prop_assert_eq!(run.is_some(), fits);
                    if let Some(run) = run {
                        prop_assert!(run.count == count && run.end() <= 200);
                        prop_assert!((run.first..run.end()).all(|frame| spans[frame as usize]));
                        held.push(run);
                    }
                } else if !held.is_empty() {
                    frames.release(held.swap_remove(which.index(held.len())));
                }
                prop_assert_eq!(frames.used(), held.iter().map(|run| run.count).sum::<u32>());
            }
            held.into_iter().for_each(|run| frames.release(run));
            prop_assert_eq!(frames.used(), 0);
            // 128 frames in one run again, wherever pieces of them were.
            prop_assert!(frames.allocate(128).is_some());
            prop_assert_eq!(frames.free_runs().count(), 2);
        }
    }

    #[test]
    fn an_address_names_up_to_two_blocks() {
        let mut addresses = Addresses::default();
        let ids: Vec<BlockId> = (0..4).map(BlockId).collect();
        let address = addresses.allocate(ClassId(7), 2, ids[0], 1).unwrap();
        assert_eq!(addresses.allocate(ClassId(7), 2, ids[0], 1), None, "at the limit");
        addresses.rename(address, ids[0], &[ids[1], ids[2]]);
        assert_eq!(addresses.named(address).collect::<Vec<_>>(), [ids[1], ids[2]]);
        addresses.rename(address, ids[1], &[ids[2]]);
        assert!(addresses.is_single(address), "both parts are in one block now");
        addresses.add_homed(address);
        assert!(addresses.remove_homed(address));
        addresses.release(address);
        assert_eq!(addresses.named(address).count(), 0);
        assert_eq!(addresses.allocate(ClassId(8), 2, ids[3], 1), None, "the address is of another class");
        let again = addresses.allocate(ClassId(7), 2, ids[3], 1);
        assert_eq!(again, Some(address), "addresses are used again");
        assert_eq!(addresses.counts(), (1, 1));
    }
}
