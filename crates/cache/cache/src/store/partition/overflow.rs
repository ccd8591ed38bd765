//! Items that are moved from a partition to the pool, and back.

use std::cell::RefCell;

use smallvec::SmallVec;

use super::super::Shared;
use super::super::index::Found;
use super::super::item::{self, Item};
use super::super::log::{Charge, NewItem, NoRoom, RemoteItem, Target};
use super::super::pool::{Fetch, Spill};
use super::super::runs::{Queue, RunState};
use super::super::slot::{Location, Slot};
use super::run_items::RunItem;
use super::{Inner, Partition};

/// Largest error, in seconds, of the stored second of an item that is moved.
const MOVED_TOLERANCE_S: u32 = 60;
/// A run is copied to the pool only if at least 1/`SPILL_USED_DIVISOR` of its bytes are in use.
const SPILL_USED_DIVISOR: usize = 8;

/// Locations of items in the pool that may have the searched key.
pub(super) type Candidates = RefCell<SmallVec<[Location; 2]>>;

/// The result of an attempt to free the oldest run of a queue.
#[derive(Debug)]
pub enum Spilled {
    /// The queue has no run.
    None,
    /// The run was freed: too few of its bytes were in use to copy it to the pool.
    Freed,
    /// The run must be copied to the pool.
    Begun(Spill),
}

impl Partition {
    /// Whether the item at a location has this key. Adds the location to `candidates` if that is
    /// unknown because the item is in the pool.
    #[inline]
    pub(super) fn is_key(&self, location: Location, key: &[u8], candidates: &Candidates) -> bool {
        if self.has_pool {
            match self.entry(location.run).state() {
                // A run that is free now may have been moved to the pool since the slot was found:
                // its bytes may be gone.
                RunState::Remote | RunState::Free => {
                    candidates.borrow_mut().push(location);
                    return false;
                }
                RunState::Lost => return false,
                _ => {}
            }
        }
        self.has_key(location, key)
    }

    /// The fetches of all candidates for a key from the pool.
    pub(super) fn fetches(&self, hash: u64, candidates: &Candidates) -> SmallVec<[Fetch; 2]> {
        let fetch = |location: &Location| {
            let (serial, fill) = self.entry(location.run).serial_and_fill();
            Fetch { partition: self.number, location: *location, serial, fill, hash }
        };
        candidates.borrow().iter().map(fetch).collect()
    }

    /// Removes the items in the pool that may have the key of an item that is being stored. Items
    /// with other keys are lost by that.
    pub(super) fn remove_candidates(
        &self,
        shared: &Shared,
        inner: &mut Inner,
        hash: u64,
        candidates: &Candidates,
    ) {
        for location in candidates.borrow_mut().drain(..) {
            if let Some(found) = self.index.search_locked(hash, |other| other == location) {
                self.remove(shared, inner, found);
            }
        }
    }

    /// Begins to move the oldest run of a queue to the pool. Items of the run that were read stay
    /// in memory.
    pub fn begin_spill(&self, shared: &Shared, queue: Queue, now_s: u32) -> Spilled {
        let Some(mut inner) = self.lock_here() else { return Spilled::None };
        let now_s = self.clock_offset.to_partition(now_s);
        inner.log.collect(shared);
        let Some(run) = inner.log.pop_oldest(shared, queue) else {
            // The published sequence was that of a run that has been freed since.
            self.publish_oldest(&mut inner);
            return Spilled::None;
        };
        let (kept, live) = self.collect_unread(shared, &mut inner, run, now_s);
        let entry = self.entry(run);
        let is_flushed = entry.state() == RunState::Flushed;
        let (serial, fill) = entry.serial_and_fill();
        let is_worth_it = !is_flushed && live * SPILL_USED_DIVISOR >= fill;
        if kept.is_empty() || !is_worth_it {
            if !is_flushed {
                self.move_all_to_main(shared, &mut inner, run, now_s);
            }
            self.drop_remote_items(shared, &mut inner, run, &kept);
            inner.log.retire(shared, run, false);
            self.publish_oldest(&mut inner);
            return Spilled::Freed;
        }
        inner.log.begin_leaving(run, live);
        self.publish_oldest(&mut inner);
        let start = self.layout.run(run);
        // SAFETY: the run is sealed, and not freed while the lock is held.
        let bytes = unsafe { self.memory.bytes(start, fill) }.to_vec();
        Spilled::Begun(Spill { partition: self.number, run, serial, bytes, kept: kept.into() })
    }

