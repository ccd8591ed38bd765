//! Eviction: moves pages out of the program while it is close to its limit.

use aquifer_pager::{BLOCK_PAGES, BlockId, Mutation, PageNumber};
use smallvec::SmallVec;

use super::Monitor;
use crate::edge::{Edge, EvictedBatch, OtherPrograms};
use crate::kernel::{MoveOutcome, ProgramEnded};
use crate::stats::FaultStats;

/// Number of pages kept free below the limit, so that faults seldom wait for room.
pub(crate) const SPARE_PAGES: u64 = 2 * BLOCK_PAGES as u64;
/// Time in ns without another attempt after a batch of which no page could be moved.
const STALL_NS: u64 = 4_000_000;
/// Maximum number of inherited pages that are checked in one pass.
const CLAIM_PAGES: usize = 1024;
/// Minimum time in ns between two passes.
const CLAIM_INTERVAL_NS: u64 = 1_000_000;
/// Minimum time between two passes, as a multiple of the duration of the last pass.
const CLAIM_INTERVAL_FACTOR: u64 = 4;
/// Maximum distance of two pages that are checked in one read of `/proc/PID/pagemap`.
const CLAIM_GAP_PAGES: u64 = 256;
/// Number of pages that a program keeps under any limit: more than one instruction can need at
/// once.
const HELD_PAGES_MIN: u64 = 8;

impl<E: Edge> Monitor<E> {
    /// Evicts pages while the program is too close to its limit.
    pub fn make_room(&mut self) {
        self.volume.release_clean_copies_if_short();
        while self.volume.pass_block() {
            self.announce_free_block();
        }
        if self.budget.surplus(SPARE_PAGES) > 0 && self.edge.now_ns() >= self.next_claim_ns {
            self.claim_exclusive();
        }
        self.lacks_block = false;
        self.wants_block = false;
        while !self.has_ended
            && self.budget.surplus(SPARE_PAGES) > 0
            && !self.free_buffers.is_empty()
            && self.volume.held() > HELD_PAGES_MIN
            && self.edge.has_worker()
            && self.edge.now_ns() >= self.stalled_until_ns
        {
            if !self.evict_batch() {
                break;
            }
        }
        if !self.wants_block {
            self.volume.leave_block_queue();
            self.edge.set_waits_for_block(false);
        }
        self.announce_free_block();
    }

    /// Claims inherited pages that no other process shares any more.
    ///
    /// A child shares its pages with its parent until one of both writes them or ends.
    fn claim_exclusive(&mut self) {
        self.victims.clear();
        self.volume.next_inherited(CLAIM_PAGES, &mut self.victims);
        if self.victims.is_empty() {
            return;
        }
        let start_ns = self.edge.now_ns();
        self.victims.sort_unstable();
        let mut exclusive = std::mem::take(&mut self.present);
        exclusive.clear();
        for span in self.victims.chunk_by(|one, next| next - one <= CLAIM_GAP_PAGES) {
            self.edge.exclusive_pages(span[0], span[span.len() - 1] + 1, &mut exclusive);
        }
        let mut found = exclusive.iter().peekable();
        for page in &self.victims {
            while found.next_if(|other| *other < page).is_some() {}
            if found.next_if_eq(&page).is_some() {
                self.volume.claim(*page);
            } else {
                self.volume.requeue_inherited(*page);
            }
        }
        let now_ns = self.edge.now_ns();
        self.next_claim_ns = now_ns + CLAIM_INTERVAL_NS.max((now_ns - start_ns) * CLAIM_INTERVAL_FACTOR);
        self.present = exclusive;
    }

    /// Evicts one batch. Returns whether another attempt may follow at once.
    fn evict_batch(&mut self) -> bool {
        let Some(block) = self.allocate_block() else {
            self.wants_block = true;
            self.lacks_block = self.volume.lacks_block();
            return false;
        };
        if Mutation::IgnorePins.is_active() {
            return self.evict_into(block);
        }
        self.edge.lock_pins();
        let may_go_on = self.evict_into(block);
        self.edge.unlock_pins();
        may_go_on
    }

