//! A heap: the blocks of all workers, their addresses and their memory (§3.1).
//!
//! The heap decides where objects are. The bytes are moved by a [`Mover`], between the decisions
//! that a merge consists of.

mod compaction;
mod replacement;

use std::collections::{BTreeMap, HashSet};

use crate::block::{Block, BlockId, ObjectRecord};
use crate::class::{BLOCK_ORDERS, Class, ClassId, Classes};
use crate::local::LocalHeap;
use crate::mutation::Mutation;
use crate::pointer::BlockAddress;
use crate::space::{Addresses, FrameRun, Frames, addresses_max};
pub use replacement::Replacement;

/// Moves the bytes of objects during a merge, changes what addresses name, and records what the
/// next process must know.
pub trait Mover {
    /// Records a new block, and makes its address name its memory.
    fn add(&mut self, frames: FrameRun, class: ClassId, address: BlockAddress);

    /// Records that a merge begins.
    fn begin_merge(&mut self, source: FrameRun, into: &[FrameRun]);

    /// Locks the objects of a block that is to be merged, given by slot and id, after writes to
    /// them have ended.
    fn lock(&mut self, source: FrameRun, objects: &[(u32, u64)], class: Class);

    /// Copies an object, as a new version, into a free slot of another block. `home`: the number of
    /// its home, unless that is the address with which the other block was made.
    fn copy(&mut self, from: (FrameRun, u32), to: (FrameRun, u32), class: Class, home: Option<u32>);

    /// Records the home of an object, as for [`Self::copy`].
    fn rehome(&mut self, at: (FrameRun, u32), home: Option<u32>);

    /// Makes an address name the blocks at `named`. Most readers find their object in the first.
    fn map_address(&mut self, address: BlockAddress, named: [Option<FrameRun>; 2]);

    /// Frees the memory of a block that no address names any more.
    fn free(&mut self, frames: FrameRun);

    /// Frees the memory of frames that no block has, and of the records of their slots: a read of
    /// an old address creates pages.
    fn clear(&mut self, frames: FrameRun);

    /// Moves a large object into the block of another one, whose bytes are its new ones, and makes
    /// its address name that block. The caller frees the old block and calls [`Self::end_merge`].
    fn replace(&mut self, replacement: &Replacement);

    /// Records that the merge or replacement has ended.
    fn end_merge(&mut self);
}

/// Why an object cannot be allocated, found or freed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum HeapError {
    /// The heap has no memory for another block.
    #[error("the heap is full")]
    Full,
    /// There is no such object: it was freed, or never existed.
    #[error("there is no such object")]
    NoObject,
    /// There is no such size class.
    #[error("there is no such size class")]
    NoClass,
}

/// The place of an object.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Located {
    /// The worker whose block it is in.
    pub worker: u16,
    /// The block.
    pub block: BlockId,
    /// The slot.
    pub slot: u32,
    /// The memory of the block.
    pub frames: FrameRun,
    /// The block address of the pointer, with the slot where the object is now.
    pub address: u64,
    /// Whether the pointer names an old block address, which can be released (§3.3).
    pub is_old: bool,
}

/// An object that was just allocated.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Allocated {
    /// The object's virtual address.
    pub address: u64,
    /// The object's id.
    pub id: u64,
    /// The memory of the block.
    pub frames: FrameRun,
    /// The slot in the block.
    pub slot: u32,
}

/// Memory and objects of a heap.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct HeapUsage {
    /// Bytes of all blocks.
    pub held_bytes: u64,
    /// Bytes of the slots that are in use, headers included.
    pub live_bytes: u64,
    /// Number of objects.
    pub objects: u64,
}

/// Settings of a heap.
#[derive(Clone, Debug)]
pub struct HeapSettings {
    /// The size classes.
    pub classes: Classes,
    /// Whether a block that fits into no other is split over two.
    pub may_split: bool,
    /// Number of workers, 1 to 65,535.
    pub workers: u16,
    /// Most frames of the heap.
    pub frames_max: u32,
}

