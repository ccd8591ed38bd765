//! Merges of blocks whose ids may clash: the emptiest block first, each into the fullest block that
//! has room and none of its ids.

use std::collections::BTreeMap;

use aquifer_objects::block::{Block, BlockId};

use super::id_mode::{IdMode, IdSet, can_merge};

/// The most blocks whose ids are compared with those of one source.
const CANDIDATES_MAX: usize = 256;

/// The blocks of one class that are being compacted.
#[derive(Debug)]
pub struct ConflictPacker {
    mode: IdMode,
    slots: u32,
    blocks: BTreeMap<BlockId, Block>,
    /// The blocks with room, by their number of objects.
    by_live: BTreeMap<u32, Vec<BlockId>>,
    ids: IdSet,
}

impl ConflictPacker {
    /// Prepares to pack blocks of one class with `slots` slots each.
    pub fn new(mode: IdMode, slots: u32, blocks: impl IntoIterator<Item = (BlockId, Block)>) -> Self {
        let mut packer =
            Self { mode, slots, blocks: BTreeMap::new(), by_live: BTreeMap::new(), ids: IdSet::default() };
        for (id, block) in blocks {
            if mode.can_compact(slots) && block.free() > 0 {
                packer.by_live.entry(block.live()).or_default().push(id);
            }
            packer.blocks.insert(id, block);
        }
        packer
    }

    /// Carries out the next merge. Returns the emptied block; `None` if no block can be merged any
    /// more.
    pub fn merge(&mut self) -> Option<BlockId> {
        loop {
            let source = self.emptiest()?;
            let into = self.destination(source);
            self.forget(source);
            // Without a destination the block stays as it is.
            let Some(into) = into else { continue };
            self.forget(into);
            let emptied = self.blocks.remove(&source)?;
            let destination = self.blocks.get_mut(&into).expect("it is being packed");
            move_objects(&emptied, destination);
            if destination.free() > 0 {
                self.by_live.entry(destination.live()).or_default().push(into);
            }
            return Some(source);
        }
    }

    /// All blocks, when the packing has ended.
    pub fn into_blocks(self) -> BTreeMap<BlockId, Block> {
        self.blocks
    }

    fn emptiest(&self) -> Option<BlockId> {
        self.by_live.first_key_value()?.1.last().copied()
    }

    /// The fullest block that can take all objects of a source.
    fn destination(&mut self, source: BlockId) -> Option<BlockId> {
        let block = &self.blocks[&source];
        self.ids.fill(block, self.mode);
        let fitting = self.by_live.range(..=self.slots - block.live()).rev();
        let others = fitting.flat_map(|(_, ids)| ids.iter().rev()).filter(|id| **id != source);
        others
            .take(CANDIDATES_MAX)
            .find(|id| can_merge(self.mode, block, &self.ids, &self.blocks[id]))
            .copied()
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
}

/// Objects keep their slots where these are free (§3.1.2).
fn move_objects(source: &Block, destination: &mut Block) {
    let keeps_slot = |(slot, _): &(u32, _)| destination.record(*slot).is_none();
    let (kept, moved): (Vec<_>, Vec<_>) = source.objects().partition(keeps_slot);
    for (slot, record) in kept {
        destination.put(slot, record);
    }
    for (_, record) in moved {
        let slot = destination.free_slot().expect("there is room for all");
        destination.put(slot, record);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use aquifer_objects::block::ObjectRecord;
    use aquifer_objects::class::ClassId;
    use aquifer_objects::pointer::BlockAddress;
    use proptest::prelude::*;

    use super::*;

    const SLOTS: u32 = 70;

    /// A block with objects in the given slots.
    fn block(number: u32, slots: impl IntoIterator<Item = u32>, mode: IdMode) -> (BlockId, Block) {
        let home = BlockAddress { order: 0, number };
        let mut block = Block::new(home, ClassId(0), SLOTS);
        for slot in slots {
            let id = match mode {
                IdMode::Offsets => u64::from(slot),
                IdMode::Random { bits } => u64::from(slot * 37 + number * 11) % (1 << bits),
                IdMode::Numbers => u64::from(number * SLOTS + slot + 1),
            };
            if block.objects().all(|(_, record)| record.id != id) {
                block.put(slot, ObjectRecord { id, home });
            }
        }
        (BlockId(number), block)
    }

    proptest! {
        #[test]
        fn no_object_is_lost_and_ids_stay_unique(
            mode in prop::sample::select(vec![
                IdMode::Offsets, IdMode::Random { bits: 7 }, IdMode::Random { bits: 6 }, IdMode::Numbers,
            ]),
            filled in prop::collection::vec(prop::collection::btree_set(0..SLOTS, 0..70), 1..12),
        ) {
            let numbered = (0..).zip(filled);
            let blocks: Vec<_> = numbered.map(|(number, slots)| block(number, slots, mode)).collect();
            let all = |blocks: &mut dyn Iterator<Item = &Block>| {
                let objects = blocks.flat_map(Block::objects);
                let mut all: Vec<_> = objects.map(|(_, record)| (record.id, record.home)).collect();
                all.sort_unstable();
                all
            };
            let before = all(&mut blocks.iter().map(|(_, block)| block));
            let count = blocks.len();
            let mut packer = ConflictPacker::new(mode, SLOTS, blocks);
            let merges = std::iter::from_fn(|| packer.merge()).count();
            let after = packer.into_blocks();
            prop_assert_eq!(all(&mut after.values()), before);
            prop_assert_eq!(after.len() + merges, count, "each merge frees a block");
            for block in after.values() {
                let ids: BTreeSet<u64> = block.objects().map(|(_, record)| record.id).collect();
                prop_assert_eq!(ids.len(), block.live() as usize);
                if mode == IdMode::Offsets {
                    prop_assert!(block.objects().all(|(slot, record)| u64::from(slot) == record.id));
                }
            }
            if !mode.can_compact(SLOTS) {
                prop_assert_eq!(merges, 0, "64 ids are too few for 70 slots");
            }
        }
    }
}
