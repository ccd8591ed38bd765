//! Moves the pages of a sparse block of the cache to others, so that it can be given away and no
//! page is dropped.
//!
//! Pages leave a block one by one, when their program gets them. Without this a run whose accesses
//! are random would find only 40 % of its pages in a cache that has room for all of them.

use super::BlockTable;
use crate::mempool::{BLOCK_PAGES, BlockId};
use crate::page::{Location, Slot};
use crate::page_cache::CacheIndex;
use crate::view;

impl BlockTable {
    /// Moves the pages of a block to free slots of others of the same run. Returns true if all were
    /// moved. Then the block is not in the cache any more, but is still listed.
    ///
    /// A block that a reader has pinned stays as it is.
    pub(super) fn move_pages(&mut self, source: BlockId, targets: impl Iterator<Item = BlockId>) -> bool {
        let Some(index) = self.of(source).and_then(|cached| cached.index.upgrade()) else { return false };
        if !self.states.try_remove(source) {
            return false;
        }
        let mut next = 0;
        for target in targets {
            let mut moves = [(Location(0), Slot(0), Slot(0)); BLOCK_PAGES];
            let mut count = 0;
            let mut pages = (next..BLOCK_PAGES).filter_map(|at| Some((at, self.entry(&index, source, at)?)));
            let free = (0..BLOCK_PAGES).filter(|at| self.entry(&index, target, *at).is_none());
            for (to, (at, location)) in free.zip(&mut pages) {
                moves[count] = (location, source.slot(at), target.slot(to));
                count += 1;
            }
            let copy = |from: Slot, to: Slot| {
                self.memory.write(to.offset(), view::page(&self.memory, from.offset()));
            };
            let Some((_, last, _)) = moves[..count].last() else { continue };
            if index.move_entries(target, &moves[..count], copy) {
                next = last.block().1 + 1;
                for (location, _, to) in &moves[..count] {
                    self.locations_of(target)[to.block().1] = location.0 + 1;
                }
            }
        }
        let is_done = (next..BLOCK_PAGES).all(|at| self.entry(&index, source, at).is_none());
        if !is_done {
            self.states.finish(source);
        }
        is_done
    }

    /// The location whose entry names a slot of a block.
    fn entry(&self, index: &CacheIndex, block: BlockId, at: usize) -> Option<Location> {
        let location = Location(self.locations[block.0 as usize * BLOCK_PAGES + at].checked_sub(1)?);
        (index.slot_of(location) == Some(block.slot(at))).then_some(location)
    }
}
