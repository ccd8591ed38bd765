//! Pages leave the program while it is too close to its limit.

use aquifer_pager::{BLOCK_PAGES, Batch, BlockId};

use super::Monitor;
use crate::edge::{Edge, Job};
use crate::kernel::Taken;
use crate::stats::FaultStats;

/// Pages kept free below the limit, so that faults seldom wait for room.
pub(crate) const SPARE_PAGES: u64 = 2 * BLOCK_PAGES as u64;
/// After a batch of which nothing could be taken, no other is tried for this long.
const STALL_NS: u64 = 4_000_000;
/// Pages shared since a fork that are looked at together, and how long after a look the next may follow: at least so long, and a
/// multiple of what the look took.
const REVIEW_PAGES: usize = 1024;
const REVIEW_NS: u64 = 1_000_000;
const REVIEW_REST: u64 = 4;
/// What lies so close together is looked at in one go, with what lies between.
const REVIEW_GAP_PAGES: u64 = 256;
/// A program keeps so many pages under any limit: more than one instruction of a thread can need at once.
const FLOOR_PAGES: u64 = 8;

impl<E: Edge> Monitor<E> {
    /// Take pages out of the program while it is too close to its limit.
    pub fn make_room(&mut self) {
        self.volume.give_up_copies_if_short();
        while self.volume.pass_block() {
            self.tell_of_block();
        }
        if self.budget.excess(SPARE_PAGES) > 0 && self.edge.now_ns() >= self.next_review_ns {
            self.review_inherited();
        }
        self.lacks_block = false;
        self.wants_block = false;
        while !self.ended
            && self.budget.excess(SPARE_PAGES) > 0
            && !self.free_buffers.is_empty()
            && self.volume.held() > FLOOR_PAGES
            && self.edge.has_worker()
            && self.edge.now_ns() >= self.stalled_until_ns
        {
            if !self.take_batch() {
                break;
            }
        }
        if !self.wants_block {
            self.volume.need_no_block();
        }
        self.tell_of_block();
    }

    /// What a child shared with its parent it may have for itself by now: it or the parent wrote there, or one of them is gone.
    fn review_inherited(&mut self) {
        self.victims.clear();
        self.volume.next_inherited(REVIEW_PAGES, &mut self.victims);
        if self.victims.is_empty() {
            return;
        }
        let start_ns = self.edge.now_ns();
        self.victims.sort_unstable();
        let mut alone = std::mem::take(&mut self.present);
        alone.clear();
        for span in self.victims.chunk_by(|one, next| next - one <= REVIEW_GAP_PAGES) {
            self.edge.alone(span[0], span[span.len() - 1] + 1, &mut alone);
        }
        let mut found = alone.iter().peekable();
        for page in &self.victims {
            while found.next_if(|other| *other < page).is_some() {}
            if found.next_if_eq(&page).is_some() {
                self.volume.claim(*page);
            } else {
                self.volume.leave_shared(*page);
            }
        }
        let now_ns = self.edge.now_ns();
        self.next_review_ns = now_ns + REVIEW_NS.max((now_ns - start_ns) * REVIEW_REST);
        self.present = alone;
    }

    fn take_batch(&mut self) -> bool {
        let Some(block) = self.take_block() else {
            self.wants_block = true;
            self.lacks_block = self.volume.lacks_block();
            return false;
        };
        let over = self.budget.excess(0) > 0;
        self.victims.clear();
        let edge = &self.edge;
        let surplus = self.volume.held().saturating_sub(FLOOR_PAGES);
        let max = usize::try_from(surplus).unwrap_or(usize::MAX).min(BLOCK_PAGES);
        self.volume.pick_victims(max, over, |page| edge.is_pinned(page), &mut self.victims);
        if self.victims.is_empty() {
            self.return_block(block);
            if over && !std::mem::replace(&mut self.has_nudged, true) {
                self.edge.nudge_others();
            }
            return false;
        }
        let buffer = self.free_buffers.pop().expect("the caller looked");
        self.taken.clear();
        if self.edge.take(buffer, &self.victims, &mut self.taken).is_err() {
            // What had left is gone with the program.
            self.victims.iter().for_each(|page| self.volume.refused(*page));
            self.return_block(block);
            self.ended = true;
            return false;
        }
        self.book_batch(block, buffer)
    }

    /// A block for a batch; if there is none, its turn comes, and this monitor is told.
    pub(super) fn take_block(&mut self) -> Option<BlockId> {
        self.volume.take_block().or_else(|| {
            if self.volume.ask_for_block() {
                self.edge.nudge_others();
            }
            // It may have been given back before it was asked for.
            self.volume.take_block()
        })
    }

    fn return_block(&mut self, block: BlockId) {
        self.volume.return_block(block);
        self.tell_of_block();
    }

    /// A block was given back.
    pub(super) fn tell_of_block(&mut self) {
        if self.budget.is_block_to_tell() {
            self.edge.nudge_others();
        }
    }

    fn book_batch(&mut self, block: BlockId, buffer: usize) -> bool {
        let mut positions = Vec::with_capacity(BLOCK_PAGES);
        let victims = std::mem::take(&mut self.victims);
        let mut moved = Batch::with_capacity(BLOCK_PAGES);
        for (position, (page, taken)) in victims.iter().zip(&self.taken).enumerate() {
            match taken {
                Taken::Moved => {
                    positions.push(u8::try_from(position).expect("batches are small"));
                    moved.push(*page);
                }
                Taken::Kept => self.volume.refused(*page),
                Taken::Absent => self.volume.vanished(*page),
            }
        }
        self.victims = victims;
        if moved.is_empty() {
            self.return_block(block);
            self.edge.emptied(buffer);
            self.free_buffers.push(buffer);
            if self.taken.contains(&Taken::Kept) {
                self.stalled_until_ns = self.edge.now_ns() + STALL_NS;
                return false;
            }
            return true;
        }
        self.nothing_outstanding();
        FaultStats::add(&self.stats.evictions, moved.len());
        self.volume.left(block, &moved);
        let copies = moved.iter().map(|page| self.volume.copy(*page)).collect();
        self.edge.submit(Job { block, buffer, positions, copies });
        true
    }
}
