//! An iterator over the items of a run.

use super::super::Shared;
use super::super::item;
use super::super::slot::Location;
use super::{CACHE_LINE_BYTES, Partition};

/// Bytes by which the walk prefetches ahead: the offset of an item is known only from the item
/// before it.
const AHEAD_BYTES: usize = 1024;

/// An item of a run, which the index may not point to any more.
#[derive(Clone, Copy, Debug)]
pub(super) struct RunItem {
    /// The location.
    pub location: Location,
    /// The hash of the key.
    pub hash: u64,
    /// The length in bytes.
    pub len: usize,
    /// The second in which the item was stored.
    pub stored_s: u32,
}

impl Partition {
    /// The items of a run, in the order in which they were appended. The run must not be freed
    /// meanwhile.
    pub(super) fn run_items<'p>(
        &'p self,
        shared: &'p Shared,
        run: u32,
    ) -> impl Iterator<Item = RunItem> + 'p {
        let (fill, mut stored_s) = (self.entry(run).fill(), self.entry(run).times().0);
        let mut offset = 0;
        std::iter::from_fn(move || {
            while offset < fill {
                let location =
                    Location { run, offset: u32::try_from(offset).expect("one item in a long run") };
                if let Some(second) = item::marked_s(self.prefix(location)) {
                    stored_s = second;
                    offset += item::MARK_BYTES;
                    continue;
                }
                let ahead = self.layout.run(run) + location.offset as usize + AHEAD_BYTES;
                let (key, len) = item::key_and_len(self.item_bytes(location));
                (0..len).step_by(CACHE_LINE_BYTES).for_each(|at| self.memory.prefetch(ahead + at));
                offset += len;
                return Some(RunItem { location, hash: shared.hasher.hash(key), len, stored_s });
            }
            None
        })
    }
}
