//! The page cache of the host: pages that left a program, and that memory nodes have too.
//!
//! When a volume reclaims a block of the mempool, the pages in it become remote, and the block
//! passes to the cache (`cached_blocks`). An entry says in which slot the bytes of a location are.
//! No page word names a cached slot, so any thread may drop an entry at any moment, and a page
//! whose entry is gone is read from a memory node.
//!
//! A reader pins the block of an entry, and a block that is pinned is not used for other pages.

use std::sync::Arc;

use crate::cached_blocks::duel::{Duel, Group};
use crate::mempool::BlockId;
use crate::mutation::Mutation;
use crate::page::{Location, Slot};
use crate::slabs::{LOCATIONS_MAX, location_number};
use crate::sync::Ordering::{AcqRel, Acquire, Relaxed, Release};
use crate::sync::{AtomicU32, Memory, Mutex};

/// Bit of [`BlockState::pins`]: the block is in the cache. The other bits are the number of pins.
const IS_CACHED: u32 = 1 << 31;

/// The cached state of one block.
#[derive(Debug, Default)]
struct BlockState {
    pins: AtomicU32,
    /// Number of entries that name a slot of the block. It may be too small for a moment, so it
    /// only guides which block is removed.
    entries: AtomicU32,
    /// Number of the block's group in the duel.
    group: AtomicU32,
    /// 1 while the block is in the list of emptied blocks, which has each block at most once.
    is_listed: AtomicU32,
}

/// The states of all blocks of the mempool: whether they are cached, and pinned.
#[derive(Debug)]
pub(crate) struct BlockStates {
    states: Box<[BlockState]>,
    /// Cached blocks without an entry.
    emptied: Mutex<Vec<BlockId>>,
}

impl BlockStates {
    pub fn new(blocks: usize) -> Self {
        Self { states: (0..blocks).map(|_| BlockState::default()).collect(), emptied: Mutex::default() }
    }

    fn of(&self, block: BlockId) -> &BlockState {
        &self.states[block.0 as usize]
    }

    /// Sets the number of entries and the group of a block that is about to be cached.
    pub fn begin(&self, block: BlockId, entries: usize, group: Group) {
        self.of(block).entries.store(u32::try_from(entries).expect("few"), Relaxed);
        self.of(block).group.store(group as u32, Relaxed);
    }

    /// The group of a cached block.
    fn group(&self, block: BlockId) -> Group {
        Group::ALL[self.of(block).group.load(Relaxed) as usize]
    }

    /// Marks a block as cached. Its bytes do not change until it is taken.
    pub fn finish(&self, block: BlockId) {
        self.of(block).pins.store(IS_CACHED, Release);
    }

    /// Removes a block from the cache, unless it is pinned. It cannot be pinned from then on.
    #[must_use]
    pub fn try_remove(&self, block: BlockId) -> bool {
        if Mutation::PunchPinned.is_active() {
            return self.of(block).pins.fetch_and(!IS_CACHED, AcqRel) & IS_CACHED != 0;
        }
        self.of(block).pins.compare_exchange(IS_CACHED, 0, AcqRel, Relaxed).is_ok()
    }

    /// The number of entries that name a slot of the block, as far as known.
    pub fn entries(&self, block: BlockId) -> usize {
        self.of(block).entries.load(Relaxed) as usize
    }

    /// Removes a block from the list of blocks without an entry.
    pub fn pop_emptied(&self) -> Option<BlockId> {
        let block = self.emptied.lock().pop()?;
        self.of(block).is_listed.store(0, Relaxed);
        Some(block)
    }

    /// Pins a block. Returns false if it is not in the cache.
    fn pin(&self, block: BlockId) -> bool {
        let pin = |pins: u32| (pins & IS_CACHED != 0).then_some(pins + 1);
        self.of(block).pins.fetch_update(AcqRel, Relaxed, pin).is_ok()
    }

    fn unpin(&self, block: BlockId) {
        self.of(block).pins.fetch_sub(1, Release);
    }

    /// Counts an entry less.
    fn entry_removed(&self, block: BlockId) {
        let state = self.of(block);
        if state.entries.fetch_sub(1, Relaxed) == 1 && state.is_listed.swap(1, Relaxed) == 0 {
            self.emptied.lock().push(block);
        }
    }
}

/// A cached page, its slot, and the slot to which it is moved.
pub(crate) type MovedEntry = (Location, Slot, Slot);

