//! The host's cache of pages: one memfd, shared by all programs, handed out in blocks.
//!
//! A block holds the pages of one eviction batch side by side, so that a batch is written to a memory node in few
//! large messages. Blocks come and go once per batch; the lock is never on the path of a fault.

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};

use aquifer_fabric::Memory;

use crate::page::{PAGE_BYTES, Slot};

/// Pages of a block: the largest eviction batch, and the largest coalesced message (256 KiB).
pub const BLOCK_PAGES: usize = 64;

/// A block of [`BLOCK_PAGES`] slots.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct BlockId(pub u32);

impl BlockId {
    /// The block's slot number `index`.
    ///
    /// # Panics
    /// If there is no such slot.
    #[must_use]
    pub fn slot(self, index: usize) -> Slot {
        assert!(index < BLOCK_PAGES);
        Slot(self.0 * BLOCK_PAGES_U32 + u32::try_from(index).expect("below BLOCK_PAGES"))
    }
}

const BLOCK_PAGES_U32: u32 = 64;

impl Slot {
    /// The block that it belongs to, and which of its slots it is.
    #[must_use]
    pub fn block(self) -> (BlockId, usize) {
        (BlockId(self.0 / BLOCK_PAGES_U32), (self.0 % BLOCK_PAGES_U32) as usize)
    }

    /// Where its bytes begin in the mempool's memory.
    #[must_use]
    pub fn offset(self) -> usize {
        self.0 as usize * PAGE_BYTES
    }
}

/// The mempool of one host. It is bounded: when every block is in use, [`Mempool::allocate`] says so and the taker waits.
#[derive(Debug)]
pub struct Mempool {
    memory: Arc<Memory>,
    free: Mutex<Vec<BlockId>>,
    blocks: usize,
    is_pool_short: Arc<AtomicBool>,
}

impl Mempool {
    /// A mempool of at most `bytes`, rounded down to whole blocks, at least one.
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

    /// The mempool that an agent before this one left in `memory`. Nothing is free before [`Self::finish_recovery`].
    #[must_use]
    pub fn recover(memory: Memory) -> Self {
        let blocks = memory.len() / (BLOCK_PAGES * PAGE_BYTES);
        let is_pool_short = Arc::default();
        Self { memory: Arc::new(memory), free: Mutex::new(Vec::new()), blocks, is_pool_short }
    }

    /// All volumes are recovered, and have these blocks: the others are free.
    pub fn finish_recovery(&self, used: &HashSet<BlockId>) {
        let blocks = (0..self.blocks).map(|block| BlockId(u32::try_from(block).expect("at most 2^20")));
        let free = blocks.rev().filter(|block| !used.contains(block)).collect();
        *self.free.lock().unwrap_or_else(PoisonError::into_inner) = free;
    }

    /// The memory behind the slots, to be registered with endpoints.
    #[must_use]
    pub fn memory(&self) -> &Arc<Memory> {
        &self.memory
    }

    /// Take a free block, if there is one.
    #[must_use]
    pub fn allocate(&self) -> Option<BlockId> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner).pop()
    }

    /// Give a block back. None of its slots may be in use.
    pub fn free(&self, block: BlockId) {
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        debug_assert!(!free.contains(&block), "{block:?} was given back twice");
        free.push(block);
    }

    /// Whether the pool has little memory left: then programs of this host keep no copies there of what they have themselves.
    #[must_use]
    pub fn is_pool_short(&self) -> bool {
        self.is_pool_short.load(Relaxed)
    }

    /// Where senders say so.
    pub(crate) fn pool_short_flag(&self) -> &Arc<AtomicBool> {
        &self.is_pool_short
    }

    /// How many blocks there are.
    #[must_use]
    pub fn blocks(&self) -> usize {
        self.blocks
    }

    /// How many blocks are free.
    #[must_use]
    pub fn free_block_count(&self) -> usize {
        self.free.lock().unwrap_or_else(PoisonError::into_inner).len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_bounded_and_gives_back() {
        let pool = Mempool::new(3 * BLOCK_PAGES * PAGE_BYTES + 5).unwrap();
        assert_eq!(pool.blocks(), 3);
        let taken: Vec<_> = (0..3).map(|_| pool.allocate().unwrap()).collect();
        assert_eq!(pool.allocate(), None, "at the bound the taker is told");
        pool.free(taken[1]);
        assert_eq!(pool.allocate(), Some(taken[1]));
    }

    #[test]
    fn slots_know_their_block() {
        let slot = BlockId(5).slot(63);
        assert_eq!(slot.block(), (BlockId(5), 63));
        assert_eq!(slot.offset(), (5 * 64 + 63) * PAGE_BYTES);
    }
}
