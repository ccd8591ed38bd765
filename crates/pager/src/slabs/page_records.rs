//! Where the records of pages are: dense for small slabs, which have few pages.

use super::{SLAB_PAGES_MAX, SLABS_MAX};
use crate::page::Location;

const RECORD_BYTES: usize = 8;
/// Records lie group_slabs by so many pages of a slab, and then come those of the next slab.
const GROUP_PAGES: u32 = 16;
/// The groups of one slab would share a set of the processor's cache. Within so many slabs each group has another order.
const SHUFFLED_SLABS: u32 = 32;
const _: () = assert!(SLAB_PAGES_MAX.is_multiple_of(GROUP_PAGES) && SLABS_MAX.is_multiple_of(SHUFFLED_SLABS));

/// All of them.
pub(super) const BYTES: usize = SLABS_MAX as usize * SLAB_PAGES_MAX as usize * RECORD_BYTES;

/// Where the record of a page begins.
pub(super) fn offset_of(location: Location) -> usize {
    let (group, page) = (location.index() / GROUP_PAGES, location.index() % GROUP_PAGES);
    let slab = location.slab().0 ^ (group % SHUFFLED_SLABS);
    ((group * SLABS_MAX + slab) * GROUP_PAGES + page) as usize * RECORD_BYTES
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::slabs::SlabId;

    #[test]
    fn each_page_has_a_record_of_its_own() {
        let slabs = (0..100).chain(SLABS_MAX - 100..SLABS_MAX).map(SlabId);
        let pages = slabs.flat_map(|slab| (0..SLAB_PAGES_MAX).map(move |index| Location::new(slab, index)));
        let mut records: Vec<usize> = pages.map(offset_of).collect();
        records.sort_unstable();
        assert!(records.windows(2).all(|pair| pair[1] - pair[0] >= RECORD_BYTES));
        assert!(records[records.len() - 1] + RECORD_BYTES <= BYTES);
    }
}
