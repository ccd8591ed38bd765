//! The offsets of page records, which are dense for small slabs.

use super::{SLAB_PAGES_MAX, SLABS_MAX};
use crate::page::Location;

const RECORD_BYTES: usize = 8;
/// Number of pages of a slab whose records are adjacent. The records of the next slab follow.
const GROUP_PAGES: u32 = 16;
/// Number of slabs among which each group has another order of slabs. Otherwise the groups of one
/// slab would fall into one set of the processor's cache.
const SHUFFLED_SLABS: u32 = 32;
const _: () = assert!(SLAB_PAGES_MAX.is_multiple_of(GROUP_PAGES) && SLABS_MAX.is_multiple_of(SHUFFLED_SLABS));

/// Bytes of all page records.
pub(super) const BYTES: usize = SLABS_MAX as usize * SLAB_PAGES_MAX as usize * RECORD_BYTES;

/// Number of locations of a run.
pub(crate) const LOCATIONS_MAX: usize = BYTES / RECORD_BYTES;

/// The offset of the record of a page.
pub(super) fn offset_of(location: Location) -> usize {
    number_of(location) * RECORD_BYTES
}

/// The number of the record of a page, below [`LOCATIONS_MAX`].
pub(crate) fn number_of(location: Location) -> usize {
    let (group, page) = (location.index() / GROUP_PAGES, location.index() % GROUP_PAGES);
    let slab = location.slab().0 ^ (group % SHUFFLED_SLABS);
    ((group * SLABS_MAX + slab) * GROUP_PAGES + page) as usize
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::slabs::SlabId;

    #[test]
    fn each_page_has_its_own_record() {
        let slabs = (0..100).chain(SLABS_MAX - 100..SLABS_MAX).map(SlabId);
        let pages = slabs.flat_map(|slab| (0..SLAB_PAGES_MAX).map(move |index| Location::new(slab, index)));
        let mut records: Vec<usize> = pages.map(offset_of).collect();
        records.sort_unstable();
        assert!(records.windows(2).all(|pair| pair[1] - pair[0] >= RECORD_BYTES));
        assert!(records[records.len() - 1] + RECORD_BYTES <= BYTES);
    }
}