    /// Collects the items of a run that are in the index and were not read, and the sum of their
    /// lengths. Moves those that were read to the newest run of the main queue, and removes those
    /// that have expired.
    fn collect_unread(
        &self,
        shared: &Shared,
        inner: &mut Inner,
        run: u32,
        now_s: u32,
    ) -> (Vec<RemoteItem>, usize) {
        let is_main = self.entry(run).queue() == Queue::Main;
        let (mut kept, mut live) = (Vec::new(), 0);
        for RunItem { location, hash, len, stored_s } in self.run_items(shared, run) {
            let Some(found) = self.index.search_locked(hash, |other| other == location) else { continue };
            let Ok(item) = self.usable(found, now_s) else {
                shared.count_expired(found.slot.is_fetched());
                self.index.remove(found);
                inner.items -= 1;
                continue;
            };
            let reads = found.slot.reads();
            if reads > 0 {
                let slot = found.slot.with_reads(if is_main { reads - 1 } else { 0 });
                let source = MovedItem { item, stored_s, tolerance_s: MOVED_TOLERANCE_S };
                if self.move_to_main(shared, inner, now_s, found, slot, &source).is_ok() {
                    continue;
                }
            }
            live += len;
            let offset = u16::try_from(location.offset).expect("below the length of a run");
            kept.push(RemoteItem { hash: low_half(hash), offset });
        }
        (kept, live)
    }

    /// Moves all items of a run that are in use to the newest run of the main queue.
    fn move_all_to_main(&self, shared: &Shared, inner: &mut Inner, run: u32, now_s: u32) {
        for RunItem { location, hash, stored_s, .. } in self.run_items(shared, run) {
            let found = self.index.search_locked(hash, |other| other == location);
            let item = found.and_then(|found| Some((found, self.usable(found, now_s).ok()?)));
            if let Some((found, item)) = item {
                let source = MovedItem { item, stored_s, tolerance_s: MOVED_TOLERANCE_S };
                // An item that cannot be moved is evicted.
                let _ = self.move_to_main(shared, inner, now_s, found, found.slot, &source);
            }
        }
    }

    fn move_to_main(
        &self,
        shared: &Shared,
        inner: &mut Inner,
        now_s: u32,
        found: Found,
        slot: Slot,
        source: &MovedItem<'_>,
    ) -> Result<(), NoRoom> {
        let MovedItem { item, stored_s, tolerance_s } = *source;
        let value = [item.value, &[][..]];
        let new = NewItem { header: item.header, key: item.key, value, stored_s, tolerance_s };
        let location = inner.log.append(shared, now_s, &new, Target::Newest(Queue::Main), Charge::Always)?;
        self.index.replace(found, slot.with_location(location));
        Ok(())
    }

    /// Removes the slots of items from the index.
    fn drop_remote_items(&self, shared: &Shared, inner: &mut Inner, run: u32, kept: &[RemoteItem]) {
        for RemoteItem { hash, offset } in kept {
            let location = Location { run, offset: u32::from(*offset) };
            if let Some(found) = self.index.search_locked(u64::from(*hash), |other| other == location) {
                shared.count_evicted(found.slot.is_fetched());
                self.index.remove(found);
                inner.items -= 1;
            }
        }
    }

