//! The partitions of a store that leave and come.

use std::io;
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::log::Damaged;
use super::partition::Departure;
use super::presence::{Place, Presence};
use super::{Store, cas};

/// How long a thread sleeps that waits for the turns of others.
const TURN_POLL_INTERVAL: Duration = Duration::from_micros(20);

/// Memory of the budget that is kept for a partition that is about to come.
#[derive(Debug)]
pub struct Reservation<'a> {
    store: &'a Store,
    bytes: u64,
}

impl Reservation<'_> {
    /// Reserves more, or less, until it has so many bytes. Evicts items for that. Returns false if
    /// there can never be so many.
    pub fn resize(&mut self, bytes: u64, now_s: u32) -> bool {
        let budget = &self.store.shared.budget;
        if bytes <= self.bytes {
            budget.free(self.bytes - bytes);
        } else {
            let more = bytes - self.bytes;
            if budget.available() < more + self.store.reserve() {
                if !self.store.evicts() || !self.store.evict_for(more, now_s) {
                    return false;
                }
                self.store.collect();
            }
            budget.charge_always(more);
        }
        self.bytes = bytes;
        true
    }
}

impl Drop for Reservation<'_> {
    fn drop(&mut self) {
        self.store.shared.budget.free(self.bytes);
    }
}

impl Store {
    /// Gives all partitions up, in a store that was just made: they are to come from elsewhere.
    pub fn begin_absent(&self) {
        for partition in &self.partitions {
            partition.begin_leaving();
            partition.set_absent_from_start();
        }
    }

    /// Ends the service of a partition: requests wait. Returns what goes with its memory when all
    /// threads have ended the turns in which they may have served it.
    pub fn leave(&self, partition: usize, now_s: u32) -> Departure {
        self.suspend(&[partition]);
        self.partitions[partition].depart(&self.shared, now_s)
    }

    /// Serves no requests for some partitions from now on, and waits until none is being served.
    /// Their items stay.
    pub fn suspend(&self, partitions: &[usize]) {
        partitions.iter().for_each(|partition| self.partitions[*partition].begin_leaving());
        let epoch = self.shared.epochs.retire();
        while self.shared.epochs.oldest() <= epoch {
            std::thread::sleep(TURN_POLL_INTERVAL);
        }
    }

    /// Serves a partition again, or serves one that has come.
    pub fn stay(&self, partition: usize) {
        self.partitions[partition].stay(&self.shared);
        self.note_flush(partition);
    }

    /// Serves a suspended partition again, or one of adopted memory, in this generation.
    pub fn resume(&self, partition: usize, generation: u64) {
        self.partitions[partition].begin(&self.shared, cas::before_first(partition, generation));
        self.note_flush(partition);
    }

    /// Has the items of a partition flushed when it is time.
    fn note_flush(&self, partition: usize) {
        let flush_s = self.partitions[partition].flush_s();
        if flush_s != 0 {
            self.next_flush_s.fetch_min(flush_s, Ordering::Relaxed);
        }
    }

    /// Gives the memory of a partition up that has left or was lost, and that no thread serves.
    ///
    /// # Errors
    /// If the system cannot take the memory back.
    pub fn forget(&self, partition: usize, presence: Presence) -> io::Result<()> {
        self.partitions[partition].forget(&self.shared, presence)
    }

    /// Serves a partition without items, in this generation.
    pub fn begin_empty(&self, partition: usize, generation: u64) {
        debug_assert_eq!(self.partitions[partition].items(), 0);
        self.partitions[partition].begin(&self.shared, cas::before_first(partition, generation));
    }

    /// Memory for a partition that is about to come.
    #[must_use]
    pub fn reservation(&self) -> Reservation<'_> {
        Reservation { store: self, bytes: 0 }
    }

    /// Adopts a partition whose memory was filled. Requests are served after [`Self::stay`].
    ///
    /// # Errors
    /// If what came contradicts itself. It is forgotten then.
    pub fn arrive(&self, partition: usize, departure: &Departure, now_s: u32) -> Result<(), Damaged> {
        let arriving = &self.partitions[partition];
        arriving.arrive(&self.shared, departure, now_s).inspect_err(|_| {
            if let Err(error) = arriving.forget(&self.shared, arriving.presence()) {
                tracing::error!(%error, partition, "memory of a partition cannot be returned");
            }
        })
    }

    /// Notes where a partition is, if that is newer than what is known; returns whether it was.
    pub fn learn(&self, partition: usize, place: Place) -> bool {
        self.partitions[partition].learn(place)
    }
}