/// A block of an earlier process.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RestoredBlock {
    /// The block's memory.
    pub frames: FrameRun,
    /// The size class.
    pub class: ClassId,
    /// The address with which the block was made.
    pub address: BlockAddress,
    /// All addresses that name the block, and whether each names it as its second one.
    pub names: Vec<(BlockAddress, bool)>,
    /// The objects, with their slots.
    pub objects: Vec<(u32, ObjectRecord)>,
}

/// The owner and the memory of a block.
#[derive(Clone, Copy, Debug)]
struct BlockPlace {
    worker: u16,
    frames: FrameRun,
}

/// Memory and objects of a size class, and the counts of its changes.
#[derive(Clone, Copy, Debug, Default)]
struct ClassUsage {
    usage: HeapUsage,
    allocations: u64,
    frees: u64,
}

/// A heap.
#[derive(Debug)]
pub struct Heap {
    settings: HeapSettings,
    workers: Vec<LocalHeap>,
    places: Vec<Option<BlockPlace>>,
    free_ids: Vec<BlockId>,
    addresses: Addresses,
    frames: Frames,
    usage: HeapUsage,
    classes: Vec<ClassUsage>,
    frames_limit: u32,
    /// Addresses that were released: before the last [`Heap::expire_released`], and since.
    released: [Vec<BlockAddress>; 2],
    /// The number of calls of [`Heap::expire_released`], plus 2.
    round: u64,
}

impl Heap {
    /// Creates an empty heap.
    #[must_use]
    pub fn new(settings: HeapSettings) -> Self {
        Self {
            workers: (0..settings.workers).map(|_| LocalHeap::default()).collect(),
            places: Vec::new(),
            free_ids: Vec::new(),
            addresses: Addresses::default(),
            frames: Frames::new(settings.frames_max),
            usage: HeapUsage::default(),
            classes: vec![ClassUsage::default(); settings.classes.iter().count()],
            frames_limit: settings.frames_max,
            released: [Vec::new(), Vec::new()],
            round: 2,
            settings,
        }
    }

    /// Restores the heap of an earlier process. Each block must have an object.
    ///
    /// `addresses`: for each block size the classes of all addresses that were ever used.
    #[must_use]
    pub fn restore(
        settings: HeapSettings,
        addresses: &[Vec<ClassId>; BLOCK_ORDERS],
        blocks: Vec<RestoredBlock>,
    ) -> Self {
        let mut heap = Self::new(settings);
        heap.frames = Frames::with_used(heap.settings.frames_max, blocks.iter().map(|block| block.frames));
        let mut named: BTreeMap<BlockAddress, [Option<BlockId>; 2]> = BTreeMap::new();
        for (id, block) in (0..).map(BlockId).zip(&blocks) {
            for (name, is_second) in &block.names {
                named.entry(*name).or_default()[usize::from(*is_second)] = Some(id);
            }
        }
        for (order, classes) in (0..).zip(addresses) {
            for (number, class) in (0..).zip(classes) {
                let blocks = named.get(&BlockAddress { order, number }).copied();
                heap.addresses.restore(order, *class, blocks.unwrap_or_default());
            }
        }
        let own: HashSet<BlockAddress> = blocks.iter().map(|block| block.address).collect();
        for (id, restored) in (0..).map(BlockId).zip(blocks) {
            heap.add_restored(id, restored);
        }
        let is_needed = |name: &&BlockAddress| heap.addresses.homed(**name) > 0 || own.contains(*name);
        let unneeded = named.keys().filter(|name| !is_needed(name));
        let unneeded: Vec<BlockAddress> = unneeded.copied().collect();
        unneeded.iter().for_each(|name| heap.addresses.set_released(*name, heap.round));
        heap.released[1] = unneeded;
        heap
    }

    fn add_restored(&mut self, id: BlockId, restored: RestoredBlock) {
        let RestoredBlock { frames, class, address, names, objects } = restored;
        let shape = self.settings.classes.get(class).expect("a restored block has a class");
        let mut block = Block::new(address, class, shape.slots());
        names.iter().for_each(|(name, _)| block.add_name(*name));
        for (slot, record) in objects {
            block.put(slot, record);
            self.addresses.add_homed(record.home);
            self.count_object(class, shape);
        }
        self.count_block(class, shape);
        let worker = u16::try_from(id.0 % u32::from(self.settings.workers))
            .expect("the remainder is less than the number of workers");
        self.places.push(Some(BlockPlace { worker, frames }));
        self.workers[usize::from(worker)].add(id, block);
    }

