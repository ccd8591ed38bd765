//! Sparse slabs are emptied into others, so that the pool gets their memory back. The sender chooses; the volumes move their pages, each as it finds the
//! time ([`Volume::find_pages_to_move`](crate::Volume::find_pages_to_move)); what has become empty goes back as ever.

use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use super::Sender;
use crate::filler::GainThreshold;
use crate::page::PAGE_BYTES;
use crate::slabs::SlabId;

/// How often to look.
const CHECK_INTERVAL: Duration = Duration::from_millis(20);
/// A round ends after this, whatever is left.
const ROUND_MAX: Duration = Duration::from_secs(1);
/// Between two rounds; the double of that after each round of which little came, for then pages are shared, or their programs busy.
const PAUSE: Duration = Duration::from_millis(100);
const PAUSE_DOUBLINGS_MAX: u32 = 9;
/// Who has written nothing for so long does not want empty slabs soon.
const QUIET_AFTER: Duration = Duration::from_secs(1);
/// If fewer holes than this are there for each page that was written since the last time, they are filled by that.
const HOLES_PER_WRITTEN: u64 = 8;

/// Which slabs are to become empty.
#[derive(Debug, Default)]
pub(super) struct Repacker {
    slabs: Vec<SlabId>,
    began: Duration,
    next_check: Duration,
    /// Pages that had been written when it was last looked, and since when there are no more.
    pages_seen: u64,
    pages_unchanged_since: Duration,
    /// No round begins before.
    next_round_at: Duration,
    /// Pages that had been written when it was last thought of a round.
    written: u64,
    /// Rounds in a row of which little came.
    failed_rounds: u32,
}

impl Sender {
    /// Look now and then whether slabs have become so sparse that they are worth emptying, or have been emptied.
    pub(super) fn repack(&mut self, is_pool_full: bool) {
        if is_pool_full && !self.repacker.slabs.is_empty() {
            // What waits for room goes into the holes of the very slabs that were to become empty.
            self.cancel_round();
        }
        let now = self.ports.now();
        if is_pool_full || now < self.repacker.next_check {
            return;
        }
        self.repacker.next_check = now + CHECK_INTERVAL;
        let is_short = self.is_pool_short.load(Relaxed);
        if self.stats.pages != self.repacker.pages_seen {
            self.repacker.pages_seen = self.stats.pages;
            self.repacker.pages_unchanged_since = now;
        }
        let is_quiet = now >= self.repacker.pages_unchanged_since + QUIET_AFTER;
        if self.filler.trim_empty(&mut self.pool, is_short || is_quiet) {
            self.repacker.next_check = now;
        }
        if !self.filler.is_repacking_enabled() {
            return;
        }
        if self.slabs.vacating_round().is_some() {
            self.end_round_if_over(now);
        } else if !self.repacker.slabs.is_empty() {
            if !self.is_writing_to_chosen() {
                self.begin_round(now);
            } else if now >= self.repacker.began + ROUND_MAX {
                self.cancel_round();
            }
        } else if now >= self.repacker.next_round_at && !self.healer.is_stopped() {
            self.choose_slabs(now, if is_short { GainThreshold::PoolShort } else { GainThreshold::Normal });
        }
    }

    /// Have all slabs emptied from now on, sparse or not; for tests.
    pub fn repack_all(&mut self) {
        self.slabs.end_vacating();
        self.repacker.slabs = self.filler.movable_slabs();
        self.slabs.mark(&self.repacker.slabs);
        self.begin_round(self.ports.now());
    }

    fn choose_slabs(&mut self, now: Duration, worth: GainThreshold) {
        self.repacker.next_round_at = now + PAUSE;
        // Who writes that much fills the holes soon: slabs that are not filled meanwhile would only cost fresh ones.
        let written = self.stats.pages - std::mem::replace(&mut self.repacker.written, self.stats.pages);
        let holes = (self.slabs.bytes().0 / PAGE_BYTES as u64).saturating_sub(self.slabs.pages());
        if written * HOLES_PER_WRITTEN >= holes {
            return;
        }
        self.repacker.began = now;
        self.repacker.slabs = self.filler.slabs_to_vacate(worth);
        self.slabs.mark(&self.repacker.slabs);
    }

    /// Slabs that were chosen are filled again.
    fn cancel_round(&mut self) {
        self.slabs.end_vacating();
        self.repacker.slabs.clear();
        self.repacker.failed_rounds = (self.repacker.failed_rounds + 1).min(PAUSE_DOUBLINGS_MAX);
        self.repacker.next_round_at = self.ports.now() + PAUSE * (1 << self.repacker.failed_rounds);
    }

    /// From now on pages are moved.
    fn begin_round(&mut self, now: Duration) {
        self.slabs.begin_vacating();
        self.repacker.began = now;
    }

    /// Whether something is on its way to a slab that was chosen: it would come after those who look for pages to move.
    fn is_writing_to_chosen(&self) -> bool {
        let mut locations = self.batches.iter().flat_map(|batch| batch.locations.iter().flatten());
        locations.any(|location| self.slabs.is_vacating(location.slab()))
    }

    fn end_round_if_over(&mut self, now: Duration) {
        let left = self
            .repacker
            .slabs
            .iter()
            .filter(|slab| self.slabs.is_vacating(**slab) && self.slabs.live_pages(**slab) > 0);
        let left = left.count();
        if left > 0 && now < self.repacker.began + ROUND_MAX {
            return;
        }
        self.slabs.end_vacating();
        let vacated = self.repacker.slabs.len() - left;
        self.stats.vacated_slabs += vacated as u64;
        let has_failed = vacated <= left;
        self.repacker.failed_rounds =
            if has_failed { (self.repacker.failed_rounds + 1).min(PAUSE_DOUBLINGS_MAX) } else { 0 };
        self.repacker.next_round_at = now + PAUSE * (1 << self.repacker.failed_rounds);
        self.repacker.slabs.clear();
    }
}
