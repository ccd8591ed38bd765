//! How a partition leaves a server and comes to another one.

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

/// What a partition has beside its memory, when no thread uses it any more.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Departure {
    /// The last cas number.
    pub cas: u64,
    /// Items.
    pub items: u64,
    /// The sequence that the server would give to its next run.
    pub sequence_end: u64,
    /// The current second of the partition.
    pub second: u32,
    /// In how many seconds all items are to be flushed, if they are.
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

    /// Where the partition is.
    #[inline]
    pub fn presence(&self) -> Presence {
        self.presence.get()
    }

    /// Whether requests are served here.
    #[inline]
    pub fn is_here(&self) -> bool {
        self.presence.is_here()
    }

    /// Notes where a partition is that is not here.
    pub fn set_absent(&self, presence: Presence) {
        debug_assert!(!matches!(self.presence(), Presence::Here | Presence::Leaving));
        self.presence.set(presence);
    }

    /// Has requests wait until the partition comes.
    pub(in super::super) fn set_absent_from_start(&self) {
        self.presence.set(Presence::Unknown);
    }

    /// Notes a place that is newer than the known one; returns whether it was.
    pub fn learn(&self, place: Place) -> bool {
        self.presence.learn(place)
    }

    /// The layout of the memory.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// A descriptor of the memory, and the offset in it.
    ///
    /// # Errors
    /// If there is no descriptor left.
    pub fn descriptor(&self) -> io::Result<OwnedFd> {
        self.memory.descriptor()
    }

    /// The end of the runs in use at this time.
    pub fn runs_end(&self) -> u32 {
        self.log.lock().log.runs_end()
    }

    /// Bytes of the budget that the partition has at this time.
    pub fn charged(&self) -> u64 {
        let inner = self.log.lock();
        inner.index_charged + inner.log.charged()
    }

    /// Has new requests wait. Others may still be served until their turns end.
    pub(in super::super) fn begin_leaving(&self) {
        self.presence.set(Presence::Leaving);
        for oldest in &self.oldest {
            oldest.store(NO_SEQUENCE, Ordering::Relaxed);
        }
    }

    /// What goes with the memory. No thread may serve requests for the partition any more.
    pub(in super::super) fn depart(&self, shared: &Shared, now_s: u32) -> Departure {
        let mut inner = self.log.lock();
        // What the pool has is this server's.
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
        // What was noted while nothing could be done here was forgotten.
        shared.retired_in.note(self.number);
        if inner.log.has_cleanable() {
            shared.cleanable_in.note(self.number);
        }
    }

    /// Gives the memory up. No thread may serve requests for the partition.
    ///
    /// # Errors
    /// If the system cannot take the memory back; it is used until the server ends.
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

    /// Serves requests, with cas numbers after this one for what is set from now on.
    pub(in super::super) fn begin(&self, shared: &Shared, cas: u64) {
        self.log.lock().log.cas = cas;
        self.stay(shared);
    }

    /// Adopts what was written to the memory. Requests are served after [`Self::stay`].
    ///
    /// # Errors
    /// If that contradicts itself, or does not fit the memory. It must be forgotten then.
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

    /// Notes in the table that a run is free. The partition must not be here.
    pub fn clear_run_entry(&self, run: u32) {
        let entry = self.entry(run);
        entry.set_state(RunState::Free);
        entry.set_charged(0);
    }

    /// Returns memory to the system that is not needed. The partition must not be here.
    pub fn discard(&self, offset: usize, bytes: usize) {
        self.memory.discard(offset, bytes);
    }

    /// The entry of a run in the table.
    pub fn run_entry(&self, run: u32) -> RunEntry<'_> {
        self.entry(run)
    }

    /// Sets the second in which all items are to be flushed, or 0.
    pub(in super::super) fn set_flush_s(&self, flush_s: u32) {
        self.flush_s.store(flush_s, Ordering::Relaxed);
    }

    /// The second in which all items are to be flushed, or 0.
    pub(in super::super) fn flush_s(&self) -> u32 {
        self.flush_s.load(Ordering::Relaxed)
    }
}
