//! Operations of a store for the thread that uses the pool.

use std::sync::atomic::Ordering;

use super::partition::Spilled;
use super::pool::{Fetch, PoolQueue, Spill};
use super::{RESERVE_DIVISOR, Store};

/// Runs are copied to the pool if less than 1/`SPARE_DIVISOR` of the memory is free.
const SPARE_DIVISOR: u64 = 32;
/// Most runs that one search for a run to copy frees, because few of their bytes are in use.
const FREED_MAX: usize = 64;
/// Bytes of memory for each item in the pool: its [`RemoteItem`](super::log::RemoteItem) and its
/// slot in the index.
const BYTES_PER_REMOTE_ITEM: u64 = 24;
/// The items in the pool use at most 1/`REMOTE_ITEMS_DIVISOR` of the memory.
const REMOTE_ITEMS_DIVISOR: u64 = 2;
const _: () = assert!(SPARE_DIVISOR < RESERVE_DIVISOR);

impl Store {
    /// The requests to the pool.
    #[must_use]
    pub fn pool(&self) -> &PoolQueue {
        &self.shared.pool
    }

    /// Whether items are moved to the pool if memory is short.
    #[must_use]
    pub fn has_pool(&self) -> bool {
        self.has_pool
    }

    /// Whether memory is short although nothing can be copied to the pool.
    #[must_use]
    pub fn is_short_of_runs(&self) -> bool {
        let (queue, coldest) = self.coldest();
        self.is_short() && coldest.oldest(queue) == u64::MAX
    }

    /// Whether less memory is free than writes wait for, or than is reserved for the next writes.
    #[must_use]
    pub fn is_short(&self) -> bool {
        self.lacks(self.shared.pool.wanted())
    }

    fn lacks(&self, bytes: u64) -> bool {
        self.shared.budget.available() < bytes.max(self.shared.budget.limit() / SPARE_DIVISOR)
    }

    /// Whether the items in the pool use too much of this server's memory.
    #[must_use]
    pub fn has_too_many_remote_items(&self) -> bool {
        let bytes = self.shared.pool.items.load(Ordering::Relaxed) * BYTES_PER_REMOTE_ITEM;
        bytes > self.shared.budget.limit() / REMOTE_ITEMS_DIVISOR
    }

    /// Wakes the thread that copies runs to the pool if memory is short.
    pub(super) fn note_if_short(&self) {
        if self.has_pool && self.is_short() {
            self.shared.pool.note_short();
        }
    }

    /// Whether a write of `bytes` must wait until runs were moved to the pool.
    pub(super) fn waits_for_pool(&self, bytes: usize) -> bool {
        // If enough memory is free, consecutive runs are missing or the index is full: moving runs
        // to the pool does not help.
        let waits = self.has_pool
            && self.lacks(bytes as u64)
            && self.shared.pool.is_keeping_up()
            && bytes as u64 + self.shared.fixed_bytes() <= self.shared.budget.limit();
        if waits {
            self.shared.pool.note_wanted(bytes as u64);
        }
        waits
    }

    /// Frees retired memory that no thread can read any more.
    pub fn collect_retired(&self) {
        self.collect();
    }

    /// The next run to copy to the pool; `None` if enough memory is free, or no run can be copied.
    pub fn next_spill(&self, now_s: u32) -> Option<Spill> {
        for _ in 0..FREED_MAX {
            if !self.is_short() {
                return None;
            }
            let (queue, coldest) = self.coldest();
            if coldest.oldest(queue) == u64::MAX {
                return None;
            }
            if let Spilled::Begun(spill) = coldest.begin_spill(&self.shared, queue, now_s) {
                return Some(spill);
            }
        }
        None
    }

    /// Completes the move of a run to the pool, which has it at `place`. Returns false if the run
    /// is not needed any more: the caller must free the place.
    pub fn finish_spill(&self, spill: Spill, place: u64) -> bool {
        self.partitions[spill.partition].finish_spill(&self.shared, spill, place)
    }

    /// Cancels the move of a run for which the pool has no room; the run may be evicted later.
    pub fn cancel_spill(&self, spill: &Spill) {
        self.partitions[spill.partition].cancel_spill(&self.shared, spill);
    }

    /// The place in the pool of the run of an item to fetch; `None` if the pool has it no more.
    #[must_use]
    pub fn place_in_pool(&self, fetch: &Fetch) -> Option<u64> {
        self.partitions.get(fetch.partition)?.place_in_pool(fetch)
    }

    /// Stores an item that was fetched from the pool.
    pub fn bring_back(&self, fetch: &Fetch, bytes: &[u8], now_s: u32) {
        let partition = &self.partitions[fetch.partition];
        if let Err(no_room) = partition.bring_back(&self.shared, fetch, bytes, now_s) {
            self.make_room(partition, no_room.bytes, now_s);
            if partition.bring_back(&self.shared, fetch, bytes, now_s).is_err() {
                // The item cannot be stored: it is lost, with the other items of its run.
                partition.lose_remote(&self.shared, fetch.location.run);
            }
        }
        self.note_if_short();
        if self.is_short() && !self.shared.pool.is_keeping_up() && self.evicts {
            self.evict_for(0, now_s);
            self.collect();
        }
    }

    /// Removes the items of a run that the pool has lost.
    pub fn lose(&self, fetch: &Fetch) {
        self.partitions[fetch.partition].lose_remote(&self.shared, fetch.location.run);
    }

    /// Evicts the run in the pool that was opened first; returns whether there was one.
    pub fn evict_from_pool(&self) -> bool {
        let oldest = self
            .partitions
            .iter()
            .filter_map(|partition| {
                partition.oldest_remote().map(|(sequence, run)| (sequence, run, partition))
            })
            .min_by_key(|(sequence, ..)| *sequence);
        let Some((_, run, partition)) = oldest else { return false };
        partition.lose_remote(&self.shared, run);
        true
    }

    /// Items in the pool.
    #[must_use]
    pub fn items_in_pool(&self) -> u64 {
        self.partitions.iter().map(super::partition::Partition::items_in_pool).sum()
    }
}
