//! Departure of a partition from a server, and arrival at another one.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use serde::{Deserialize, Serialize};

use super::super::Shared;
use super::super::index::IndexState;
use super::super::layout::Layout;
use super::super::log::{Damaged, Log, Origin};
use super::super::presence::{Place, Presence};
use super::super::runs::{RunEntry, RunState};
use super::{Inner, NO_SEQUENCE, Partition};

/// The state of a partition outside its memory, when no thread uses it any more.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Departure {
    /// The last cas number.
    pub cas: u64,
    /// The number of items.
    pub items: u64,
    /// The sequence of the next run that the server would open.
    pub sequence_end: u64,
    /// The current second of the partition.
    pub second: u32,
    /// Seconds until the scheduled flush of all items, if there is one.
    pub flush_in_s: Option<u32>,
    /// The end of the runs in use.
    pub runs_end: u32,
    /// The state of the index.
    pub index: IndexState,
}

impl Partition {
    /// The number of the partition.
    pub fn number(&self) -> usize {
        self.number
    }

    /// The server of the partition, as this server knows it.
    #[inline]
    pub fn presence(&self) -> Presence {
        self.presence.get()
    }

    /// Whether this server serves the partition.
    #[inline]
    pub fn is_here(&self) -> bool {
        self.presence.is_here()
    }

    /// Sets the presence of a partition that is not on this server.
    pub fn set_absent(&self, presence: Presence) {
        debug_assert!(!matches!(self.presence(), Presence::Here | Presence::Leaving));
        self.presence.set(presence);
    }

    /// Makes requests wait until the partition arrives.
    pub(in super::super) fn set_absent_from_start(&self) {
        self.presence.set(Presence::Unknown);
    }

    /// Notes the partition's place if it is newer than the known one; returns whether it was.
    pub fn learn(&self, place: Place) -> bool {
        self.presence.learn(place)
    }

    /// The layout of the memory.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// A descriptor of the memory.
    ///
    /// # Errors
    /// If there is no descriptor left.
    pub fn descriptor(&self) -> io::Result<OwnedFd> {
        self.memory.descriptor()
    }

    /// The end of the runs that are in use now.
    pub fn runs_end(&self) -> u32 {
        self.log.lock().log.runs_end()
    }

    /// Bytes of the budget that are charged for the partition now.
    pub fn charged(&self) -> u64 {
        let inner = self.log.lock();
        inner.index_charged + inner.log.charged()
    }

    /// Makes new requests wait. Other requests may still be served until their turns end.
    pub(in super::super) fn begin_leaving(&self) {
        self.presence.set(Presence::Leaving);
        for oldest in &self.oldest {
            oldest.store(NO_SEQUENCE, Ordering::Relaxed);
        }
    }

    /// Seals the log, and returns the state that is sent beside the memory. No thread may serve
    /// requests for the partition any more.
    pub(in super::super) fn depart(&self, shared: &Shared, now_s: u32) -> Departure {
        let mut inner = self.log.lock();
        // The places in the pool belong to this server.
        self.drop_all_remote(shared, &mut inner);
        inner.log.seal_all(shared);
        let flush_s = self.flush_s.load(Ordering::Relaxed);
        Departure {
            cas: inner.log.cas,
            items: inner.items,
            sequence_end: shared.sequence.load(Ordering::Relaxed),
            second: self.clock_offset.to_partition(now_s),
            flush_in_s: (flush_s != 0).then(|| flush_s.saturating_sub(now_s)),
            runs_end: inner.log.runs_end(),
            index: self.index.state(),
        }
    }

    /// Serves requests again.
    pub(in super::super) fn stay(&self, shared: &Shared) {
        let mut inner = self.log.lock();
        self.presence.set(Presence::Here);
        self.publish_oldest(&mut inner);
        // The partition's number was dropped from these sets while the partition was suspended.
        shared.retired_in.note(self.number);
        if inner.log.has_cleanable() {
            shared.cleanable_in.note(self.number);
        }
    }

    /// Frees the memory. No thread may serve requests for the partition.
    ///
    /// # Errors
    /// If the memory cannot be returned to the system; it stays allocated until the server ends.
    pub(in super::super) fn forget(&self, shared: &Shared, presence: Presence) -> io::Result<()> {
        let mut inner = self.log.lock();
        inner.log.release_all(shared);
        shared.budget.free(inner.index_charged);
        *inner = Inner {
            log: Log::new(self.number, Arc::clone(&self.memory), self.layout, 0),
            items: 0,
            index_charged: 0,
        };
        self.begin_leaving();
        self.clock_offset.set(0);
        self.flush_s.store(0, Ordering::Relaxed);
        let cleared = self.memory.clear();
        self.index.restore(IndexState::EMPTY);
        self.presence.set(presence);
        cleared
    }

    /// Serves requests. The cas numbers of items that are set from now on begin after `cas`.
    pub(in super::super) fn begin(&self, shared: &Shared, cas: u64) {
        self.log.lock().log.cas = cas;
        self.stay(shared);
    }

    /// Adopts the memory that was received. Requests are served after [`Self::stay`].
    ///
    /// # Errors
    /// If the memory is inconsistent, or exceeds the layout. [`Self::forget`] must be called then.
    pub(in super::super) fn arrive(
        &self,
        shared: &Shared,
        departure: &Departure,
        now_s: u32,
    ) -> Result<(), Damaged> {
        let mut inner = self.log.lock();
        if !self.layout.fits(departure.runs_end, departure.index) {
            return Err(Damaged);
        }
        self.index.restore(departure.index);
        let Departure { sequence_end, runs_end, .. } = *departure;
        let origin = Origin::Move { sequence_end, runs_end };
        let memory = Arc::clone(&self.memory);
        inner.log = Log::adopt(self.number, memory, self.layout, shared, departure.cas, origin)?;
        inner.items = departure.items;
        self.charge_index(shared, &mut inner);
        let ahead = i64::from(departure.second) - i64::from(now_s);
        self.clock_offset.set(i32::try_from(ahead).map_err(|_| Damaged)?);
        let flush_s = departure.flush_in_s.map_or(0, |left_s| now_s.saturating_add(left_s));
        self.flush_s.store(flush_s, Ordering::Relaxed);
        Ok(())
    }

    /// Marks a run as free in the table. The partition must not be on this server.
    pub fn clear_run_entry(&self, run: u32) {
        let entry = self.entry(run);
        entry.set_state(RunState::Free);
        entry.set_charged(0);
    }

    /// Returns unused memory to the system. The partition must not be on this server.
    pub fn discard(&self, offset: usize, bytes: usize) {
        self.memory.discard(offset, bytes);
    }

    /// The entry of a run in the table.
    pub fn run_entry(&self, run: u32) -> RunEntry<'_> {
        self.entry(run)
    }

    /// Schedules a flush of all items for this second; 0 cancels it.
    pub(in super::super) fn set_flush_s(&self, flush_s: u32) {
        self.flush_s.store(flush_s, Ordering::Relaxed);
    }

    /// The second for which a flush of all items is scheduled, or 0.
    pub(in super::super) fn flush_s(&self) -> u32 {
        self.flush_s.load(Ordering::Relaxed)
    }
}
