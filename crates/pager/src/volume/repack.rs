//! Pages of slabs that are to become empty: whoever owns the volume reads them and takes them into the mempool anew, as if they had just left.
//!
//! Taken in, a page is staged like any other ([`Volume::absorb`]), and goes to another slab; its old place is free at once.

use super::Volume;
use crate::mempool::BlockId;
use crate::page::{PageNumber, PageState, Slot};

impl Volume {
    /// Look through the next part of the volume, from page `from` on, for pages that are to move; where the next part begins, `None` at the end.
    /// Held pages give up the places there that they came from.
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
                let block = blocks[id.0 as usize].as_ref().expect("its block is in use");
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

    /// Where a page is, if it is one that is still to move: [`PageState::Remote`] or [`PageState::Reclaimable`].
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
        self.blocks[id.0 as usize].as_ref()?.locations[index]
    }

    /// The slot that [`Self::absorb`] will name for a page that is not in the open block yet. Its bytes are to be there before: from then on a restart finds the
    /// page there.
    ///
    /// # Panics
    /// If the block is not open, or full.
    #[must_use]
    pub fn next_slot(&self, open: BlockId) -> Slot {
        let block = self.blocks[open.0 as usize].as_ref().expect("the block is in use");
        open.slot(block.pages.len())
    }
}
