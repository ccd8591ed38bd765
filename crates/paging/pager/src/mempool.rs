//! The mempool: the host's cache of pages, one memfd that all runs share, allocated in blocks.
//!
//! A block holds the pages of one eviction batch side by side, so that a batch is written to a
//! memory node by a few large messages. A block is allocated once per batch, so its lock is never
//! on the path of a fault.
//!
//! Each user with a volume has a *guarantee*: blocks that other users cannot hold. The guarantee of
//! the next user is kept free, too. When blocks are short, users with more than their guarantee
//! free acknowledged blocks. Within a user, volumes with blocks free some for volumes without.
//!
//! Blocks that no volume needs keep pages that their volumes have reclaimed: `page_cache`.

mod free_blocks;

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed, Ordering::SeqCst};

use aquifer_fabric::Memory;
use parking_lot::Mutex;

use crate::cache_shares::CacheShares;
use crate::cached_blocks::CachedBlocks;
use crate::page::{Location, PAGE_BYTES, Slot};
use crate::page_cache::CacheIndex;
use crate::slabs::SlabSet;
use free_blocks::FreeBlocks;

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
/// Bytes of a block.
pub(crate) const BLOCK_BYTES: usize = BLOCK_PAGES * PAGE_BYTES;

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

/// The guarantee of a user is 1/`GUARANTEE_DIVISOR` of the mempool, within the bounds below.
const GUARANTEE_DIVISOR: usize = 16;
/// Smallest guarantee of a user, in blocks.
const GUARANTEE_MIN: usize = 4;
/// Largest guarantee of a user, in blocks.
const GUARANTEE_MAX: usize = 256;

/// The blocks of one user.
#[derive(Debug, Default)]
pub struct MempoolUser {
    uid: u32,
    blocks: AtomicUsize,
    /// Number of volumes that have no block and wait for one.
    waiting: AtomicUsize,
    is_pool_short: Arc<AtomicBool>,
}

impl MempoolUser {
    /// Number of blocks that the user's volumes own.
    #[must_use]
    pub fn blocks(&self) -> usize {
        self.blocks.load(Relaxed)
    }

    /// Whether the pool is short of memory for this user. If so, the user's programs keep no clean
    /// copies there.
    #[must_use]
    pub fn is_pool_short(&self) -> bool {
        self.is_pool_short.load(Relaxed)
    }

    /// The flag behind [`Self::is_pool_short`], which senders set.
    pub(crate) fn pool_short_flag(&self) -> &Arc<AtomicBool> {
        &self.is_pool_short
    }

    /// Counts a block that a volume of the user owned before the restart of the agent.
    pub(crate) fn count_recovered(&self) {
        self.blocks.fetch_add(1, Relaxed);
    }

    /// Whether a volume without a block waits for one.
    #[must_use]
    pub fn has_waiting(&self) -> bool {
        self.waiting.load(SeqCst) > 0
    }

    pub(crate) fn begin_waiting(&self) {
        self.waiting.fetch_add(1, SeqCst);
    }

    pub(crate) fn end_waiting(&self) {
        self.waiting.fetch_sub(1, SeqCst);
    }
}

/// The blocks that no volume owns, and the users with volumes.
#[derive(Debug)]
struct MempoolState {
    free: FreeBlocks,
    /// Blocks that are given away when none is free.
    cached: CachedBlocks,
    users: Vec<Arc<MempoolUser>>,
}

impl MempoolState {
    /// Number of blocks that must stay free for users that have less than their guarantee, and for
    /// one more user.
    fn reserve(&self, user: &MempoolUser, guarantee: usize) -> usize {
        let lacks = |other: &Arc<MempoolUser>| guarantee.saturating_sub(other.blocks());
        let others = self.users.iter().filter(|other| !std::ptr::eq(&raw const ***other, user));
        let of_others: usize = others.map(lacks).sum();
        if self.users.is_empty() { 0 } else { of_others + guarantee }
    }

    /// Number of blocks that no volume owns.
    fn unowned(&self) -> usize {
        self.free.len() + self.cached.len()
    }

    /// Number of unowned blocks that a user may have: what it lacks to its guarantee, or more if
    /// enough are left for others.
    fn available(&self, user: &MempoolUser, guarantee: usize) -> usize {
        let free = self.unowned();
        let guaranteed = guarantee.saturating_sub(user.blocks()).min(free);
        guaranteed.max(free.saturating_sub(self.reserve(user, guarantee)))
    }