    /// The size classes.
    #[must_use]
    pub fn classes(&self) -> &Classes {
        &self.settings.classes
    }

    /// Number of workers.
    #[must_use]
    pub fn workers(&self) -> u16 {
        self.settings.workers
    }

    /// Memory and objects of the heap.
    #[must_use]
    pub fn usage(&self) -> HeapUsage {
        self.usage
    }

    /// Number of block addresses in use, and of those that were ever in use.
    #[must_use]
    pub fn addresses(&self) -> (usize, usize) {
        self.addresses.counts()
    }

    /// Bytes of the blocks of a class, and of its slots in use.
    #[must_use]
    pub fn class_usage(&self, class: ClassId) -> HeapUsage {
        self.classes.get(usize::from(class.0)).map(|class| class.usage).unwrap_or_default()
    }

    /// Number of objects of a class that were freed.
    #[must_use]
    pub fn class_frees(&self, class: ClassId) -> u64 {
        self.classes.get(usize::from(class.0)).map_or(0, |class| class.frees)
    }

    /// Number of allocations and frees of objects of a class, together.
    #[must_use]
    pub fn class_changes(&self, class: ClassId) -> u64 {
        self.classes.get(usize::from(class.0)).map_or(0, |class| class.allocations + class.frees)
    }

    /// Frames of all blocks.
    #[must_use]
    pub fn used_frames(&self) -> u32 {
        self.frames.used()
    }

    /// Limits the frames of all blocks. Frames above the limit that blocks have already stay.
    pub fn set_frames_limit(&mut self, frames: u32) {
        self.frames_limit = frames;
    }

    /// Whether one more block of a class is within the frames limit.
    #[must_use]
    pub fn has_room(&self, shape: Class) -> bool {
        self.frames.used() + shape.frames() <= self.frames_limit
    }

    /// Frees the memory of frames that no block has.
    pub fn clear_free_frames(&self, mover: &mut impl Mover) {
        self.frames.free_runs().for_each(|run| mover.clear(run));
    }

    /// The size class of a block.
    #[must_use]
    pub fn class_of(&self, id: BlockId) -> Option<ClassId> {
        self.block(id).map(Block::class)
    }

    /// Allocates an object of a class in a block of a worker.
    ///
    /// `draw` returns the next number of the heap.
    ///
    /// # Errors
    /// If there is no such class, or no memory for another block.
    pub fn allocate(
        &mut self,
        worker: u16,
        class: ClassId,
        draw: &mut impl FnMut() -> u64,
        mover: &mut impl Mover,
    ) -> Result<Allocated, HeapError> {
        let shape = self.settings.classes.get(class).ok_or(HeapError::NoClass)?;
        let local = &mut self.workers[usize::from(worker)];
        let placed = match local.allocate(class, draw) {
            Some(placed) => placed,
            None => {
                self.add_block(worker, class, shape, mover)?;
                let local = &mut self.workers[usize::from(worker)];
                local.allocate(class, draw).expect("the block is empty")
            }
        };
        self.addresses.add_homed(placed.record.home);
        self.count_object(class, shape);
        let place = self.places[placed.block.0 as usize].expect("the block is in use");
        Ok(Allocated {
            address: placed.record.home.at(u64::from(placed.slot) * u64::from(shape.slot_bytes)),
            id: placed.record.id,
            frames: place.frames,
            slot: placed.slot,
        })
    }