/// The entries of one run.
#[derive(Debug)]
pub struct CacheIndex {
    /// One word for each location: the slot and 1, or 0 if the location is not cached.
    words: Memory,
    blocks: Arc<BlockStates>,
    duel: Duel,
}

/// A slot that is not reused while this exists.
#[derive(Debug)]
pub struct PinnedSlot<'a> {
    blocks: &'a BlockStates,
    slot: Slot,
}

impl PinnedSlot<'_> {
    /// The slot.
    #[must_use]
    pub fn slot(&self) -> Slot {
        self.slot
    }
}

impl Drop for PinnedSlot<'_> {
    fn drop(&mut self) {
        self.blocks.unpin(self.slot.block().0);
    }
}

impl CacheIndex {
    /// An empty index of a run, over the blocks of a mempool.
    ///
    /// # Errors
    /// If the system gives no address space for it.
    pub(crate) fn new(blocks: Arc<BlockStates>) -> std::io::Result<Self> {
        let words = Memory::private("aquifer-cache-index", LOCATIONS_MAX * size_of::<u32>())?;
        Ok(Self { words, blocks, duel: Duel::default() })
    }

    /// The score of the samples of this run's blocks.
    pub(crate) fn duel(&self) -> &Duel {
        &self.duel
    }

    fn word(&self, location: Location) -> &AtomicU32 {
        self.words.atomic_u32(location_number(location) * size_of::<u32>())
    }

    /// The slot in which the bytes of a location are cached. The entry may be dropped at any
    /// moment.
    #[must_use]
    pub fn slot_of(&self, location: Location) -> Option<Slot> {
        self.word(location).load(Acquire).checked_sub(1).map(Slot)
    }

    /// Pins the slot in which the bytes of a location are cached, if there is one.
    ///
    /// The caller must hold a reference to the location.
    #[must_use]
    pub fn pin(&self, location: Location) -> Option<PinnedSlot<'_>> {
        let slot = self.slot_of(location)?;
        if !self.blocks.pin(slot.block().0) {
            return None;
        }
        let pinned = PinnedSlot { blocks: &self.blocks, slot };
        // The block may have been given away and cached again with other pages before it was
        // pinned.
        (self.slot_of(location) == Some(slot)).then_some(pinned)
    }

    /// Adds an entry, in place of an earlier one.
    pub(crate) fn insert(&self, location: Location, slot: Slot) {
        self.removed(self.word(location).swap(slot.0 + 1, AcqRel));
    }

    /// Removes the entry of a location, if there is one.
    pub(crate) fn remove(&self, location: Location) {
        let word = self.word(location);
        // Most locations have no entry, and a load does not make the word's page exist.
        if word.load(Relaxed) != 0 {
            self.removed(word.swap(0, AcqRel));
        }
    }

    /// Removes the entry of a location, if there is one, because a program has got the page from
    /// the cache.
    pub(crate) fn remove_hit(&self, location: Location) {
        if let Some(slot) = self.slot_of(location) {
            self.count_hit(slot);
            self.remove(location);
        }
    }

    /// Counts a read of a cached slot.
    pub fn count_hit(&self, slot: Slot) {
        self.duel.hit(self.blocks.group(slot.block().0));
    }

    /// Removes the entry of a location if it names this slot, whose block was taken.
    pub(crate) fn remove_from(&self, location: Location, slot: Slot) {
        // It fails if the entry was removed, or names another slot by now.
        let _other = self.word(location).compare_exchange(slot.0 + 1, 0, AcqRel, Relaxed);
    }

    /// Moves entries to free slots of a block, with their bytes. The block that they are in was
    /// removed. Returns false, and changes nothing, if a reader has pinned the target.
    ///
    /// No reader finds the pages meanwhile. Entries that are dropped meanwhile are not moved.
    pub(crate) fn move_entries(
        &self,
        target: BlockId,
        entries: &[MovedEntry],
        copy: impl Fn(Slot, Slot),
    ) -> bool {
        if !self.blocks.try_remove(target) {
            return false;
        }
        for (location, from, to) in entries {
            copy(*from, *to);
            self.blocks.of(target).entries.fetch_add(1, Relaxed);
            let word = self.word(*location);
            let is_moved = word.compare_exchange(from.0 + 1, to.0 + 1, AcqRel, Relaxed).is_ok();
            self.blocks.entry_removed(if is_moved { from.block().0 } else { target });
        }
        self.blocks.finish(target);
        true
    }

    fn removed(&self, word: u32) {
        if let Some(slot) = word.checked_sub(1) {
            self.blocks.entry_removed(Slot(slot).block().0);
        }
    }
}
