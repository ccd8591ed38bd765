//! Selection of the blocks to merge: mostly the emptiest first, each into the fullest that has room
//! (§3.1.4).

use std::collections::BTreeMap;

use crate::block::{Block, BlockId};

/// A move of an object during a merge.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SlotMove {
    /// The slot in the source.
    pub from: u32,
    /// The destination, 0 or 1 in [`Merge::into`].
    pub into: usize,
    /// The slot in the destination.
    pub to: u32,
}

/// A merge: all objects of one block move to one or two others.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Merge {
    /// The block that becomes empty.
    pub source: BlockId,
    /// The destinations.
    pub into: Vec<BlockId>,
    /// The moves, in the order of the slots in the source.
    pub moves: Vec<SlotMove>,
}

/// The blocks of one class that are being compacted.
#[derive(Debug)]
pub struct Packer {
    may_split: bool,
    slots: u32,
    blocks: BTreeMap<BlockId, Block>,
    /// The blocks with room, by their number of objects.
    by_live: BTreeMap<u32, Vec<BlockId>>,
}

impl Packer {
    /// Prepares to pack blocks of one class with `slots` slots each.
    ///
    /// `may_split`: whether a block that fits into no other is split over two.
    pub fn new(may_split: bool, slots: u32, blocks: impl IntoIterator<Item = (BlockId, Block)>) -> Self {
        let mut packer = Self { may_split, slots, blocks: BTreeMap::new(), by_live: BTreeMap::new() };
        for (id, block) in blocks {
            if block.free() > 0 {
                packer.by_live.entry(block.live()).or_default().push(id);
            }
            packer.blocks.insert(id, block);
        }
        packer
    }

    /// A block that is being packed.
    #[must_use]
    pub fn block(&self, id: BlockId) -> Option<&Block> {
        self.blocks.get(&id)
    }

    /// Plans the next merge. `None` if no block can be merged any more.
    ///
    /// `may_split`: whether a block may be split, as far as its addresses are concerned.
    pub fn next_merge(&mut self, may_split: impl Fn(&Block) -> bool) -> Option<Merge> {
        let (source, into) = self.select(may_split)?;
        self.forget(source);
        let moves = self.plan(source, &into);
        Some(Merge { source, into, moves })
    }

    /// Selects the source and the destinations of the next merge.
    ///
    /// A block is filled with the emptiest others while two of them fit, and at last with the one
    /// that fits best. So it becomes full although all blocks are about equally full.
    fn select(&mut self, may_split: impl Fn(&Block) -> bool) -> Option<(BlockId, Vec<BlockId>)> {
        loop {
            let emptiest = self.emptiest()?;
            let live = self.blocks[&emptiest].live();
            if self.may_split
                && may_split(&self.blocks[&emptiest])
                && let Some(into) = self.two_destinations(emptiest)
            {
                return Some((emptiest, into));
            }
            let Some(into) = self.fullest_with_room(live, emptiest) else {
                // This block is not merged. If no block may be split, that holds for all others.
                self.forget(emptiest);
                continue;
            };
            let room = self.blocks[&into].free();
            let fits_best = self.fullest_within(room, into).filter(|_| room < 2 * live);
            return Some((fits_best.unwrap_or(emptiest), vec![into]));
        }
    }

    /// Applies a merge that was carried out. Returns the source, which is empty.
    pub fn apply(&mut self, merge: &Merge) -> Option<Block> {
        let mut source = self.blocks.remove(&merge.source)?;
        for id in &merge.into {
            self.forget(*id);
        }
        for SlotMove { from, into, to } in &merge.moves {
            let record = source.remove(*from).expect("the plan moves objects of the source");
            self.blocks
                .get_mut(&merge.into[*into])
                .expect("the destination is being packed")
                .put(*to, record);
        }
        for id in &merge.into {
            let block = &self.blocks[id];
            if block.free() > 0 {
                self.by_live.entry(block.live()).or_default().push(*id);
            }
        }
        Some(source)
    }

