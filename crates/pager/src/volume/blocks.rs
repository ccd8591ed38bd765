//! The volume's blocks of the mempool: had, kept while they may be asked for again, and passed on to relatives that have none.

use super::{BlockPhase, Volume};
use crate::mempool::BlockId;
use crate::mutation::Mutation;
use crate::page::PageState;

impl Volume {
    /// Get a block for the next batch: a fresh one within the run's share, else the oldest reclaimable one.
    /// `None` while everything waits for acknowledgements, or a relative has it: see [`Self::pass_block`].
    pub fn allocate_block(&mut self) -> Option<BlockId> {
        if let Some(block) = self.reserved.pop() {
            return Some(block);
        }
        while self.budget.has_surplus_blocks()
            && let Some(block) = self.reclaim_oldest()
        {
            self.free_block(block);
        }
        if self.budget.try_reserve_block() {
            if let Some(block) = self.mempool.allocate() {
                return Some(block);
            }
            // It is the host's mempool that has none: relatives could not use it either.
            self.budget.cancel_block();
        }
        self.reclaim_oldest()
    }

    /// Ask relatives for a block, if this volume has less than its part, and wait for it; whether they are to be told of that.
    #[must_use]
    pub fn queue_for_block(&mut self) -> bool {
        self.budget.queue_for_block(self.blocks_in_flight as u64)
    }

    /// This volume does not need the block that it may have asked for. Who comes next is to be told: [`crate::Budget::consume_block_notification`].
    pub fn leave_block_queue(&mut self) {
        self.budget.leave_block_queue();
    }

    /// Whether relatives have all blocks. To be looked at after asking: they pass one on as soon as they can, and tell.
    #[must_use]
    pub fn lacks_block(&self) -> bool {
        self.blocks_in_flight == 0 && self.reclaimable.is_empty() && self.budget.is_share_exhausted()
    }

    /// Give back a block that [`Self::allocate_block`] gave and no batch used. Who waits for one is to be told: [`crate::Budget::consume_block_notification`].
    pub fn free_block(&mut self, block: BlockId) {
        self.mempool.free(block);
        self.budget.release_block();
    }

    /// Give the oldest reclaimable block back if a relative lacks one and this volume has more than its part; whether it did.
    pub fn pass_block(&mut self) -> bool {
        let blocks = self.reclaimable.len() + self.blocks_in_flight;
        if !self.budget.should_pass_block(blocks as u64) {
            return false;
        }
        let passed = self.reclaim_oldest();
        passed.inspect(|block| self.free_block(*block)).is_some()
    }

    /// Take the oldest acknowledged block out of the mempool; its pages are then remote only.
    fn reclaim_oldest(&mut self) -> Option<BlockId> {
        let id = if Mutation::ReclaimUnacknowledged.is_active() {
            let staged = self.blocks.iter().flatten().find(|block| block.phase != BlockPhase::Leaving)?.id;
            self.reclaimable.retain(|other| *other != staged);
            staged
        } else {
            self.reclaimable.pop_front()?
        };
        let block = self.blocks[id.0 as usize].take().expect("queued blocks are in use");
        if block.phase == BlockPhase::Staged {
            self.blocks_in_flight -= 1;
        }
        for (index, page) in block.pages.iter().enumerate() {
            let word = self.table.get(*page);
            if word.state() == PageState::Reclaimable(id.slot(index)) {
                let location = block.locations[index].expect("reclaimable pages have a location");
                self.table.set(*page, word.with_state(PageState::Remote(location)));
            }
        }
        self.spare_blocks.push(block);
        Some(id)
    }

    /// Empty the mempool of this volume as far as it is acknowledged.
    pub fn reclaim_all(&mut self) {
        while let Some(id) = self.reclaim_oldest() {
            self.free_block(id);
        }
    }
}
