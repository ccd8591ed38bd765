//! A heap without bytes, whose objects have ids by a mode: the product's heap places the objects,
//! and their ids decide which blocks can be merged.

use std::collections::{BTreeMap, HashMap};

use aquifer_objects::block::{Block, BlockId, ObjectRecord};
use aquifer_objects::class::{BLOCK_ORDER_MAX, Class, ClassId, Classes};
use aquifer_objects::heap::{Heap, HeapSettings, HeapUsage, Mover, Replacement};
use aquifer_objects::pointer::BlockAddress;
use aquifer_objects::space::FrameRun;

use super::conflict_packer::ConflictPacker;
use super::drawn_ids::{DrawnIds, new_id};
use super::id_mode::IdMode;

/// An object of such a heap.
#[derive(Clone, Copy, Debug)]
pub struct ModelledObject {
    address: u64,
    number: u64,
}

/// A heap with blocks of 1 MiB.
#[derive(Debug)]
pub struct ModelledHeap {
    heap: Heap,
    mode: IdMode,
    /// The number of the next object in the product's heap.
    next: u64,
    /// The blocks of each worker, with the ids of the mode; none if it is [`IdMode::Numbers`].
    blocks: BTreeMap<(u16, BlockId), Block>,
    /// The random ids in the block of each worker and class that is being filled.
    drawn: HashMap<(u16, ClassId), Option<DrawnIds>>,
    /// The merges of each class, other than those of the product's heap.
    merges: HashMap<ClassId, u64>,
}

impl ModelledHeap {
    /// An empty heap.
    pub fn new(mode: IdMode, may_split: bool, workers: u16) -> Self {
        let heap = Heap::new(HeapSettings {
            classes: Classes::with_blocks(BLOCK_ORDER_MAX),
            may_split,
            workers,
            frames_max: 1 << 22,
        });
        Self { heap, mode, next: 1, blocks: BTreeMap::new(), drawn: HashMap::new(), merges: HashMap::new() }
    }

    /// The size classes.
    pub fn classes(&self) -> &Classes {
        self.heap.classes()
    }

    /// Allocates an object in a block of a worker. `draw` returns a random number.
    pub fn allocate(
        &mut self,
        worker: u16,
        class: ClassId,
        draw: &mut impl FnMut() -> u64,
    ) -> ModelledObject {
        let number = self.next;
        self.next += 1;
        let allocated = self.heap.allocate(worker, class, &mut || number, &mut NoBytes);
        let address = allocated.expect("the heap is large").address;
        if self.mode != IdMode::Numbers {
            let at = self.heap.locate(address, number).expect("it was allocated");
            let (home, _) = BlockAddress::containing(address).expect("it is an address of the heap");
            let slots = self.classes().get(class).expect("it exists").slots();
            let block =
                self.blocks.entry((worker, at.block)).or_insert_with(|| Block::new(home, class, slots));
            let drawn = self.drawn.entry((worker, class)).or_default();
            let id = new_id((at.block, block, at.slot), self.mode, drawn, draw);
            block.put(at.slot, ObjectRecord { id, home });
        }
        ModelledObject { address, number }
    }

    /// Frees an object. No class was compacted yet.
    pub fn free(&mut self, ModelledObject { address, number }: ModelledObject) {
        let at = self.heap.locate(address, number).expect("it was allocated");
        if let Some(block) = self.blocks.get_mut(&(at.worker, at.block)) {
            block.remove(at.slot);
            if block.live() == 0 {
                self.blocks.remove(&(at.worker, at.block));
            }
        }
        self.heap.free(address, number, &mut NoBytes).expect("it was allocated");
    }

    /// Compacts a class, once, after the last free.
    pub fn compact(&mut self, class: ClassId) {
        if self.mode == IdMode::Numbers {
            self.heap.compact(class, u64::MAX, &mut NoBytes);
            return;
        }
        let slots = self.classes().get(class).expect("it exists").slots();
        // The product collects them in this order.
        let of_class = self.blocks.iter().filter(|(_, block)| block.class() == class && block.free() > 0);
        let of_class = of_class.map(|((_, id), block)| (*id, block.clone()));
        let mut packer = ConflictPacker::new(self.mode, slots, of_class);
        let merges = std::iter::from_fn(|| packer.merge()).count();
        self.merges.insert(class, merges as u64);
    }

    /// The numbers of blocks and objects of a class.
    pub fn class_usage(&self, class: ClassId, shape: Class) -> (u64, u64) {
        let HeapUsage { held_bytes, objects, .. } = self.heap.class_usage(class);
        let merges = self.merges.get(&class).copied().unwrap_or(0);
        let blocks = held_bytes / shape.block_bytes() - merges;
        (blocks, objects)
    }
}

/// The memory of a heap without bytes: all operations do nothing.
struct NoBytes;

impl Mover for NoBytes {
    fn add(&mut self, _: FrameRun, _: ClassId, _: BlockAddress) {}
    fn begin_merge(&mut self, _: FrameRun, _: &[FrameRun]) {}
    fn lock(&mut self, _: FrameRun, _: &[(u32, u64)], _: Class) {}
    fn copy(&mut self, _: (FrameRun, u32), _: (FrameRun, u32), _: Class, _: Option<u32>) {}
    fn rehome(&mut self, _: (FrameRun, u32), _: Option<u32>) {}
    fn replace(&mut self, _: &Replacement) {}
    fn map_address(&mut self, _: BlockAddress, _: [Option<FrameRun>; 2]) {}
    fn free(&mut self, _: FrameRun) {}
    fn clear(&mut self, _: FrameRun) {}
    fn end_merge(&mut self) {}
}