    /// Completes the move of a run to the pool, which has it at `place`. Returns false if the run
    /// is not needed any more: the caller must free the place.
    pub fn finish_spill(&self, shared: &Shared, spill: Spill, place: u64) -> bool {
        let Some(mut inner) = self.lock_here() else { return false };
        let Spill { run, serial, kept, .. } = spill;
        if !inner.log.is_leaving(run, serial) {
            inner.log.stop_leaving(shared, run, serial);
            return false;
        }
        let is_there = |RemoteItem { hash, offset }: &&RemoteItem| {
            let location = Location { run, offset: u32::from(*offset) };
            self.index.search_locked(u64::from(*hash), |other| other == location).is_some()
        };
        let items = kept.iter().filter(is_there).count();
        if items == 0 {
            inner.log.stop_leaving(shared, run, serial);
            return false;
        }
        inner.log.leave(shared, run, place, kept, items);
        true
    }

    /// Cancels the move of a run for which the pool has no room: the run returns to its queue.
    pub fn cancel_spill(&self, shared: &Shared, spill: &Spill) {
        let Some(mut inner) = self.lock_here() else { return };
        if inner.log.stop_leaving(shared, spill.run, spill.serial) {
            // The run is the oldest again, and is evicted next if memory is short.
            self.publish_oldest(&mut inner);
        }
        let _ = shared;
    }

    /// The place in the pool of the run of an item to fetch; `None` if the pool has it no more.
    pub fn place_in_pool(&self, fetch: &Fetch) -> Option<u64> {
        self.lock_here()?.log.place_in_pool(fetch.location.run, fetch.serial)
    }

    /// Stores an item that was fetched from the pool, in the newest run of the main queue.
    ///
    /// # Errors
    /// If memory must be freed first.
    pub fn bring_back(&self, shared: &Shared, fetch: &Fetch, bytes: &[u8], now_s: u32) -> Result<(), NoRoom> {
        let Some(mut inner) = self.lock_here() else { return Ok(()) };
        if inner.log.place_in_pool(fetch.location.run, fetch.serial).is_none() {
            return Ok(());
        }
        let now_s = self.clock_offset.to_partition(now_s);
        let entry = self.entry(fetch.location.run);
        let item = item::decode(bytes, entry.cas_base());
        let hash = shared.hasher.hash(item.key);
        let Some(found) = self.index.search_locked(hash, |other| other == fetch.location) else {
            // The item was removed, or the pool has returned other bytes than were stored.
            if self.index.search_locked(fetch.hash, |other| other == fetch.location).is_some() {
                inner.log.lose_remote(fetch.location.run);
                self.drop_remote(shared, &mut inner, fetch.location.run);
            }
            return Ok(());
        };
        let source = MovedItem { item, stored_s: entry.times().0, tolerance_s: MOVED_TOLERANCE_S };
        let slot = found.slot.with_reads(0);
        self.move_to_main(shared, &mut inner, now_s, found, slot, &source)?;
        inner.log.release_remote(shared, fetch.location.run);
        self.publish_oldest(&mut inner);
        Ok(())
    }

    /// Removes the items of a run that the pool has lost, or that is evicted from the pool.
    pub fn lose_remote(&self, shared: &Shared, run: u32) {
        let Some(mut inner) = self.lock_here() else { return };
        inner.log.lose_remote(run);
        self.drop_remote(shared, &mut inner, run);
    }

    /// The sequence and number of the run in the pool that was opened first.
    pub fn oldest_remote(&self) -> Option<(u64, u32)> {
        self.lock_here()?.log.oldest_remote()
    }

    /// Removes the items of a run in the pool.
    pub(super) fn drop_remote(&self, shared: &Shared, inner: &mut Inner, run: u32) {
        let kept = inner.log.remote_items(run);
        self.drop_remote_items(shared, inner, run, &kept);
        inner.log.free_remote(shared, run);
    }

    /// Removes all items in the pool, and cancels all copies to it.
    pub(super) fn drop_all_remote(&self, shared: &Shared, inner: &mut Inner) {
        inner.log.stop_all_leaving(shared);
        for run in inner.log.remote_runs() {
            self.drop_remote(shared, inner, run);
        }
    }
}

/// An item that is moved to the newest run of the main queue.
#[derive(Clone, Copy)]
struct MovedItem<'a> {
    item: Item<'a>,
    stored_s: u32,
    tolerance_s: u32,
}

fn low_half(hash: u64) -> u32 {
    u32::try_from(hash & u64::from(u32::MAX)).expect("32 bits")
}