    /// All blocks, when the packing has ended.
    #[must_use]
    pub fn into_blocks(self) -> BTreeMap<BlockId, Block> {
        self.blocks
    }

    /// Changes the blocks' addresses after a merge.
    pub(crate) fn block_mut(&mut self, id: BlockId) -> Option<&mut Block> {
        self.blocks.get_mut(&id)
    }

    fn emptiest(&self) -> Option<BlockId> {
        self.by_live.first_key_value()?.1.last().copied()
    }

    /// The fullest block, except `other`, that has room for `live` objects.
    fn fullest_with_room(&self, live: u32, other: BlockId) -> Option<BlockId> {
        self.fullest_within(self.slots - live, other)
    }

    /// The fullest block, except `other`, with at most `most` objects.
    fn fullest_within(&self, most: u32, other: BlockId) -> Option<BlockId> {
        let fitting = self.by_live.range(..=most).rev();
        fitting.flat_map(|(_, ids)| ids.iter().rev()).find(|id| **id != other).copied()
    }

    fn forget(&mut self, id: BlockId) {
        let live = self.blocks[&id].live();
        if let Some(ids) = self.by_live.get_mut(&live) {
            ids.retain(|other| *other != id);
            if ids.is_empty() {
                self.by_live.remove(&live);
            }
        }
    }

    /// The fullest two blocks that together have room for a source, each of which is filled as far
    /// as possible. `None` if one has room for all, or no two have.
    fn two_destinations(&self, source: BlockId) -> Option<Vec<BlockId>> {
        let live = self.blocks[&source].live();
        let others = self.by_live.values().flatten().filter(|id| **id != source);
        let room_max = self.blocks[others.clone().next()?].free();
        // With less room in the first, no second has room for the rest.
        let room_min = live.saturating_sub(room_max).max(1);
        let first = self.fullest_within(self.slots - room_min, source)?;
        let rest = live.checked_sub(self.blocks[&first].free()).filter(|rest| *rest > 0)?;
        let fitting = self.by_live.range(..=self.slots - rest).rev();
        let second = fitting.flat_map(|(_, ids)| ids.iter().rev());
        let second = second.copied().find(|id| *id != first && *id != source)?;
        Some(vec![first, second])
    }

    /// Plans the moves of a merge. Objects keep their slots where these are free (§3.1.2).
    fn plan(&self, source: BlockId, into: &[BlockId]) -> Vec<SlotMove> {
        let mut room: Vec<(u32, Vec<u64>)> =
            into.iter().map(|id| (self.blocks[id].free(), self.blocks[id].used().to_vec())).collect();
        let mut moves = Vec::with_capacity(self.blocks[&source].live() as usize);
        let mut conflicts = Vec::new();
        for (from, _) in self.blocks[&source].objects() {
            let is_free = |(free, used): &(u32, Vec<u64>)| {
                *free > 0 && used[from as usize / 64] >> (from % 64) & 1 == 0
            };
            match room.iter().position(is_free) {
                Some(into) => {
                    occupy(&mut room[into], from);
                    moves.push(SlotMove { from, into, to: from });
                }
                None => conflicts.push(from),
            }
        }
        for from in conflicts {
            let into = room.iter().position(|(free, _)| *free > 0).expect("there is room for all");
            let (_, used) = &room[into];
            let words = (0_u32..).zip(used);
            let to = words.map(|(at, word)| (at * 64, word.trailing_ones())).find(|(_, bit)| *bit < 64);
            let to = to.map(|(from, bit)| from + bit).expect("a slot is free");
            occupy(&mut room[into], to);
            moves.push(SlotMove { from, into, to });
        }
        moves.sort_by_key(|slot_move| slot_move.from);
        moves
    }
}

