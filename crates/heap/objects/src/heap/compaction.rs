//! Compaction: selects the blocks of a step, and carries out merges (§3.1).

use super::{Heap, Mover};
use crate::block::{Block, BlockId};
use crate::class::{Class, ClassId};
use crate::mutation::Mutation;
use crate::packing::{Merge, Packer};
use crate::space::FrameRun;

/// Emptiest blocks of each worker that are considered for each merge of a step, to bound its time.
/// If none of them can be merged, the step considers all blocks.
const BLOCKS_PER_MERGE: usize = 8;

impl Heap {
    /// Compacts a class by at most `merges_max` merges. Returns the number of merges.
    ///
    /// A leader collects the blocks of all workers, merges, and returns them (§3.1.4).
    pub fn compact(&mut self, class: ClassId, merges_max: u64, mover: &mut impl Mover) -> u64 {
        let few = usize::try_from(merges_max).map_or(usize::MAX, |max| max.saturating_mul(BLOCKS_PER_MERGE));
        match self.compact_among(class, merges_max, few, mover) {
            // Blocks that fit into none of the emptiest may fit into a fuller one.
            (0, false) => self.compact_among(class, merges_max, usize::MAX, mover).0,
            (merges, _) => merges,
        }
    }

    /// Compacts the emptiest blocks of a class, at most `blocks_max` of each worker. Returns the
    /// number of merges, and whether all blocks with free slots were considered.
    fn compact_among(
        &mut self,
        class: ClassId,
        merges_max: u64,
        blocks_max: usize,
        mover: &mut impl Mover,
    ) -> (u64, bool) {
        let Some(shape) = self.settings.classes.get(class) else { return (0, true) };
        let (mut collected, mut are_all) = (Vec::new(), true);
        for local in &mut self.workers {
            let (blocks, are_of_worker) = local.collect(class, blocks_max);
            collected.extend(blocks);
            are_all &= are_of_worker;
        }
        let mut packer = Packer::new(self.settings.may_split, shape.slots(), collected);
        let mut merges = 0;
        while merges < merges_max {
            let addresses = &self.addresses;
            let is_single = |block: &Block| block.names().iter().all(|name| addresses.is_single(*name));
            let Some(merge) = packer.next_merge(is_single) else { break };
            self.merge(&mut packer, &merge, shape, mover);
            merges += 1;
        }
        for (id, block) in packer.into_blocks() {
            let worker = self.places[id.0 as usize].expect("the block is in use").worker;
            self.workers[usize::from(worker)].add(id, block);
        }
        (merges, are_all)
    }

    /// Carries out a merge: locks the source, copies its objects, makes its addresses name the
    /// destinations, and frees its memory.
    fn merge(&mut self, packer: &mut Packer, merge: &Merge, shape: Class, mover: &mut impl Mover) {
        let frames = |id: BlockId| self.places[id.0 as usize].expect("the block is in use").frames;
        let source = frames(merge.source);
        let block = packer.block(merge.source).expect("the source is being packed");
        let objects: Vec<(u32, u64)> = block.objects().map(|(slot, record)| (slot, record.id)).collect();
        let home_of = |slot: u32| block.record(slot).expect("the merge moves objects of the source").home;
        let into: Vec<FrameRun> = merge.into.iter().map(|id| frames(*id)).collect();
        let owns = |at: usize| packer.block(merge.into[at]).expect("the block is being packed").address();
        mover.begin_merge(source, &into);
        if !Mutation::MoveUnlocked.is_active() {
            mover.lock(source, &objects, shape);
        }
        if Mutation::FreeEarly.is_active() {
            mover.free(source);
        }
        for slot_move in &merge.moves {
            let home = home_of(slot_move.from);
            let home = (home != owns(slot_move.into)).then_some(home.number);
            mover.copy((source, slot_move.from), (into[slot_move.into], slot_move.to), shape, home);
        }
        let emptied = packer.apply(merge).expect("the source is being packed");
        for name in emptied.names() {
            let is_needed = self.addresses.homed(*name) > 0 || self.addresses.released_in(*name) > 0;
            if !is_needed || Mutation::ReuseAddress.is_active() {
                self.addresses.rename(*name, merge.source, &[]);
                mover.map_address(*name, [None; 2]);
                self.addresses.release(*name);
                continue;
            }
            self.addresses.rename(*name, merge.source, &merge.into);
            mover.map_address(*name, self.frames_of(*name));
            for id in &merge.into {
                packer.block_mut(*id).expect("the block is being packed").add_name(*name);
            }
        }
        self.free_block(merge.source, emptied.class(), shape, mover);
        mover.end_merge();
    }
}
