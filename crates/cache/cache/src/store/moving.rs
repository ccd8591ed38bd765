//! Partitions that leave a store and arrive at one.

use std::io;
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::log::Damaged;
use super::partition::Departure;
use super::presence::{Place, Presence};
use super::{Store, cas};

/// Interval at which a thread polls for the end of the turns of other threads.
const TURN_POLL_INTERVAL: Duration = Duration::from_micros(20);

/// Memory of the budget that is reserved for a partition that is about to arrive.
#[derive(Debug)]
pub struct Reservation<'a> {
    store: &'a Store,
    bytes: u64,
}

impl Reservation<'_> {
    /// Changes the reservation to `bytes`, and evicts items for more bytes. Returns false if there
    /// can never be enough memory.
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
    /// Makes all partitions of a new store absent: they arrive from other servers.
    pub fn begin_absent(&self) {
        for partition in &self.partitions {
            partition.begin_leaving();
            partition.set_absent_from_start();
        }
    }

    /// Stops serving a partition: requests wait. When all threads have ended the turns in which
    /// they may have served it, returns the state that is sent beside its memory.
    pub fn leave(&self, partition: usize, now_s: u32) -> Departure {
        self.suspend(&[partition]);
        self.partitions[partition].depart(&self.shared, now_s)
    }

    /// Stops serving some partitions, and waits until no request for them is being served. Their
    /// items stay.
    pub fn suspend(&self, partitions: &[usize]) {
        partitions.iter().for_each(|partition| self.partitions[*partition].begin_leaving());
        let epoch = self.shared.epochs.retire();
        while self.shared.epochs.oldest() <= epoch {
            std::thread::sleep(TURN_POLL_INTERVAL);
        }
    }

    /// Serves a suspended partition again, or serves one that has arrived.
    pub fn stay(&self, partition: usize) {
        self.partitions[partition].stay(&self.shared);
        self.note_flush(partition);
    }

    /// Serves a suspended partition again, or one of adopted memory, in this generation.
    pub fn resume(&self, partition: usize, generation: u64) {
        self.partitions[partition].begin(&self.shared, cas::before_first(partition, generation));
        self.note_flush(partition);
    }

    /// Includes the scheduled flush of a partition in `next_flush_s`.
    fn note_flush(&self, partition: usize) {
        let flush_s = self.partitions[partition].flush_s();
        if flush_s != 0 {
            self.next_flush_s.fetch_min(flush_s, Ordering::Relaxed);
        }
    }

    /// Frees the memory of a partition that has left or was lost, and that no thread serves.
    ///
    /// # Errors
    /// If the memory cannot be returned to the system.
    pub fn forget(&self, partition: usize, presence: Presence) -> io::Result<()> {
        self.partitions[partition].forget(&self.shared, presence)
    }

    /// Serves a partition without items, in this generation.
    pub fn begin_empty(&self, partition: usize, generation: u64) {
        debug_assert_eq!(self.partitions[partition].items(), 0);
        self.partitions[partition].begin(&self.shared, cas::before_first(partition, generation));
    }

    /// An empty reservation for a partition that is about to arrive.
    #[must_use]
    pub fn reservation(&self) -> Reservation<'_> {
        Reservation { store: self, bytes: 0 }
    }

    /// Adopts a partition whose memory was filled. Requests are served after [`Self::stay`].
    ///
    /// # Errors
    /// If the received memory is inconsistent. It is freed then.
    pub fn arrive(&self, partition: usize, departure: &Departure, now_s: u32) -> Result<(), Damaged> {
        let arriving = &self.partitions[partition];
        arriving.arrive(&self.shared, departure, now_s).inspect_err(|_| {
            if let Err(error) = arriving.forget(&self.shared, arriving.presence()) {
                tracing::error!(%error, partition, "cannot return the memory of a partition to the system");
            }
        })
    }

    /// Notes the place of a partition if it is newer than the known one; returns whether it was.
    pub fn learn(&self, partition: usize, place: Place) -> bool {
        self.partitions[partition].learn(place)
    }
}