    /// Evicts one batch into a block. Returns whether another attempt may follow at once.
    fn evict_into(&mut self, block: BlockId) -> bool {
        let is_over_limit = self.budget.excess() > 0;
        self.victims.clear();
        let edge = &self.edge;
        let surplus = self.volume.held().saturating_sub(HELD_PAGES_MIN);
        let max = usize::try_from(surplus).unwrap_or(usize::MAX).min(BLOCK_PAGES);
        self.volume.pick_victims(max, is_over_limit, |page| edge.is_pinned(page), &mut self.victims);
        if self.victims.is_empty() {
            self.free_block(block);
            if is_over_limit && !std::mem::replace(&mut self.has_woken_others, true) {
                self.edge.wake_others(OtherPrograms::WithPages);
            }
            return false;
        }
        let buffer = self.free_buffers.pop().expect("make_room has checked that a buffer is free");
        self.move_outcomes.clear();
        self.edge.begin_move_out(buffer, &self.victims);
        if Mutation::ReadWhileMoving.is_active() {
            self.read_and_apply();
        }
        loop {
            match self.edge.finish_move_out(buffer, &self.victims, &mut self.move_outcomes) {
                Ok(true) => return self.record_batch(block, buffer),
                Ok(false) => self.release_blocks(),
                Err(ProgramEnded) => break,
            }
        }
        // The moved pages are lost with the program. The worker ends when no buffer is in use.
        self.edge.release_buffer(buffer);
        self.victims.iter().for_each(|page| self.volume.refused(*page));
        self.free_block(block);
        self.has_ended = true;
        false
    }

    /// Releases blocks that other programs wait for, while the worker cannot run.
    fn release_blocks(&mut self) {
        self.apply_sender_events();
        while self.volume.pass_block() {
            self.announce_free_block();
        }
    }

    /// Allocates a block for a batch. If there is none, queues this program, and wakes the programs
    /// that can pass one on.
    pub(super) fn allocate_block(&mut self) -> Option<BlockId> {
        let waited = self.volume.waits_in_mempool();
        let block = self.volume.allocate_block().or_else(|| {
            // Set before this program is queued, because a program that frees a block after that
            // must see it.
            self.edge.set_waits_for_block(true);
            if self.volume.queue_for_block() {
                self.edge.wake_others(OtherPrograms::WithBlocks);
            }
            // A block may have been freed before this program was queued.
            self.volume.allocate_block()
        });
        // Either attempt may have found that the mempool has no block, rather than the share.
        if !waited && self.volume.waits_in_mempool() {
            self.edge.wake_others(OtherPrograms::AllWithBlocks);
        }
        block
    }

    fn free_block(&mut self, block: BlockId) {
        self.volume.free_block(block);
        self.announce_free_block();
    }

    /// Wakes the programs that wait for a block if one was freed.
    pub(super) fn announce_free_block(&mut self) {
        if self.budget.consume_block_notification() {
            self.edge.wake_others(OtherPrograms::WithoutBlock);
        }
        if !self.volume.waits_in_mempool() && self.budget.mempool_user().has_waiting() {
            self.edge.wake_others(OtherPrograms::UsersWithoutBlock);
        }
    }

    /// Records the outcomes of the worker, and submits the pages that were moved.
    fn record_batch(&mut self, block: BlockId, buffer: usize) -> bool {
        let mut positions = SmallVec::new();
        let victims = std::mem::take(&mut self.victims);
        let mut moved = SmallVec::<[PageNumber; BLOCK_PAGES]>::new();
        for (position, (page, outcome)) in victims.iter().zip(&self.move_outcomes).enumerate() {
            match outcome {
                MoveOutcome::Moved => {
                    positions.push(u8::try_from(position).expect("batches are small"));
                    moved.push(*page);
                }
                MoveOutcome::Kept => self.volume.refused(*page),
                MoveOutcome::Absent => self.volume.vanished(*page),
            }
        }
        self.victims = victims;
        if moved.is_empty() {
            self.free_block(block);
            self.edge.release_buffer(buffer);
            self.free_buffers.push(buffer);
            if self.move_outcomes.contains(&MoveOutcome::Kept) {
                self.stalled_until_ns = self.edge.now_ns() + STALL_NS;
                return false;
            }
            return true;
        }
        self.forget_pending_unmaps();
        FaultStats::add(&self.stats.evictions, moved.len());
        self.volume.left(block, &moved);
        let clean_copies = moved.iter().map(|page| self.volume.clean_copy(*page)).collect();
        self.edge.submit_batch(EvictedBatch { block, buffer, positions, clean_copies });
        if Mutation::ReuseStaging.is_active() {
            self.free_buffers.push(buffer);
        }
        true
    }
}