    /// Allocates a block that no volume owns. Returns `None` if only blocks are left that are
    /// pinned, or kept free for other users.
    ///
    /// What is kept free is not in the cache, where a block may be pinned. Unless `may_back` is
    /// true, a free block without memory is the last choice.
    fn allocate(&mut self, user: &MempoolUser, guarantee: usize, may_back: bool) -> Option<BlockId> {
        let reserve = self.reserve(user, guarantee);
        let has_free = user.blocks() < guarantee || self.free.len() > reserve;
        let block = if has_free && (may_back || !self.free.backed.is_empty()) {
            // A block without pages is worth less in the cache than memory of the system is.
            self.cached.remove_emptied().or_else(|| self.free.pop()).or_else(|| self.cached.remove())
        } else {
            self.cached.remove().or_else(|| if has_free { self.free.pop() } else { None })
        };
        while self.free.len() < reserve
            && let Some(freed) = self.cached.remove()
        {
            self.free.push(freed);
        }
        block
    }
}

/// The mempool of one host. Its size is fixed: when no block is free for a user,
/// [`Mempool::allocate`] returns `None`, and the caller must wait.
#[derive(Debug)]
pub struct Mempool {
    memory: Arc<Memory>,
    state: Mutex<MempoolState>,
    blocks: usize,
    is_pool_short: Arc<AtomicBool>,
    damaged_cached_pages: AtomicU64,
    /// Number of blocks that may have memory, see [`Self::set_backed_max`].
    backed_max: AtomicU64,
}

impl Mempool {
    /// A mempool of at most `bytes`, rounded down to whole blocks, but at least one block.
    ///
    /// # Errors
    /// If the system gives no address space for it.
    pub fn new(bytes: usize) -> std::io::Result<Self> {
        let blocks = (bytes / BLOCK_BYTES).clamp(1, 1 << 20);
        let memory = Memory::create("aquifer-mempool", blocks * BLOCK_BYTES)?;
        let free =
            (0..blocks).rev().map(|block| BlockId(u32::try_from(block).expect("at most 2^20"))).collect();
        Ok(Self::with(memory, blocks, FreeBlocks { backed: Vec::new(), unbacked: free }))
    }

    fn with(memory: Memory, blocks: usize, free: FreeBlocks) -> Self {
        let memory = Arc::new(memory);
        let cached = CachedBlocks::new(blocks, Arc::clone(&memory));
        let state = MempoolState { free, cached, users: Vec::new() };
        Self {
            memory,
            state: Mutex::new(state),
            blocks,
            is_pool_short: Arc::default(),
            damaged_cached_pages: AtomicU64::new(0),
            backed_max: AtomicU64::new(u64::MAX),
        }
    }

    /// Recovers the mempool that an earlier agent left in `memory`. No block is free before
    /// [`Self::finish_recovery`].
    #[must_use]
    pub fn recover(memory: Memory) -> Self {
        let blocks = memory.len() / BLOCK_BYTES;
        Self::with(memory, blocks, FreeBlocks::default())
    }

    /// Ends the recovery: all blocks but those in `used`, which the recovered volumes own, are
    /// free.
    pub fn finish_recovery(&self, used: &HashSet<BlockId>) {
        let mut free = FreeBlocks::default();
        let mut next_allocated = Some(0);
        for block in (0..self.blocks).map(|block| BlockId(u32::try_from(block).expect("at most 2^20"))) {
            let (start, end) = (block.slot(0).offset(), block.slot(0).offset() + BLOCK_BYTES);
            if next_allocated.is_some_and(|at| at < start) {
                // Without an answer the block counts as one with memory.
                next_allocated = self.memory.next_allocated(start).unwrap_or(Some(start));
            }
            let is_backed = next_allocated.is_some_and(|at| at < end);
            if !used.contains(&block) {
                if is_backed { free.backed.push(block) } else { free.unbacked.push(block) }
            }
        }
        free.unbacked.reverse();
        self.state.lock().free = free;
    }

    /// The memory of the slots, to be registered with endpoints.
    #[must_use]
    pub fn memory(&self) -> &Arc<Memory> {
        &self.memory
    }

    /// Returns the user with this id, which owns its subordinate ids. The result is the same as
    /// long as a volume of the user exists.
    #[must_use]
    pub fn user(&self, uid: u32) -> Arc<MempoolUser> {
        let mut state = self.state.lock();
        state.users.retain(|user| user.uid == uid || Arc::strong_count(user) > 1);
        if let Some(user) = state.users.iter().find(|user| user.uid == uid) {
            return Arc::clone(user);
        }
        let user = Arc::new(MempoolUser { uid, ..MempoolUser::default() });
        state.users.push(Arc::clone(&user));
        user
    }