    /// Finds the object with an id at a virtual address, or elsewhere in the blocks that the
    /// address names (§3.2.1).
    ///
    /// # Errors
    /// If there is no such object.
    pub fn locate(&self, address: u64, id: u64) -> Result<Located, HeapError> {
        let (name, offset) = BlockAddress::containing(address).ok_or(HeapError::NoObject)?;
        let blocks_max = if Mutation::ForgetSecond.is_active() { 1 } else { 2 };
        for id_of_block in self.addresses.named(name).take(blocks_max) {
            let BlockPlace { worker, frames } =
                self.places[id_of_block.0 as usize].expect("an address names blocks in use");
            let Some(block) = self.workers[usize::from(worker)].block(id_of_block) else { continue };
            let shape = self.settings.classes.get(block.class()).expect("the block has a class");
            let hint = u32::try_from(offset / u64::from(shape.slot_bytes)).unwrap_or(u32::MAX);
            if let Some(slot) = block.find(id, hint) {
                let address = name.at(u64::from(slot) * u64::from(shape.slot_bytes));
                let is_old = name != block.address();
                return Ok(Located { worker, block: id_of_block, slot, frames, address, is_old });
            }
        }
        Err(HeapError::NoObject)
    }

    /// The address with which an object was allocated, or to which it was released, with the slot
    /// where it is now: it is valid for as long as the object.
    ///
    /// # Errors
    /// If there is no such object.
    pub fn home_address(&self, address: u64, id: u64) -> Result<u64, HeapError> {
        let Located { block, slot, .. } = self.locate(address, id)?;
        let found = self.block(block).ok_or(HeapError::NoObject)?;
        let shape = self.settings.classes.get(found.class()).ok_or(HeapError::NoClass)?;
        let home = found.record(slot).ok_or(HeapError::NoObject)?.home;
        Ok(home.at(u64::from(slot) * u64::from(shape.slot_bytes)))
    }

    /// Frees an object.
    ///
    /// # Errors
    /// If there is no such object.
    pub fn free(&mut self, address: u64, id: u64, mover: &mut impl Mover) -> Result<(), HeapError> {
        let Located { worker, block, slot, frames, .. } = self.locate(address, id)?;
        let local = &mut self.workers[usize::from(worker)];
        let ObjectRecord { home, .. } = local.free(block, slot).ok_or(HeapError::NoObject)?;
        let freed = local.block(block).expect("locate has found the block there");
        let (class, is_empty) = (freed.class(), freed.live() == 0);
        if home != freed.address() {
            mover.rehome((frames, slot), None);
        }
        let shape = self.settings.classes.get(class).expect("the block has a class");
        self.uncount_object(class, shape);
        if self.addresses.remove_homed(home) {
            self.remove_name(home, mover);
        }
        if is_empty {
            self.remove_block(block, mover);
        }
        Ok(())
    }

    /// Releases an old address of an object: all pointers to it are replaced by the one that is
    /// returned (§3.3). The old one is valid for some time, in case the new one does not arrive:
    /// see [`Self::expire_released`].
    ///
    /// # Errors
    /// If there is no such object.
    pub fn release(&mut self, address: u64, id: u64, mover: &mut impl Mover) -> Result<u64, HeapError> {
        let Located { worker, block, slot, frames, .. } = self.locate(address, id)?;
        let local = &mut self.workers[usize::from(worker)];
        let found = local.block(block).expect("locate has found the block there");
        let shape = self.settings.classes.get(found.class()).expect("the block has a class");
        let next = found.address();
        let last = local.rehome(block, slot, next).expect("locate has found the block there");
        if last != next {
            mover.rehome((frames, slot), None);
            self.addresses.add_homed(next);
            if self.addresses.remove_homed(last) {
                self.addresses.set_released(last, self.round);
                self.released[1].push(last);
            }
        }
        Ok(next.at(u64::from(slot) * u64::from(shape.slot_bytes)))
    }

    /// Frees the addresses that were released before the previous call and were not used since.
    pub fn expire_released(&mut self, mover: &mut impl Mover) {
        let newer = std::mem::take(&mut self.released[1]);
        for name in std::mem::replace(&mut self.released[0], newer) {
            // The address may be in use again.
            if self.addresses.released_in(name) == self.round - 1 {
                self.remove_name(name, mover);
            }
        }
        self.round += 1;
    }

