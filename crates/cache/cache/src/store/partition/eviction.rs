//! Eviction and expiry of the items of a partition, and cleaning of its runs.

use smallvec::SmallVec;

use super::super::Shared;
use super::super::index::Found;
use super::super::item::Item;
use super::super::log::{Charge, NewItem, Target};
use super::super::runs::{Queue, RunState};
use super::super::slot::Slot;
use super::run_items::RunItem;
use super::{Absent, Inner, Partition};

/// Largest error, in seconds, of the stored second of an item that the eviction moves.
const MOVED_TOLERANCE_S: u32 = 60;
/// Items of a run whose buckets are prefetched together.
const ITEMS_AHEAD: usize = 16;

impl Partition {
    /// Evicts the oldest run of a queue: moves the items that were read to the newest run of the
    /// main queue, and removes the others. Returns whether there was a run.
    ///
    /// If `keeps_pages`, the memory stays with this partition.
    pub fn evict(&self, shared: &Shared, queue: Queue, now_s: u32, keeps_pages: bool) -> bool {
        let Some(mut inner) = self.lock_here() else { return false };
        let now_s = self.clock_offset.to_partition(now_s);
        inner.log.collect(shared);
        let Some(run) = inner.log.pop_oldest(shared, queue) else {
            // The published sequence was that of a run that has been freed since.
            self.publish_oldest(&mut inner);
            return false;
        };
        self.evict_run(shared, &mut inner, run, now_s, keeps_pages);
        self.publish_oldest(&mut inner);
        true
    }

    /// Chooses an item to evict for a key from a full chain of the index: an item that cannot be
    /// read any more, or the oldest of those that were read least. `None` if none may be evicted.
    #[cold]
    pub(super) fn evict_beside(&self, shared: &Shared, hash: u64, now_s: u32) -> Option<Found> {
        let mut coldest = None;
        self.index.for_each_beside(hash, |found| {
            let is_gone =
                matches!(self.usable(found, now_s), Err(Absent::Expired | Absent::Flushed | Absent::Missing));
            let sequence = self.entry(found.slot.location().run).sequence();
            let heat = (!is_gone, found.slot.reads(), sequence);
            if coldest.is_none_or(|(lowest, _)| heat < lowest) {
                coldest = Some((heat, found));
            }
        });
        let ((is_usable, ..), found) = coldest?;
        if !is_usable {
            shared.count_expired(found.slot.is_fetched());
        } else if shared.evicts {
            shared.count_evicted(found.slot.is_fetched());
        } else {
            return None;
        }
        Some(found)
    }

    /// Cleans a run with many unused bytes, if there is one: appends its items to a run that
    /// replaces it. Returns whether there was one.
    pub fn clean(&self, shared: &Shared, now_s: u32, keeps_pages: bool) -> bool {
        let Some(mut inner) = self.lock_here() else { return false };
        let now_s = self.clock_offset.to_partition(now_s);
        let Some((queue, sequence, run)) = inner.log.pop_cleanable(shared) else { return false };
        let target = Target::Cleaned(queue, sequence);
        self.move_items(shared, &mut inner, run, now_s, |found, _| Some((target, found.slot)));
        inner.log.retire(shared, run, keeps_pages);
        self.publish_oldest(&mut inner);
        true
    }

    /// Cleans a run if most of the partition's log is unused.
    pub fn clean_unused(&self, shared: &Shared, now_s: u32) {
        let is_wanted = self.lock_here().is_some_and(|inner| inner.log.is_mostly_unused());
        if is_wanted {
            self.clean(shared, now_s, shared.keeps_pages);
        }
    }

    /// Evicts a run that is in no queue.
    fn evict_run(&self, shared: &Shared, inner: &mut Inner, run: u32, now_s: u32, keeps_pages: bool) {
        if self.entry(run).runs() > 1 && self.keeps_long(shared, inner, run, now_s) {
            return;
        }
        let target = Target::Newest(Queue::Main);
        let is_main = self.entry(run).queue() == Queue::Main;
        self.move_items(shared, inner, run, now_s, |found, item| {
            let reads = found.slot.reads();
            if reads > 0 {
                // An item that leaves probation must show again that it is read.
                return Some((target, found.slot.with_reads(if is_main { reads - 1 } else { 0 })));
            }
            shared.count_evicted(item.is_fetched);
            None
        });
        shared.note_evicted_age(now_s.saturating_sub(self.entry(run).times().0));
        inner.log.retire(shared, run, keeps_pages);
    }