    /// Allocates a block to a volume that has `owned` blocks, if one is free for it.
    #[must_use]
    pub fn allocate(&self, user: &MempoolUser, owned: usize) -> Option<BlockId> {
        let mut state = self.state.lock();
        let for_waiting = if owned > 0 { user.waiting.load(SeqCst) } else { 0 };
        if state.available(user, self.guarantee()) <= for_waiting {
            return None;
        }
        let may_back = self.may_back_block(&state);
        let block = state.allocate(user, self.guarantee(), may_back)?;
        user.blocks.fetch_add(1, Relaxed);
        Some(block)
    }

    /// Allocates any free block.
    #[must_use]
    pub(crate) fn allocate_any(&self, user: &MempoolUser) -> Option<BlockId> {
        let block = self.state.lock().free.pop()?;
        user.blocks.fetch_add(1, Relaxed);
        Some(block)
    }

    /// Frees a block of a user. None of its slots may be in use.
    pub fn free(&self, user: &MempoolUser, block: BlockId) {
        let mut state = self.state.lock();
        user.blocks.fetch_sub(1, Relaxed);
        state.free.push(block);
    }

    /// Sets how the users share the cache.
    pub fn set_cache_shares(&self, shares: CacheShares) {
        self.state.lock().cached.set_shares(shares);
    }

    /// The index of a run whose pages may stay in the cache.
    ///
    /// # Errors
    /// If the system gives no address space for it.
    pub fn new_cache_index(&self) -> std::io::Result<CacheIndex> {
        CacheIndex::new(Arc::clone(self.state.lock().cached.states()))
    }

    /// Frees a block of a user whose pages stay in the cache: those of `entries`, which are at the
    /// location, too.
    ///
    /// The caller must hold references to the locations.
    pub(crate) fn free_to_cache(
        &self,
        user: &MempoolUser,
        block: BlockId,
        index: &Arc<CacheIndex>,
        entries: &[(usize, Location)],
    ) {
        let mut state = self.state.lock();
        user.blocks.fetch_sub(1, Relaxed);
        if entries.is_empty() || state.free.len() < state.reserve(user, self.guarantee()) {
            state.free.push(block);
        } else if !state.cached.is_at_limit(user.uid) {
            state.cached.insert(user.uid, block, index, entries);
        } else if let Some(other) = state.cached.remove_of_user(user.uid) {
            state.free.push(other);
            state.cached.insert(user.uid, block, index, entries);
        } else {
            state.free.push(block);
        }
    }

    /// Exchanges a block of a user for another, as [`Self::free_to_cache`]. Returns the same block
    /// if there is no other.
    pub(crate) fn exchange(
        &self,
        user: &MempoolUser,
        block: BlockId,
        index: &Arc<CacheIndex>,
        entries: &[(usize, Location)],
    ) -> BlockId {
        if entries.is_empty() {
            return block;
        }
        let mut state = self.state.lock();
        let may_take_free = self.may_back_block(&state) || !state.free.backed.is_empty();
        let has_spare = may_take_free && state.free.len() > state.reserve(user, self.guarantee());
        let other = if state.cached.is_at_limit(user.uid) {
            state.cached.remove_of_user(user.uid)
        } else if has_spare {
            state.cached.remove_emptied().or_else(|| state.free.pop())
        } else {
            state.cached.remove()
        };
        let Some(other) = other else { return block };
        state.cached.insert(user.uid, block, index, entries);
        other
    }

    /// Drops all cached pages of a run that has ended.
    pub fn forget_cached(&self, user: &MempoolUser, slabs: &SlabSet) {
        let Some(index) = slabs.cache() else { return };
        let mut state = self.state.lock();
        while let Some(block) = state.cached.remove_of_run(user.uid, index) {
            state.free.push(block);
        }
    }

