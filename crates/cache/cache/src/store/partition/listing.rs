//! The items of a partition, one after the other, for lists of keys.

use super::Partition;
use crate::store::item::Item;

impl Partition {
    /// Calls `visit` for each item that can be read.
    pub fn for_each(&self, now_s: u32, mut visit: impl FnMut(&Item<'_>)) {
        let Some(_lock) = self.lock_here() else { return };
        let now_s = self.clock_offset.to_partition(now_s);
        self.index.for_each(|found| {
            if let Ok(item) = self.usable(found, now_s) {
                visit(&self.for_server(item));
            }
        });
    }

    /// Calls `visit` for each item of a bucket of the index that can be read, with the second in
    /// which the item's run was opened. Returns the next bucket; `None` after the last one, or if
    /// the partition is not on this server.
    pub fn for_each_of_bucket(
        &self,
        bucket: u64,
        now_s: u32,
        mut visit: impl FnMut(&Item<'_>, u32),
    ) -> Option<u64> {
        let _lock = self.lock_here()?;
        let now_s = self.clock_offset.to_partition(now_s);
        self.index.for_each_of_bucket(bucket, |found| {
            if let Ok(item) = self.usable(found, now_s) {
                let opened_s = self.entry(found.slot.location().run).times().0;
                visit(&self.for_server(item), self.clock_offset.to_server(opened_s));
            }
        })
    }
}
