//! The blocks of one worker: the thread-local allocator (§2.1).
//!
//! Each block belongs to one worker. In the paper workers allocate and free without a lock, and the
//! leader of a compaction has the blocks (§3.1.4). The service has one worker for each heap, which
//! threads use under the lock of the heap (decision 21).

use std::collections::{HashMap, HashSet};

use crate::block::{Block, BlockId, ObjectRecord};
use crate::class::ClassId;
use crate::pointer::BlockAddress;

/// The blocks of one worker.
#[derive(Debug, Default)]
pub struct LocalHeap {
    blocks: HashMap<BlockId, Block>,
    /// Blocks with free slots, of each class; the last one is being filled. May contain blocks that
    /// are full or gone.
    open: HashMap<ClassId, Vec<BlockId>>,
}

/// The place of an object that was just allocated.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Placement {
    /// The block.
    pub block: BlockId,
    /// The slot.
    pub slot: u32,
    /// The object.
    pub record: ObjectRecord,
}

impl LocalHeap {
    /// Allocates an object in a block that has room; `None` if this worker needs another block.
    ///
    /// `draw` returns the next number of the heap.
    pub fn allocate(&mut self, class: ClassId, draw: &mut impl FnMut() -> u64) -> Option<Placement> {
        let open = self.open.get_mut(&class)?;
        while let Some(id) = open.last().copied() {
            // The block id may have been reused meanwhile.
            let block = self.blocks.get_mut(&id).filter(|block| block.free() > 0 && block.class() == class);
            if let Some(block) = block {
                let slot = block.free_slot()?;
                let record = ObjectRecord { id: draw(), home: block.address() };
                block.put(slot, record);
                return Some(Placement { block: id, slot, record });
            }
            open.pop();
        }
        None
    }

    /// Adds a block.
    pub fn add(&mut self, id: BlockId, block: Block) {
        if block.free() > 0 {
            self.open.entry(block.class()).or_default().push(id);
        }
        self.blocks.insert(id, block);
    }

    /// A block of this worker.
    #[must_use]
    pub fn block(&self, id: BlockId) -> Option<&Block> {
        self.blocks.get(&id)
    }

    /// All blocks of this worker.
    pub fn blocks(&self) -> impl Iterator<Item = (BlockId, &Block)> {
        self.blocks.iter().map(|(id, block)| (*id, block))
    }

    /// Frees a slot. Returns the object that was there.
    pub fn free(&mut self, id: BlockId, slot: u32) -> Option<ObjectRecord> {
        let block = self.blocks.get_mut(&id)?;
        let was_full = block.free() == 0;
        let record = block.remove(slot)?;
        if was_full {
            // Keeps the block that is being filled last.
            let open = self.open.entry(block.class()).or_default();
            open.insert(open.len().saturating_sub(1), id);
        }
        Some(record)
    }

    /// Removes a block.
    pub fn remove(&mut self, id: BlockId) -> Option<Block> {
        self.blocks.remove(&id)
    }

    /// Changes the home of an object; returns the old one.
    pub fn rehome(&mut self, id: BlockId, slot: u32, home: BlockAddress) -> Option<BlockAddress> {
        self.blocks.get_mut(&id)?.rehome(slot, home)
    }

    /// Removes the blocks of a class that a compaction can use: those that have free slots, but at
    /// most `max` of them, the emptiest. Also returns whether these were all.
    pub fn collect(&mut self, class: ClassId, max: usize) -> (Vec<(BlockId, Block)>, bool) {
        let usable = self.blocks.iter().filter(|(_, block)| block.class() == class && block.free() > 0);
        // Sorted by id as well, so that a compaction does not depend on the order in the table.
        let mut ids: Vec<(u32, BlockId)> = usable.map(|(id, block)| (block.live(), *id)).collect();
        let are_all = ids.len() <= max;
        if !are_all {
            ids.select_nth_unstable(max);
            ids.truncate(max);
        }
        let collected: HashSet<BlockId> = ids.iter().map(|(_, id)| *id).collect();
        if let Some(open) = self.open.get_mut(&class) {
            open.retain(|id| !collected.contains(id));
        }
        let blocks = ids.into_iter().filter_map(|(_, id)| Some((id, self.blocks.remove(&id)?)));
        (blocks.collect(), are_all)
    }

    pub(crate) fn block_mut(&mut self, id: BlockId) -> Option<&mut Block> {
        self.blocks.get_mut(&id)
    }
}
