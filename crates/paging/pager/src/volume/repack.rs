//! Finds the pages of slabs that are being vacated. The owner of the volume reads them and absorbs
//! them, as if they had just left.
//!
//! An absorbed page is staged ([`Volume::absorb`]) and written to another slab. Its old location is
//! released at once.

use super::Volume;
use crate::mempool::BlockId;
use crate::page::{PageNumber, PageState, Slot};

impl Volume {
    /// Appends the pages of the next leaf of the page table at or after `from` that are to be
    /// moved. Returns where the next leaf begins, or `None` at the end.
    ///
    /// Held pages release clean copies in slabs that are being vacated.
    pub fn find_pages_to_move(&mut self, from: PageNumber, out: &mut Vec<PageNumber>) -> Option<PageNumber> {
        let Self { table, slabs, blocks, .. } = self;
        let (start, end) = table.next_part(from)?;
        table.update_range(start, end, |page, word| match word.state() {
            PageState::Remote(location) if slabs.is_to_move(location) => {
                out.push(page);
                word
            }
            PageState::Reclaimable(slot) => {
                let (id, index) = slot.block();
                let block = blocks.owned(id);
                if block.locations[index].is_some_and(|location| slabs.is_to_move(location)) {
                    out.push(page);
                }
                word
            }
            PageState::Held => match word.clean_copy().filter(|copy| slabs.is_vacating(copy.slab())) {
                Some(copy) => {
                    slabs.release(copy);
                    word.with_clean_copy(None)
                }
                None => word,
            },
            _ => word,
        });
        Some(end)
    }

    /// The state of a page that is still to be moved, which is [`PageState::Remote`] or
    /// [`PageState::Reclaimable`]; otherwise `None`.
    #[must_use]
    pub fn state_if_to_move(&mut self, page: PageNumber) -> Option<PageState> {
        let state = self.state(page);
        let location = match state {
            PageState::Remote(location) => location,
            PageState::Reclaimable(slot) => self.slot_location(slot)?,
            _ => return None,
        };
        self.slabs.is_to_move(location).then_some(state)
    }

    fn slot_location(&self, slot: Slot) -> Option<crate::page::Location> {
        let (id, index) = slot.block();
        self.blocks.get(id)?.locations[index]
    }

    /// The slot that [`Self::absorb`] will assign to a page that is not in the open block yet.
    ///
    /// The page's bytes must be in the slot before that call: a restart after the call reads them
    /// there.
    ///
    /// # Panics
    /// If the block is not open, or full.
    #[must_use]
    pub fn next_slot(&self, open: BlockId) -> Slot {
        let block = self.blocks.owned(open);
        open.slot(block.pages.len())
    }
}
