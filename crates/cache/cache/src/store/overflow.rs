//! What the thread that uses the pool does in a store.

use std::sync::atomic::Ordering;

use super::partition::Spilled;
use super::pool::{Fetch, PoolQueue, Spill};
use super::{RESERVE_DIVISOR, Store};

/// Runs are copied to the pool if less than one part in so many of the memory is free.
const SPARE_DIVISOR: u64 = 32;
/// Runs that are freed in a row, because little of them was in use, before others are served.
const FREED_MAX: usize = 64;
/// Bytes of memory for each item in the pool: what is kept of it, and its slot in the index.
const BYTES_PER_REMOTE_ITEM: u64 = 24;
/// These bytes are at most one part in so many of the memory.
const REMOTE_ITEMS_DIVISOR: u64 = 2;
const _: () = assert!(SPARE_DIVISOR < RESERVE_DIVISOR);

impl Store {
    /// What threads ask of the pool.
    #[must_use]
    pub fn pool(&self) -> &PoolQueue {
        &self.shared.pool
    }

    /// Whether items that have no room here go to the pool.
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

    /// Whether there is less memory than writes wait for, or than is kept for the next ones.
    #[must_use]
    pub fn is_short(&self) -> bool {
        self.lacks(self.shared.pool.wanted())
    }

    fn lacks(&self, bytes: u64) -> bool {
        self.shared.budget.available() < bytes.max(self.shared.budget.limit() / SPARE_DIVISOR)
    }

    /// Whether what is kept here of the items in the pool needs too much of the memory.
    #[must_use]
    pub fn has_too_many_remote_items(&self) -> bool {
        let bytes = self.shared.pool.items.load(Ordering::Relaxed) * BYTES_PER_REMOTE_ITEM;
        bytes > self.shared.budget.limit() / REMOTE_ITEMS_DIVISOR
    }

    /// Has runs copied to the pool if memory is short.
    pub(super) fn note_if_short(&self) {
        if self.has_pool && self.is_short() {
            self.shared.pool.note_short();
        }
    }

    /// Whether a write of so many bytes is to wait until runs have left for the pool.
    pub(super) fn waits_for_pool(&self, bytes: usize) -> bool {
        // If there is enough memory, there are too few runs in a row, or the index is full: what
        // leaves for the pool does not help.
        let waits = self.has_pool
            && self.lacks(bytes as u64)
            && self.shared.pool.is_keeping_up()
            && bytes as u64 + self.shared.fixed_bytes() <= self.shared.budget.limit();
        if waits {
            self.shared.pool.note_wanted(bytes as u64);
        }
        waits
    }

    /// Frees what no thread can see any more.
    pub fn collect_retired(&self) {
        self.collect();
    }

    /// The next run that is to be copied to the pool; `None` if there is enough memory.
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

    /// The pool has a run at this place. Returns false if the run was needed no more: the place is
    /// to be freed.
    pub fn finish_spill(&self, spill: Spill, place: u64) -> bool {
        self.partitions[spill.partition].finish_spill(&self.shared, spill, place)
    }

    /// The pool has no room for a run: it stays, and is evicted if there is no memory.
    pub fn cancel_spill(&self, spill: &Spill) {
        self.partitions[spill.partition].cancel_spill(&self.shared, spill);
    }

    /// Where the pool has an item that is to be fetched; `None` if it is not there any more.
    #[must_use]
    pub fn place_in_pool(&self, fetch: &Fetch) -> Option<u64> {
        self.partitions.get(fetch.partition)?.place_in_pool(fetch)
    }

    /// An item has come back from the pool.
    pub fn bring_back(&self, fetch: &Fetch, bytes: &[u8], now_s: u32) {
        let partition = &self.partitions[fetch.partition];
        if let Err(no_room) = partition.bring_back(&self.shared, fetch, bytes, now_s) {
            self.make_room(partition, no_room.bytes, now_s);
            if partition.bring_back(&self.shared, fetch, bytes, now_s).is_err() {
                // It cannot be read: it is gone, with what left together with it.
                partition.lose_remote(&self.shared, fetch.location.run);
            }
        }
        self.note_if_short();
        if self.is_short() && !self.shared.pool.is_keeping_up() && self.evicts {
            self.evict_for(0, now_s);
            self.collect();
        }
    }

    /// The pool has lost the run of an item.
    pub fn lose(&self, fetch: &Fetch) {
        self.partitions[fetch.partition].lose_remote(&self.shared, fetch.location.run);
    }

    /// Gives up the run in the pool that was opened first; returns whether there was one.
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
