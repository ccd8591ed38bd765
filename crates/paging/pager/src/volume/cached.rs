//! Pages of the volume in the page cache.

use super::Volume;
use crate::integrity::page_crc;
use crate::mempool::BLOCK_PAGES;
use crate::page::{Location, PageNumber, PageState, Slot};
use crate::view;

impl Volume {
    /// The number of consecutive pages, from `page` on and at most `max`, that are cached in
    /// consecutive slots from `slot` on. The caller has pinned the block. The bytes are checked.
    pub fn cached_pages(&mut self, page: PageNumber, slot: Slot, max: usize) -> usize {
        let (_, first) = slot.block();
        let max = max.min(BLOCK_PAGES - first);
        (0..)
            .take(max)
            .take_while(|offset| self.is_cached(page + u64::from(*offset), Slot(slot.0 + offset)))
            .count()
    }

    /// Whether the page is cached in this slot of a pinned block.
    fn is_cached(&mut self, page: PageNumber, slot: Slot) -> bool {
        let PageState::Remote(location) = self.state(page) else { return false };
        let Some(cache) = self.slabs.cache() else { return false };
        cache.slot_of(location) == Some(slot) && self.is_intact(location, slot)
    }

    /// Checks the bytes of a cached page. Drops the page from the cache if they are wrong.
    fn is_intact(&self, location: Location, slot: Slot) -> bool {
        let found = page_crc(view::page(self.mempool.memory(), slot.offset()));
        let expected = self.slabs.crc(location);
        if found == expected {
            return true;
        }
        tracing::error!(?location, found, expected, "dropped a damaged page from the page cache");
        self.mempool.count_damaged_cached_page();
        if let Some(cache) = self.slabs.cache() {
            cache.remove(location);
        }
        false
    }
}
