//! The mempool: the host's cache of pages, one memfd that all runs share, allocated in blocks.
//!
//! A block holds the pages of one eviction batch side by side, so that a batch is written to a
//! memory node by a few large messages. A block is allocated once per batch, so its lock is never
//! on the path of a fault.

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};

use aquifer_fabric::Memory;

use crate::page::{PAGE_BYTES, Slot};

/// Pages of a block: the largest eviction batch, and the largest coalesced message (256 KiB).
pub const BLOCK_PAGES: usize = 64;

/// The number of a block of [`BLOCK_PAGES`] slots.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct BlockId(pub u32);

impl BlockId {
    /// The slot with this index in the block.
    ///
    /// # Panics
    /// If `index` is not below [`BLOCK_PAGES`].
    #[must_use]
    pub fn slot(self, index: usize) -> Slot {
        assert!(index < BLOCK_PAGES);
        Slot(self.0 * BLOCK_PAGES_U32 + u32::try_from(index).expect("below BLOCK_PAGES"))
    }
}

const BLOCK_PAGES_U32: u32 = 64;

impl Slot {
    /// The block of the slot, and the slot's index in the block.
    #[must_use]
    pub fn block(self) -> (BlockId, usize) {
        (BlockId(self.0 / BLOCK_PAGES_U32), (self.0 % BLOCK_PAGES_U32) as usize)
    }

    /// The byte offset of the slot in the mempool's memory.
    #[must_use]
    pub fn offset(self) -> usize {
        self.0 as usize * PAGE_BYTES
    }
}

/// The mempool of one host. Its size is fixed: when all blocks are in use, [`Mempool::allocate`]
/// returns `None`, and the caller must wait.
#[derive(Debug)]
pub struct Mempool {
    memory: Arc<Memory>,
    free: Mutex<Vec<BlockId>>,
    blocks: usize,
    is_pool_short: Arc<AtomicBool>,
}

impl Mempool {
    /// A mempool of at most `bytes`, rounded down to whole blocks, but at least one block.
    ///
    /// # Errors
    /// If the system gives no address space for it.
    pub fn new(bytes: usize) -> std::io::Result<Self> {
        let blocks = (bytes / (BLOCK_PAGES * PAGE_BYTES)).clamp(1, 1 << 20);
        let memory = Memory::create("aquifer-mempool", blocks * BLOCK_PAGES * PAGE_BYTES)?;
        let free =
            (0..blocks).rev().map(|block| BlockId(u32::try_from(block).expect("at most 2^20"))).collect();
        Ok(Self { memory: Arc::new(memory), free: Mutex::new(free), blocks, is_pool_short: Arc::default() })
    }

    /// Recovers the mempool that an earlier agent left in `memory`. No block is free before
    /// [`Self::finish_recovery`].
    #[must_use]
    pub fn recover(memory: Memory) -> Self {
        let blocks = memory.len() / (BLOCK_PAGES * PAGE_BYTES);
        let is_pool_short = Arc::default();
        Self { memory: Arc::new(memory), free: Mutex::new(Vec::new()), blocks, is_pool_short }
    }

    /// Ends the recovery: all blocks but those in `used`, which the recovered volumes own, are
    /// free.
    pub fn finish_recovery(&self, used: &HashSet<BlockId>) {
        let blocks = (0..self.blocks).map(|block| BlockId(u32::try_from(block).expect("at most 2^20")));
        let free = blocks.rev().filter(|block| !used.contains(block)).collect();
        *self.free.lock().unwrap_or_else(PoisonError::into_inner) = free;
    }

    /// The memory of the slots, to be registered with endpoints.
    #[must_use]
    pub fn memory(&self) -> &Arc<Memory> {
        &self.memory
    }

    /// Allocates a free block, if there is one.
    #[must_use]
    pub fn allocate(&self) -> Option<BlockId> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner).pop()
    }

    /// Frees a block. None of its slots may be in use.
    pub fn free(&self, block: BlockId) {
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        debug_assert!(!free.contains(&block), "{block:?} was freed twice");
        free.push(block);
    }

    /// Whether the pool is short of free memory. While it is, programs of this host keep no clean
    /// copies there.
    #[must_use]
    pub fn is_pool_short(&self) -> bool {
        self.is_pool_short.load(Relaxed)
    }

    /// The flag behind [`Self::is_pool_short`], which senders set.
    pub(crate) fn pool_short_flag(&self) -> &Arc<AtomicBool> {
        &self.is_pool_short
    }

    /// The number of blocks.
    #[must_use]
    pub fn blocks(&self) -> usize {
        self.blocks
    }

    /// The number of free blocks.
    #[must_use]
    pub fn free_block_count(&self) -> usize {
        self.free.lock().unwrap_or_else(PoisonError::into_inner).len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_blocks_can_be_allocated_and_freed() {
        let pool = Mempool::new(3 * BLOCK_PAGES * PAGE_BYTES + 5).unwrap();
        assert_eq!(pool.blocks(), 3);
        let blocks: Vec<_> = (0..3).map(|_| pool.allocate().unwrap()).collect();
        assert_eq!(pool.allocate(), None, "all blocks are in use");
        pool.free(blocks[1]);
        assert_eq!(pool.allocate(), Some(blocks[1]));
    }

    #[test]
    fn slots_know_their_block() {
        let slot = BlockId(5).slot(63);
        assert_eq!(slot.block(), (BlockId(5), 63));
        assert_eq!(slot.offset(), (5 * 64 + 63) * PAGE_BYTES);
    }
}
