//! Pages of a front end that keeps none of them, such as a block device, and pages that are moved from one slab to another: each goes straight into a slot.
//!
//! A block is *open* while pages are put into it, and *sealed* when it goes to the sender. Until then its slots are the front end's alone,
//! so a page that is written again is written in its place.

use super::{BlockPhase, Volume};
use crate::mempool::{BLOCK_PAGES, BlockId};
use crate::mutation::Mutation;
use crate::page::{PageNumber, PageState, Slot};

/// A block on its way to the sender.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SealedBlock {
    /// The block.
    pub block: BlockId,
    /// Slots in use.
    pub count: usize,
    /// Which of them hold the newest bytes of their page, a bit each; the others need no writing.
    pub newest: u64,
}

impl Volume {
    /// Open a block for pages to come. `None` while everything waits for acknowledgements.
    pub fn open_block(&mut self) -> Option<BlockId> {
        let id = self.allocate_block()?;
        self.left(id, &[]);
        Some(id)
    }

    /// A page comes in from the front end: the slot that its bytes must be copied to, before anybody else looks. Whatever copy
    /// there was elsewhere is dropped.
    ///
    /// # Panics
    /// If the block is not open or full, or a program holds the page.
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
        let block = self.blocks[open.0 as usize].as_mut().expect("the block is in use");
        assert!(
            block.phase == BlockPhase::Leaving && block.pages.len() < BLOCK_PAGES,
            "{open:?} takes no page"
        );
        let slot = open.slot(block.pages.len());
        block.pages.push(page);
        block.locations.push(None);
        self.table.set(page, word.with_state(PageState::Staged(slot)));
        // Not before: whoever is killed in between must not leave a word that names another page's place.
        if let Some(location) = old {
            self.slabs.release(location);
        }
        slot
    }

    /// Whether an open block has no slot left.
    ///
    /// # Panics
    /// If the block is not this volume's.
    #[must_use]
    pub fn is_full(&self, open: BlockId) -> bool {
        self.blocks[open.0 as usize].as_ref().expect("the block is in use").pages.len() == BLOCK_PAGES
    }

    /// No further page goes into the block; it is the sender's from now on, until [`Volume::written`] is told.
    pub fn seal(&mut self, open: BlockId) -> SealedBlock {
        let mut block = self.remove_block(open, BlockPhase::Leaving);
        let mut newest = 0;
        for (index, page) in block.pages.iter().enumerate() {
            let is_newest = self.table.get(*page).state() == PageState::Staged(open.slot(index));
            newest |= u64::from(is_newest) << index;
        }
        let count = block.pages.len();
        block.phase = BlockPhase::Staged;
        self.blocks[open.0 as usize] = Some(block);
        SealedBlock { block: open, count, newest }
    }
}
