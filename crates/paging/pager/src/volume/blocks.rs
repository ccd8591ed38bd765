//! The volume's blocks of the mempool: allocating them, reclaiming them, and passing them to
//! relatives that have none.

use super::{BlockPhase, Volume};
use crate::mempool::BlockId;
use crate::mutation::Mutation;
use crate::page::PageState;

impl Volume {
    /// Allocates a block for the next batch: a free one within the run's share, or else the oldest
    /// reclaimable one.
    ///
    /// Returns `None` if all blocks wait for acknowledgements or belong to relatives (see
    /// [`Self::pass_block`]).
    pub fn allocate_block(&mut self) -> Option<BlockId> {
        if let Some(block) = self.reserved.pop() {
            return Some(block);
        }
        while self.budget.has_surplus_blocks()
            && let Some(block) = self.reclaim_oldest()
        {
            self.free_reclaimed(block);
        }
        if self.budget.try_reserve_block() {
            let owned = self.blocks_in_flight + self.reclaimable.len();
            if let Some(block) = self.mempool.allocate(self.budget.mempool_user(), owned) {
                self.set_waits_in_mempool(false);
                return Some(block);
            }
            // The mempool of the host has no free block, so relatives could not use the reservation
            // either.
            self.budget.cancel_block();
            self.set_waits_in_mempool(owned == 0);
        }
        self.exchange_oldest()
    }

    /// Reclaims the oldest acknowledged block, and returns another block in its place, so that its
    /// pages stay in the cache.
    fn exchange_oldest(&mut self) -> Option<BlockId> {
        let block = self.reclaim_oldest()?;
        let Some(cache) = self.slabs.cache() else { return Some(block) };
        Some(self.mempool.exchange(self.budget.mempool_user(), block, cache, &self.reclaimed_pages))
    }

    /// Frees a block that was just reclaimed. Its pages stay in the cache as long as there is room.
    fn free_reclaimed(&mut self, block: BlockId) {
        match self.slabs.cache() {
            Some(cache) => {
                let user = self.budget.mempool_user();
                self.mempool.free_to_cache(user, block, cache, &self.reclaimed_pages);
            }
            None => self.mempool.free(self.budget.mempool_user(), block),
        }
        self.budget.release_block();
    }

    /// Sets whether volumes of the same user that have blocks must free one for this volume.
    pub(super) fn set_waits_in_mempool(&mut self, waits: bool) {
        if std::mem::replace(&mut self.waits_in_mempool, waits) != waits {
            let user = self.budget.mempool_user();
            if waits { user.begin_waiting() } else { user.end_waiting() }
        }
    }

    /// Whether this volume has no block, and waits until the mempool has one for it.
    #[must_use]
    pub fn waits_in_mempool(&self) -> bool {
        self.waits_in_mempool
    }

    /// Queues this volume for a block if it owns less than its fair share. Returns true if newly
    /// queued; then the caller must notify the relatives.
    #[must_use]
    pub fn queue_for_block(&mut self) -> bool {
        self.budget.queue_for_block(self.blocks_in_flight as u64)
    }

    /// Leaves the queue for blocks. The caller must then check
    /// [`crate::Budget::consume_block_notification`].
    pub fn leave_block_queue(&mut self) {
        self.budget.leave_block_queue();
        self.set_waits_in_mempool(false);
    }

    /// Whether this volume owns no block, and relatives own all blocks of the share or others all
    /// blocks of the mempool.
    ///
    /// Must be called after [`Self::queue_for_block`]: a relative then passes a block as soon as it
    /// can, and notifies.
    #[must_use]
    pub fn lacks_block(&self) -> bool {
        let has_none = self.blocks_in_flight == 0 && self.reclaimable.is_empty();
        has_none && (self.waits_in_mempool || self.budget.is_share_exhausted())
    }

    /// Whether this volume owns a block.
    #[must_use]
    pub fn owns_blocks(&self) -> bool {
        self.blocks_in_flight > 0 || !self.reclaimable.is_empty()
    }

    /// Frees a block from [`Self::allocate_block`] that no batch uses. The caller must then check
    /// [`crate::Budget::consume_block_notification`].
    pub fn free_block(&mut self, block: BlockId) {
        self.mempool.free(self.budget.mempool_user(), block);
        self.budget.release_block();
    }

    /// Frees the oldest reclaimable block if a relative is queued and this volume owns more than
    /// its fair share, or if others wait for blocks of the mempool. Returns whether it did.
    pub fn pass_block(&mut self) -> bool {
        let blocks = self.reclaimable.len() + self.blocks_in_flight;
        let must_pass = self.budget.should_pass_block(blocks as u64)
            || !self.reclaimable.is_empty() && self.mempool.must_free_block(self.budget.mempool_user());
        if !must_pass {
            return false;
        }
        let passed = self.reclaim_oldest();
        passed.inspect(|block| self.free_reclaimed(*block)).is_some()
    }

    /// Reclaims the oldest acknowledged block: its pages are remote from then on.
    fn reclaim_oldest(&mut self) -> Option<BlockId> {
        let id = if Mutation::ReclaimUnacknowledged.is_active() {
            let staged = self.blocks.iter().find(|block| block.phase != BlockPhase::Leaving)?.id;
            self.reclaimable.retain(|other| *other != staged);
            staged
        } else {
            self.reclaimable.pop_front()?
        };
        let block = self.blocks.remove(id);
        if block.phase == BlockPhase::Staged {
            self.blocks_in_flight -= 1;
        }
        self.reclaimed_pages.clear();
        for (index, page) in block.pages.iter().enumerate() {
            let word = self.table.get(*page);
            if word.state() == PageState::Reclaimable(id.slot(index)) {
                let location = block.locations[index].expect("reclaimable pages have a location");
                self.reclaimed_pages.push((index, location));
                self.table.set(*page, word.with_state(PageState::Remote(location)));
            }
        }
        self.spare_blocks.push(block);
        Some(id)
    }

    /// Frees all acknowledged blocks of this volume.
    pub fn reclaim_all(&mut self) {
        while let Some(id) = self.reclaim_oldest() {
            self.free_reclaimed(id);
        }
    }
}