    fn add_block(
        &mut self,
        worker: u16,
        class: ClassId,
        shape: Class,
        mover: &mut impl Mover,
    ) -> Result<(), HeapError> {
        if !self.has_room(shape) {
            return Err(HeapError::Full);
        }
        let frames = self.frames.allocate(shape.frames()).ok_or(HeapError::Full)?;
        let id = self.free_ids.pop().unwrap_or_else(|| {
            self.places.push(None);
            BlockId(u32::try_from(self.places.len() - 1).expect("fewer than 2^32 blocks"))
        });
        self.places[id.0 as usize] = Some(BlockPlace { worker, frames });
        let most = addresses_max(self.settings.frames_max, shape.order);
        let Some(address) = self.addresses.allocate(class, shape.order, id, most) else {
            self.places[id.0 as usize] = None;
            self.free_ids.push(id);
            self.frames.release(frames);
            return Err(HeapError::Full);
        };
        self.workers[usize::from(worker)].add(id, Block::new(address, class, shape.slots()));
        self.count_block(class, shape);
        mover.add(frames, class, address);
        Ok(())
    }

    /// Removes a block without objects, with all addresses that name it.
    fn remove_block(&mut self, id: BlockId, mover: &mut impl Mover) {
        let BlockPlace { worker, .. } = self.places[id.0 as usize].expect("the block is in use");
        let block = self.workers[usize::from(worker)].remove(id).expect("the block belongs to this worker");
        for name in block.names() {
            self.addresses.rename(*name, id, &[]);
            let rest = self.frames_of(*name);
            mover.map_address(*name, rest);
            if rest == [None; 2] {
                self.addresses.release(*name);
            }
        }
        let shape = self.settings.classes.get(block.class()).expect("the block has a class");
        self.free_block(id, block.class(), shape, mover);
    }

    fn count_object(&mut self, class: ClassId, shape: Class) {
        self.classes[usize::from(class.0)].allocations += 1;
        for usage in [&mut self.usage, &mut self.classes[usize::from(class.0)].usage] {
            usage.objects += 1;
            usage.live_bytes += u64::from(shape.slot_bytes);
        }
    }

    fn uncount_object(&mut self, class: ClassId, shape: Class) {
        let of_class = &mut self.classes[usize::from(class.0)];
        of_class.frees += 1;
        for usage in [&mut self.usage, &mut of_class.usage] {
            usage.objects -= 1;
            usage.live_bytes -= u64::from(shape.slot_bytes);
        }
    }

    fn count_block(&mut self, class: ClassId, shape: Class) {
        self.usage.held_bytes += shape.block_bytes();
        self.classes[usize::from(class.0)].usage.held_bytes += shape.block_bytes();
    }

    fn free_block(&mut self, id: BlockId, class: ClassId, shape: Class, mover: &mut impl Mover) {
        let BlockPlace { frames, .. } = self.places[id.0 as usize].take().expect("the block is in use");
        mover.free(frames);
        self.frames.release(frames);
        self.free_ids.push(id);
        self.usage.held_bytes -= shape.block_bytes();
        self.classes[usize::from(class.0)].usage.held_bytes -= shape.block_bytes();
    }

    /// Frees an old address that no object has as its home. The address with which a block was made
    /// stays.
    fn remove_name(&mut self, name: BlockAddress, mover: &mut impl Mover) {
        let named: Vec<BlockId> = self.addresses.named(name).collect();
        let is_own = |id: &BlockId| self.block(*id).is_some_and(|block| block.address() == name);
        if named.iter().any(is_own) {
            return;
        }
        for id in named {
            let BlockPlace { worker, .. } = self.places[id.0 as usize].expect("the block is in use");
            if let Some(block) = self.workers[usize::from(worker)].block_mut(id) {
                block.remove_name(name);
            }
            self.addresses.rename(name, id, &[]);
        }
        mover.map_address(name, [None; 2]);
        self.addresses.release(name);
    }

    /// The memory of the blocks that an address names.
    fn frames_of(&self, name: BlockAddress) -> [Option<FrameRun>; 2] {
        let mut named = self.addresses.named(name);
        let mut next = || Some(self.places[named.next()?.0 as usize].expect("the block is in use").frames);
        [next(), next()]
    }

    fn block(&self, id: BlockId) -> Option<&Block> {
        let BlockPlace { worker, .. } = self.places[id.0 as usize]?;
        self.workers[usize::from(worker)].block(id)
    }
}
