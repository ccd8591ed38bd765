//! Pages on memory nodes are moved out of slabs that are to become empty, while the program waits for nothing.

use std::sync::atomic::{Ordering::Release, fence};

use aquifer_pager::{BLOCK_PAGES, Batch, BlockId, Mutation, PAGE_BYTES, PageNumber, PageState, Volume};

use super::Monitor;
use crate::edge::Edge;
use crate::stats::FaultStats;

/// Parts of the page table, 512 pages each, that are looked through in one turn.
const PARTS_PER_TURN: usize = 64;

/// How far this program is with the round of vacating slabs that is under way.
#[derive(Debug, Default)]
pub(super) struct RepackProgress {
    round: u64,
    /// Where to look on; `None` when all was looked through.
    next: Option<PageNumber>,
    /// Found, and not moved yet.
    pages: Batch,
    /// Moved pages that no memory node has acknowledged yet.
    under_way: Option<BlockId>,
}

impl RepackProgress {
    /// A block is on memory nodes.
    pub(super) fn written(&mut self, block: BlockId) {
        self.under_way.take_if(|other| *other == block);
    }
}

impl<E: Edge> Monitor<E> {
    /// Look for pages to move, and move a block of them at most; whether there is more to do at once.
    pub(super) fn repack(&mut self) -> bool {
        let Some(round) = self.volume.slabs().vacating_round() else { return false };
        let is_busy = !self.pending.is_empty() || self.budget.excess(0) > 0;
        if self.has_ended || is_busy || self.repacking.under_way.is_some() {
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
        // If there is no block this is tried again when the sampler has the monitors look, as it does while a round lasts.
        let Some(open) = self.volume.open_block() else { return false };
        let count = pages.len().min(BLOCK_PAGES);
        let batch: Batch = pages.drain(..count).collect();
        self.move_pages(open, &batch);
        let sealed = self.volume.seal(open);
        FaultStats::add(&self.stats.repacked, sealed.count);
        self.repacking.under_way = Some(open);
        self.edge.submit_block(open, sealed.newest);
        false
    }

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
                // What stays where it is whoever needs it is told of. To ask a dead node for page after page would hold the program up.
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

/// The bytes are in the slot before the page table says so: an agent that comes after this one believes what it says.
fn absorb_page(volume: &mut Volume, open: BlockId, page: PageNumber, bytes: &[u8]) {
    volume.mempool().memory().write(volume.next_slot(open).offset(), bytes);
    fence(Release);
    volume.absorb(open, page);
}
