//! Repacking: moves pages out of slabs that are to become empty, while nothing else waits.

use std::sync::atomic::{Ordering::Release, fence};

use aquifer_pager::{BLOCK_PAGES, Batch, BlockId, Mutation, PAGE_BYTES, PageNumber, PageState, Volume};

use super::Monitor;
use crate::edge::Edge;
use crate::stats::FaultStats;

/// Maximum number of leaves of the page table (512 pages each) that are searched in one turn.
const PARTS_PER_TURN: usize = 64;

/// Progress of this program in the current round of repacking.
#[derive(Debug, Default)]
pub(super) struct RepackProgress {
    round: u64,
    /// First page that is not yet searched; `None` if all were.
    next: Option<PageNumber>,
    /// Pages that the search has found and that are not yet moved.
    pages: Batch,
    /// Block of moved pages that is not yet acknowledged.
    unacknowledged: Option<BlockId>,
}

impl RepackProgress {
    /// Records that memory nodes have acknowledged a block.
    pub(super) fn written(&mut self, block: BlockId) {
        self.unacknowledged.take_if(|other| *other == block);
    }
}

impl<E: Edge> Monitor<E> {
    /// Searches for pages to move, and moves up to one block of them. Returns whether the next turn
    /// should follow at once.
    pub(super) fn repack(&mut self) -> bool {
        let Some(round) = self.volume.slabs().vacating_round() else { return false };
        let is_busy = !self.pending.is_empty() || self.budget.excess() > 0;
        if self.has_ended || is_busy || self.repacking.unacknowledged.is_some() {
            return false;
        }
        if self.repacking.round != round {
            self.repacking = RepackProgress { round, next: Some(0), ..RepackProgress::default() };
        }
        let RepackProgress { next, pages, .. } = &mut self.repacking;
        for _ in 0..PARTS_PER_TURN {
            match *next {
                Some(from) if pages.len() < BLOCK_PAGES => {
                    *next = self.volume.find_pages_to_move(from, pages)
                }
                _ => break,
            }
        }
        if pages.len() < BLOCK_PAGES && next.is_some() {
            return true;
        }
        if pages.is_empty() {
            return false;
        }
        // Without a block, the next signal of the sampler retries this. During a round it signals
        // every few milliseconds.
        let Some(open) = self.volume.open_block() else { return false };
        let count = pages.len().min(BLOCK_PAGES);
        let batch: Batch = pages.drain(..count).collect();
        self.move_pages(open, &batch);
        let sealed = self.volume.seal(open);
        FaultStats::add(&self.stats.repacked, sealed.count);
        self.repacking.unacknowledged = Some(open);
        self.edge.submit_block(open, sealed.newest);
        false
    }

    /// Copies pages from their slots or from memory nodes into an open block.
    fn move_pages(&mut self, open: BlockId, pages: &[PageNumber]) {
        let mut remote = Batch::with_capacity(pages.len());
        self.locations.clear();
        for page in pages {
            match self.volume.state_if_to_move(*page) {
                Some(PageState::Reclaimable(slot)) => {
                    let mut bytes = [0; PAGE_BYTES];
                    self.volume.mempool().memory().read(slot.offset(), &mut bytes);
                    absorb_page(&mut self.volume, open, *page, &bytes);
                }
                Some(PageState::Remote(location)) => {
                    self.locations.push(location);
                    remote.push(*page);
                }
                _ => {}
            }
        }
        let mut at = 0;
        while at < remote.len() {
            match self.edge.fetch(self.volume.slabs(), &self.locations[at..]) {
                Ok(fetched) => {
                    for (index, page) in remote[at..at + fetched].iter().enumerate() {
                        self.move_fetched(open, *page, index);
                    }
                    at += fetched;
                }
                // The pages stay where they are; a fault on one reports the loss. Asking an
                // unreachable node for each page would delay the faults of the program.
                Err(_) => {
                    self.repacking.pages.clear();
                    self.repacking.next = None;
                    return;
                }
            }
        }
    }

    fn move_fetched(&mut self, open: BlockId, page: PageNumber, index: usize) {
        if Mutation::StageBeforeCopying.is_active() {
            let slot = self.volume.absorb(open, page);
            self.volume.mempool().memory().write(slot.offset(), self.edge.fetched_page(index));
        } else {
            absorb_page(&mut self.volume, open, page, self.edge.fetched_page(index));
        }
    }
}

/// Copies a page into an open block.
///
/// The bytes must be in the slot before the page word names it: an agent that resumes trusts the
/// page word.
fn absorb_page(volume: &mut Volume, open: BlockId, page: PageNumber, bytes: &[u8]) {
    volume.mempool().memory().write(volume.next_slot(open).offset(), bytes);
    fence(Release);
    volume.absorb(open, page);
}