fn occupy((free, used): &mut (u32, Vec<u64>), slot: u32) {
    *free -= 1;
    used[slot as usize / 64] |= 1 << (slot % 64);
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;
    use crate::block::ObjectRecord;
    use crate::class::ClassId;
    use crate::pointer::BlockAddress;

    const SLOTS: u32 = 70;

    /// A block with objects in the given slots.
    fn block(number: u32, slots: impl IntoIterator<Item = u32>) -> (BlockId, Block) {
        let home = BlockAddress { order: 0, number };
        let mut block = Block::new(home, ClassId(0), SLOTS);
        for slot in slots {
            block.put(slot, ObjectRecord { id: u64::from(number * SLOTS + slot + 1), home });
        }
        (BlockId(number), block)
    }

    fn pack(may_split: bool, blocks: Vec<(BlockId, Block)>) -> (Vec<Merge>, BTreeMap<BlockId, Block>) {
        let mut packer = Packer::new(may_split, SLOTS, blocks);
        let mut merges = Vec::new();
        while let Some(merge) = packer.next_merge(|_| true) {
            assert_eq!(packer.apply(&merge).expect("the source").live(), 0);
            merges.push(merge);
        }
        (merges, packer.into_blocks())
    }

    proptest! {
        #[test]
        fn no_object_is_lost_and_ids_stay_unique(
            may_split in any::<bool>(),
            filled in prop::collection::vec(prop::collection::btree_set(0..SLOTS, 0..70), 1..12),
        ) {
            let numbered = (0..).zip(filled);
            let blocks: Vec<_> = numbered.map(|(number, slots)| block(number, slots)).collect();
            let all = |blocks: &mut dyn Iterator<Item = &Block>| {
                let objects = blocks.flat_map(Block::objects);
                let mut all: Vec<_> = objects.map(|(_, record)| (record.id, record.home)).collect();
                all.sort_unstable();
                all
            };
            let before = all(&mut blocks.iter().map(|(_, block)| block));
            let live: u32 = blocks.iter().map(|(_, block)| block.live()).sum();
            let count = blocks.len();
            let (merges, after) = pack(may_split, blocks);
            prop_assert_eq!(all(&mut after.values()), before);
            prop_assert_eq!(after.len() + merges.len(), count, "each merge frees a block");
            for block in after.values() {
                let ids: BTreeSet<u64> = block.objects().map(|(_, record)| record.id).collect();
                prop_assert_eq!(ids.len(), block.live() as usize);
            }
            let mut lives: Vec<u32> = after.values().map(Block::live).collect();
            lives.sort_unstable();
            let fits = lives.len() >= 2 && lives[0] + lives[1] <= SLOTS;
            prop_assert!(!fits, "two blocks could be merged: {:?}", lives);
            let room: u32 = lives.iter().skip(1).take(2).map(|live| SLOTS - live).sum();
            let splits = may_split && lives.len() >= 3 && lives[0] <= room;
            prop_assert!(!splits, "one could be split over two others: {:?}", lives);
            prop_assert!(after.len() >= (live as usize).div_ceil(SLOTS as usize));
        }
    }

    #[test]
    fn objects_keep_their_slots_where_they_can() {
        let blocks = vec![block(0, [3, 5, 9]), block(1, [0, 5, 6, 7])];
        let (merges, _) = pack(false, blocks);
        let to: Vec<(u32, u32)> = merges[0].moves.iter().map(|slot| (slot.from, slot.to)).collect();
        assert_eq!(to, [(3, 3), (5, 1), (9, 9)], "slot 5 is in use, 1 is the lowest that is free");
    }

    #[test]
    fn the_emptiest_goes_into_the_fullest_that_has_room() {
        let blocks = vec![block(0, 0..60), block(1, 0..20), block(2, 0..45), block(3, 0..8)];
        let (merges, _) = pack(false, blocks);
        let pairs: Vec<(u32, u32)> = merges.iter().map(|merge| (merge.source.0, merge.into[0].0)).collect();
        assert_eq!(pairs, [(3, 0), (1, 2)]);
    }
}
