//! The items of a run, one after the other.

use super::super::Shared;
use super::super::item;
use super::super::slot::Location;
use super::{CACHE_LINE_BYTES, Partition};

/// Memory that is loaded before the walk comes to it: each item says only where the next one is.
const AHEAD_BYTES: usize = 1024;

/// An item of a run, which the index may not point to any more.
#[derive(Clone, Copy, Debug)]
pub(super) struct RunItem {
    /// Where it is.
    pub location: Location,
    /// The hash of its key.
    pub hash: u64,
    /// Its bytes.
    pub len: usize,
    /// The second in which it was stored.
    pub stored_s: u32,
}

impl Partition {
    /// The items of a run that is not freed meanwhile, in the order in which they were appended.
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
