//! Pages of a front end that keeps none of them, such as a block device: each goes straight into a slot.
//!
//! A block is *open* while pages are put into it, and *sealed* when it goes to the sender. Until then its slots are the front end's alone,
//! so a page that is written again is written in its place.

use super::{Phase, Volume};
use crate::mempool::{BLOCK_PAGES, BlockId};
use crate::mutation::Mutation;
use crate::page::{PageNumber, PageState, PageWord, Slot};

/// A block on its way to the sender.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Sealed {
    /// The block.
    pub block: BlockId,
    /// Slots in use.
    pub count: usize,
    /// Which of them hold the newest bytes of their page, a bit each; the others need no writing.
    pub newest: u64,
}

impl Volume {
    /// Open a block for pages to come. `None` while everything waits for acknowledgements.
    pub fn open(&mut self) -> Option<BlockId> {
        let id = self.take_block()?;
        self.left(id, &[]);
        Some(id)
    }

    /// A page comes in from the front end: the slot that its bytes must be copied to, before anybody else looks. Whatever copy
    /// there was elsewhere is dropped.
    ///
    /// # Panics
    /// If the block is not open or full, or a program holds the page.
    pub fn absorb(&mut self, open: BlockId, page: PageNumber) -> Slot {
        match self.table.get(page).state() {
            PageState::Staged(slot) if slot.block().0 == open => return slot,
            PageState::Staged(slot) if self.mutation == Mutation::AbsorbIntoSealed => return slot,
            PageState::Remote(_) if self.mutation == Mutation::ForgetRelease => {}
            PageState::Remote(location) => self.slabs.release(location),
            PageState::Reclaimable(slot) => {
                let location = self.take_slot_location(slot.block());
                self.slabs.release(location);
            }
            PageState::Zero | PageState::Staged(_) | PageState::Lost => {}
            state @ (PageState::Held | PageState::Leaving | PageState::Doubtful) => {
                panic!("page {page:#x} of a device is {state:?}")
            }
        }
        let block = self.blocks[open.0 as usize].as_mut().expect("the block is in use");
        assert!(block.phase == Phase::Leaving && block.pages.len() < BLOCK_PAGES, "{open:?} takes no page");
        let slot = open.slot(block.pages.len());
        block.pages.push(page);
        block.locations.push(None);
        self.table.set(page, PageWord::new(PageState::Staged(slot)));
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
    pub fn seal(&mut self, open: BlockId) -> Sealed {
        let mut block = self.take_entry(open, Phase::Leaving);
        let mut newest = 0;
        for (index, page) in block.pages.iter().enumerate() {
            let is_newest = self.table.get(*page).state() == PageState::Staged(open.slot(index));
            newest |= u64::from(is_newest) << index;
        }
        let count = block.pages.len();
        block.phase = Phase::Staged;
        self.blocks[open.0 as usize] = Some(block);
        Sealed { block: open, count, newest }
    }
}
