//! Absorption: puts pages straight into a slot of the mempool. These are pages of a front end that
//! keeps none, such as a block device, and pages that are moved from one slab to another.
//!
//! A block is *open* while pages are added to it, and *sealed* when it goes to the sender. The
//! slots of an open block belong to the front end, so a page that is written again is overwritten
//! in its slot.

use super::{BlockPhase, Volume};
use crate::mempool::{BLOCK_PAGES, BlockId};
use crate::mutation::Mutation;
use crate::page::{PageNumber, PageState, Slot};

/// A sealed block, to be passed to the sender.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SealedBlock {
    /// The block.
    pub block: BlockId,
    /// The number of slots in use.
    pub count: usize,
    /// Bit `i` is set if slot `i` has the newest bytes of its page. The other slots need not be
    /// written.
    pub newest: u64,
}

impl Volume {
    /// Opens a block for pages. Returns `None` while all blocks wait for acknowledgements; the
    /// volume does not wait for one then.
    pub fn open_block(&mut self) -> Option<BlockId> {
        let waited = self.waits_in_mempool();
        let Some(id) = self.allocate_block() else {
            self.set_waits_in_mempool(waited);
            return None;
        };
        self.left(id, &[]);
        Some(id)
    }

    /// Assigns a slot of the open block to a page, and returns it.
    ///
    /// The caller must copy the page's bytes into the slot before another thread can read the page.
    /// The page's previous location is released.
    ///
    /// # Panics
    /// If the block is not open or is full, or if the page is in a program.
    pub fn absorb(&mut self, open: BlockId, page: PageNumber) -> Slot {
        let word = self.table.get(page);
        let old = match word.state() {
            PageState::Staged(slot) if slot.block().0 == open => return slot,
            PageState::Staged(slot) if Mutation::AbsorbIntoSealed.is_active() => return slot,
            PageState::Remote(_) if Mutation::ForgetRelease.is_active() => None,
            PageState::Remote(location) => Some(location),
            PageState::Reclaimable(slot) => Some(self.remove_slot_location(slot.block())),
            PageState::Zero | PageState::Staged(_) | PageState::Lost => None,
            state @ (PageState::Held | PageState::Leaving | PageState::Doubtful) => {
                panic!("page {page:#x} is {state:?}: the program has it")
            }
        };
        let block = self.blocks.owned_mut(open);
        assert!(
            block.phase == BlockPhase::Leaving && block.pages.len() < BLOCK_PAGES,
            "{open:?} takes no page"
        );
        let slot = open.slot(block.pages.len());
        block.pages.push(page);
        block.locations.push(None);
        self.table.set(page, word.with_state(PageState::Staged(slot)));
        // The word must change first: if the agent is killed in between, the page table must not
        // name a location that may belong to another page.
        if let Some(location) = old {
            self.slabs.release(location);
        }
        slot
    }

    /// Whether an open block has no free slot.
    ///
    /// # Panics
    /// If this volume does not own the block.
    #[must_use]
    pub fn is_full(&self, open: BlockId) -> bool {
        self.blocks.owned(open).pages.len() == BLOCK_PAGES
    }

    /// Seals an open block: it belongs to the sender until [`Volume::written`].
    pub fn seal(&mut self, open: BlockId) -> SealedBlock {
        let mut block = self.remove_block(open, BlockPhase::Leaving);
        let mut newest = 0;
        for (index, page) in block.pages.iter().enumerate() {
            let is_newest = self.table.get(*page).state() == PageState::Staged(open.slot(index));
            newest |= u64::from(is_newest) << index;
        }
        let count = block.pages.len();
        block.phase = BlockPhase::Staged;
        self.blocks.insert(block);
        SealedBlock { block: open, count, newest }
    }
}