    /// Returns the memory of a block that no volume owns to the system: of a free block, or else of
    /// a cached one. Returns false if there is none, or if a device has pinned the mempool.
    ///
    /// The lock is held for the 20 to 60 µs of one block, so that a volume never finds fewer blocks
    /// than it is guaranteed.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn release_block_memory(&self) -> std::io::Result<bool> {
        let mut state = self.state.lock();
        let Some(block) = state.free.backed.pop().or_else(|| state.cached.remove()) else { return Ok(false) };
        let released = self.memory.release_pages(block.slot(0).offset(), BLOCK_BYTES);
        if matches!(released, Ok(true)) {
            state.free.unbacked.push(block);
        } else {
            state.free.backed.push(block);
        }
        released
    }

    /// Whether a block without memory may get some although cached blocks could be given away.
    fn may_back_block(&self, state: &MempoolState) -> bool {
        ((self.blocks - state.free.unbacked.len()) as u64) < self.backed_max.load(Relaxed)
    }

    /// Bytes of memory that the blocks have, at most.
    #[must_use]
    pub fn backed_bytes(&self) -> u64 {
        (self.blocks - self.state.lock().free.unbacked.len()) as u64 * BLOCK_BYTES as u64
    }

    /// Bytes of memory that blocks have which no volume owns, at most: they can be returned to the
    /// system.
    #[must_use]
    pub fn unowned_backed_bytes(&self) -> u64 {
        let state = self.state.lock();
        (state.free.backed.len() + state.cached.len()) as u64 * BLOCK_BYTES as u64
    }

    /// Sets the number of bytes that all blocks may have before cached blocks are given away in
    /// place of free blocks without memory.
    pub fn set_backed_max(&self, bytes: u64) {
        self.backed_max.store(bytes / BLOCK_BYTES as u64, Relaxed);
    }

    pub(crate) fn count_damaged_cached_page(&self) {
        self.damaged_cached_pages.fetch_add(1, Relaxed);
    }

    /// The number of cached pages whose bytes were wrong.
    #[must_use]
    pub fn damaged_cached_pages(&self) -> u64 {
        self.damaged_cached_pages.load(Relaxed)
    }

    /// The number of cached blocks.
    #[must_use]
    pub fn cached_block_count(&self) -> usize {
        self.state.lock().cached.len()
    }

    /// Bytes of the cached blocks of a run.
    #[must_use]
    pub fn cached_bytes_of(&self, slabs: &SlabSet) -> u64 {
        let blocks = slabs.cache().map_or(0, |index| self.state.lock().cached.len_of_run(index));
        blocks as u64 * BLOCK_BYTES as u64
    }

    /// The number of cached blocks of a user.
    #[must_use]
    pub fn cached_blocks_of(&self, user: &MempoolUser) -> usize {
        self.state.lock().cached.len_of(user.uid)
    }

    /// Whether a volume of a user must free an acknowledged block, because others wait for it.
    #[must_use]
    pub fn must_free_block(&self, user: &MempoolUser) -> bool {
        let guarantee = self.guarantee();
        if user.has_waiting() {
            return self.state.lock().available(user, guarantee) < user.waiting.load(SeqCst);
        }
        if user.blocks() <= guarantee {
            return false;
        }
        let state = self.state.lock();
        state.unowned() < state.reserve(user, guarantee)
    }

    /// The guarantee of each user, in blocks.
    fn guarantee(&self) -> usize {
        (self.blocks / GUARANTEE_DIVISOR).clamp(GUARANTEE_MIN, GUARANTEE_MAX).min(self.blocks / 2)
    }

    /// Whether the pool is short of memory for volumes that belong to no user.
    #[must_use]
    pub fn is_pool_short(&self) -> bool {
        self.is_pool_short.load(Relaxed)
    }

    /// The flag behind [`Self::is_pool_short`], which senders without a user set.
    pub(crate) fn pool_short_flag(&self) -> &Arc<AtomicBool> {
        &self.is_pool_short
    }

    /// The number of blocks.
    #[must_use]
    pub fn blocks(&self) -> usize {
        self.blocks
    }

    /// The number of blocks that no volume owns.
    #[must_use]
    pub fn free_block_count(&self) -> usize {
        self.state.lock().unowned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_blocks_can_be_allocated_and_freed() {
        let pool = Mempool::new(3 * BLOCK_PAGES * PAGE_BYTES + 5).unwrap();
        assert_eq!(pool.blocks(), 3);
        let user = MempoolUser::default();
        let blocks: Vec<_> = (0..3).map(|_| pool.allocate(&user, 0).unwrap()).collect();
        assert_eq!(pool.allocate(&user, 3), None, "all blocks are in use");
        pool.free(&user, blocks[1]);
        assert_eq!(pool.allocate(&user, 2), Some(blocks[1]));
    }

    #[test]
    fn a_user_cannot_hold_the_guarantee_of_others() {
        let pool = Mempool::new(64 * BLOCK_PAGES * PAGE_BYTES).unwrap();
        let first = pool.user(1);
        let owned: Vec<_> = std::iter::from_fn(|| pool.allocate(&first, 1)).collect();
        assert_eq!(owned.len(), 60, "four are kept for the next user");
        assert!(!pool.must_free_block(&first));
        let second = pool.user(2);
        assert!(pool.must_free_block(&first) && !pool.must_free_block(&second));
        let of_second: Vec<_> = std::iter::from_fn(|| pool.allocate(&second, 1)).collect();
        assert_eq!(of_second.len(), 4);
        owned.into_iter().take(10).for_each(|block| pool.free(&first, block));
        assert_eq!(std::iter::from_fn(|| pool.allocate(&second, 1)).count(), 6, "but for the next user's");
        assert_eq!(pool.allocate(&first, 1), None);
    }

    #[test]
    fn users_without_volumes_have_no_guarantee() {
        let pool = Mempool::new(64 * BLOCK_PAGES * PAGE_BYTES).unwrap();
        (10..20).for_each(|uid| drop(pool.user(uid)));
        let user = pool.user(1);
        assert!(Arc::ptr_eq(&user, &pool.user(1)));
        assert_eq!(std::iter::from_fn(|| pool.allocate(&user, 1)).count(), 60);
    }

    #[test]
    fn the_memory_of_free_blocks_returns_to_the_system() {
        let pool = Mempool::new(8 * BLOCK_BYTES).unwrap();
        let user = MempoolUser::default();
        let blocks: Vec<_> = (0..3).map(|_| pool.allocate(&user, 0).unwrap()).collect();
        blocks.iter().for_each(|block| pool.memory().write(block.slot(7).offset(), &[1; PAGE_BYTES]));
        assert_eq!(pool.backed_bytes(), 3 * BLOCK_BYTES as u64);
        assert!(!pool.release_block_memory().unwrap(), "the blocks are in use");
        pool.free(&user, blocks[1]);
        assert!(pool.release_block_memory().unwrap() && !pool.release_block_memory().unwrap());
        assert_eq!(pool.memory().allocated_bytes().unwrap(), 2 * PAGE_BYTES as u64);
        let recovered =
            Mempool::recover(Memory::whole(pool.memory().fd().try_clone_to_owned().unwrap()).unwrap());
        recovered.finish_recovery(&HashSet::from([blocks[0]]));
        assert_eq!(recovered.backed_bytes(), 2 * BLOCK_BYTES as u64);
        assert!(recovered.release_block_memory().unwrap() && !recovered.release_block_memory().unwrap());
        assert_eq!(recovered.memory().allocated_bytes().unwrap(), PAGE_BYTES as u64);
        assert_eq!(recovered.free_block_count(), 7);
    }

    #[test]
    fn a_volume_without_a_block_goes_first() {
        let pool = Mempool::new(8 * BLOCK_PAGES * PAGE_BYTES).unwrap();
        let user = MempoolUser::default();
        let owned: Vec<_> = (0..8).map(|_| pool.allocate(&user, 1).unwrap()).collect();
        assert!(!pool.must_free_block(&user));
        user.begin_waiting();
        assert!(pool.must_free_block(&user));
        pool.free(&user, owned[0]);
        assert!(!pool.must_free_block(&user) && pool.allocate(&user, 1).is_none());
        assert!(pool.allocate(&user, 0).is_some());
        user.end_waiting();
    }

    #[test]
    fn a_volume_without_a_block_does_not_wait_for_those_of_other_users() {
        let pool = Mempool::new(8 * BLOCK_PAGES * PAGE_BYTES).unwrap();
        let user = pool.user(1);
        let owned: Vec<_> = std::iter::from_fn(|| pool.allocate(&user, 1)).collect();
        assert_eq!((owned.len(), pool.free_block_count()), (4, 4), "four are kept for the next user");
        user.begin_waiting();
        assert_eq!(pool.allocate(&user, 0), None);
        assert!(pool.must_free_block(&user));
        pool.free(&user, owned[0]);
        assert!(!pool.must_free_block(&user));
        assert_eq!(pool.allocate(&user, 3), None, "a volume with blocks");
        assert!(pool.allocate(&user, 0).is_some());
        user.end_waiting();
    }

    #[test]
    fn slots_know_their_block() {
        let slot = BlockId(5).slot(63);
        assert_eq!(slot.block(), (BlockId(5), 63));
        assert_eq!(slot.offset(), (5 * 64 + 63) * PAGE_BYTES);
    }
}
