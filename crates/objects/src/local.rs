//! The blocks of one worker: the thread-local allocator (§2.1).
//!
//! Each block belongs to one worker, so workers allocate and free without a lock. During a
//! compaction its leader has the blocks (§3.1.4).

use std::collections::{HashMap, HashSet};

use crate::block::{Block, BlockId, ObjectRecord};
use crate::class::ClassId;
use crate::id::IdMode;
use crate::pointer::BlockAddress;

/// The most random ids that are tried for an object.
const DRAWS_MAX: u32 = 64;

/// The blocks of one worker.
#[derive(Debug, Default)]
pub struct LocalHeap {
    blocks: HashMap<BlockId, Block>,
    /// Blocks with free slots, of each class; the last one is being filled. May contain blocks that
    /// are full or gone.
    open: HashMap<ClassId, Vec<BlockId>>,
    /// The random ids in the block of each class that is being filled.
    drawn: HashMap<ClassId, Option<DrawnIds>>,
}

/// An object that was just allocated.
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
    /// `draw` returns a random number, or the next number of the heap.
    pub fn allocate(
        &mut self,
        class: ClassId,
        mode: IdMode,
        draw: &mut impl FnMut() -> u64,
    ) -> Option<Placement> {
        let open = self.open.get_mut(&class)?;
        while let Some(id) = open.last().copied() {
            // The number may be that of another block by now.
            let block = self.blocks.get_mut(&id).filter(|block| block.free() > 0 && block.class() == class);
            if let Some(block) = block {
                let slot = block.free_slot()?;
                let drawn = self.drawn.entry(class).or_default();
                let object = new_id((id, block, slot), mode, drawn, draw);
                let record = ObjectRecord { id: object, home: block.address() };
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
            // Below the block that is being filled.
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
    /// most `max` of them, the emptiest. Returns whether these were all.
    pub fn collect(&mut self, class: ClassId, max: usize) -> (Vec<(BlockId, Block)>, bool) {
        self.drawn.remove(&class);
        let usable = self.blocks.iter().filter(|(_, block)| block.class() == class && block.free() > 0);
        // By their numbers as well: a compaction does not depend on the order in the table.
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

/// The ids that were drawn for a block: those of its objects, and perhaps some that are free again.
#[derive(Debug)]
struct DrawnIds {
    block: BlockId,
    bits: Vec<u64>,
}

impl DrawnIds {
    fn of(id: BlockId, block: &Block, ids: u64) -> Self {
        let words = usize::try_from(ids.div_ceil(64)).expect("at most 2^32 ids");
        let mut drawn = Self { block: id, bits: vec![0; words] };
        for (_, record) in block.objects() {
            drawn.insert(record.id);
        }
        drawn
    }

    /// Adds an id. Returns whether it is new.
    fn insert(&mut self, id: u64) -> bool {
        let word = &mut self.bits[usize::try_from(id / 64).expect("ids of these modes are small")];
        let bit = 1 << (id % 64);
        std::mem::replace(word, *word | bit) & bit == 0
    }

    /// Draws an id that is new: a random one, or the next one that is free if most are in use.
    fn draw(&mut self, ids: u64, draw: &mut impl FnMut() -> u64) -> Option<u64> {
        let random = (0..DRAWS_MAX).map(|_| draw() % ids).find(|id| self.insert(*id));
        random.or_else(|| {
            let first = draw() % ids;
            (first..ids).chain(0..first).find(|id| self.insert(*id))
        })
    }
}

/// An id for a new object in a slot of a block.
fn new_id(
    (block_id, block, slot): (BlockId, &Block, u32),
    mode: IdMode,
    drawn: &mut Option<DrawnIds>,
    draw: &mut impl FnMut() -> u64,
) -> u64 {
    let IdMode::Random { bits } = mode else {
        return if mode == IdMode::Offsets { u64::from(slot) } else { draw() };
    };
    let ids = 1 << bits;
    if !mode.can_compact(block.slots()) {
        // The class is not compacted, so its ids need not be unique.
        return draw() % ids;
    }
    if let Some(drawn) = drawn.as_mut().filter(|drawn| drawn.block == block_id)
        && let Some(id) = drawn.draw(ids, draw)
    {
        return id;
    }
    let drawn = drawn.insert(DrawnIds::of(block_id, block, ids));
    drawn.draw(ids, draw).expect("a block has no more slots than there are ids")
}