    /// Makes a long run the newest of the main queue if its item was read; returns whether it was.
    fn keeps_long(&self, shared: &Shared, inner: &mut Inner, run: u32, now_s: u32) -> bool {
        let Some(RunItem { location, hash, .. }) = self.run_items(shared, run).next() else { return false };
        let Some(found) = self.index.search_locked(hash, |other| other == location) else { return false };
        let is_kept = found.slot.reads() > 0 && self.usable(found, now_s).is_ok();
        if is_kept {
            self.index.replace(found, found.slot.with_reads(found.slot.reads() - 1));
            inner.log.push_newest(shared, run);
        }
        is_kept
    }

    /// Moves the items of a run that are in the index to the target that `choose` returns. Removes
    /// those that cannot be read, and those for which `choose` returns `None`.
    fn move_items(
        &self,
        shared: &Shared,
        inner: &mut Inner,
        run: u32,
        now_s: u32,
        choose: impl Fn(&Found, &Item<'_>) -> Option<(Target, Slot)>,
    ) {
        let mut items = self.run_items(shared, run).fuse();
        loop {
            let next: SmallVec<[RunItem; ITEMS_AHEAD]> = items.by_ref().take(ITEMS_AHEAD).collect();
            if next.is_empty() {
                return;
            }
            next.iter().for_each(|item| self.index.prefetch(item.hash));
            for item in next {
                self.move_item(shared, inner, item, now_s, &choose);
            }
        }
    }

    fn move_item(
        &self,
        shared: &Shared,
        inner: &mut Inner,
        RunItem { location, hash, stored_s, .. }: RunItem,
        now_s: u32,
        choose: impl Fn(&Found, &Item<'_>) -> Option<(Target, Slot)>,
    ) {
        let Some(found) = self.index.search_locked(hash, |other| other == location) else { return };
        let chosen = match self.usable(found, now_s) {
            Ok(item) => choose(&found, &item).map(|(target, slot)| (item, target, slot)),
            Err(_) => {
                shared.count_expired(found.slot.is_fetched());
                None
            }
        };
        let moved = chosen.and_then(|(item, target, slot)| {
            let new = NewItem {
                header: item.header,
                key: item.key,
                value: [item.value, &[]],
                stored_s,
                tolerance_s: MOVED_TOLERANCE_S,
            };
            let moved = inner.log.append(shared, now_s, &new, target, Charge::Always).ok()?;
            Some(slot.with_location(moved))
        });
        match moved {
            Some(slot) => self.index.replace(found, slot),
            None => {
                self.index.remove(found);
                inner.items -= 1;
            }
        }
    }

    /// Removes the items of at most `runs_max` runs that have expired or were flushed, and frees
    /// retired memory.
    pub fn expire(&self, shared: &Shared, now_s: u32, runs_max: usize) {
        let Some(mut inner) = self.lock_here() else { return };
        let now_s = self.clock_offset.to_partition(now_s);
        inner.log.collect(shared);
        inner.log.seal_old(shared, now_s);
        for _ in 0..runs_max {
            if let Some(run) = inner.log.pop_expired(now_s) {
                self.evict_run(shared, &mut inner, run, now_s, false);
                continue;
            }
            if let Some(run) = inner.log.unreadable_remote(now_s) {
                self.drop_remote(shared, &mut inner, run);
                continue;
            }
            let flushed = Queue::ALL.into_iter().find(|queue| {
                inner.log.oldest(*queue).is_some_and(|(_, run)| self.entry(run).state() == RunState::Flushed)
            });
            let Some(run) = flushed.and_then(|queue| inner.log.pop_oldest(shared, queue)) else { break };
            self.evict_run(shared, &mut inner, run, now_s, false);
        }
        self.publish_oldest(&mut inner);
    }
}
