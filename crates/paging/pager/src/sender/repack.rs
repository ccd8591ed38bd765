//! Chooses sparse slabs to be vacated, so that their memory can be freed.
//!
//! The sender marks slabs, and the volumes move the pages in them
//! ([`Volume::find_pages_to_move`](crate::Volume::find_pages_to_move)). Slabs that became empty are
//! freed as usual.

use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use super::Sender;
use crate::filler::GainThreshold;
use crate::page::PAGE_BYTES;
use crate::slabs::SlabId;

/// The interval between checks.
const CHECK_INTERVAL: Duration = Duration::from_millis(20);
/// Longest time of a round.
const ROUND_MAX: Duration = Duration::from_secs(1);
/// The pause between two rounds. It doubles after each failed round, because pages are shared or
/// their programs are busy.
const PAUSE: Duration = Duration::from_millis(100);
/// Maximum number of times that the pause doubles.
const PAUSE_DOUBLINGS_MAX: u32 = 9;
/// Time without writes after which a run is considered not to need empty slabs soon.
const IDLE_TIMEOUT: Duration = Duration::from_secs(1);
/// If there are at most this number of holes for each page written since slabs were last chosen,
/// then the next writes will fill them.
const HOLES_PER_WRITTEN: u64 = 8;

/// The state of the rounds of vacating.
#[derive(Debug, Default)]
pub(super) struct Repacker {
    slabs: Vec<SlabId>,
    began: Duration,
    next_check: Duration,
    /// The number of pages that had been written at the last check.
    pages_seen: u64,
    pages_unchanged_since: Duration,
    /// The earliest time of the next round.
    next_round_at: Duration,
    /// The number of pages that had been written when slabs were last chosen.
    written: u64,
    /// Number of consecutive rounds that vacated at most half of their slabs.
    failed_rounds: u32,
}

impl Sender {
    /// Frees empty slabs, and begins or ends a round of vacating. Called at each
    /// [`Sender::advance`].
    pub(super) fn repack(&mut self, is_pool_full: bool) {
        if is_pool_full && !self.repacker.slabs.is_empty() {
            // The waiting batches need the holes of the slabs that were to be vacated.
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
        let is_idle = now >= self.repacker.pages_unchanged_since + IDLE_TIMEOUT;
        if self.filler.trim_empty(&mut self.pool, is_short || is_idle) {
            self.repacker.next_check = now;
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

    /// Begins a round that vacates all slabs, sparse or not. Only used by tests.
    pub fn repack_all(&mut self) {
        self.slabs.end_vacating();
        self.repacker.slabs = self.filler.movable_slabs();
        self.slabs.mark(&self.repacker.slabs);
        self.begin_round(self.ports.now());
    }

    fn choose_slabs(&mut self, now: Duration, threshold: GainThreshold) {
        self.repacker.next_round_at = now + PAUSE;
        // The next writes fill the holes. If slabs were marked, these writes would need new slabs.
        let written = self.stats.pages - std::mem::replace(&mut self.repacker.written, self.stats.pages);
        let holes = (self.slabs.bytes().0 / PAGE_BYTES as u64).saturating_sub(self.slabs.pages());
        if written * HOLES_PER_WRITTEN >= holes {
            return;
        }
        self.repacker.began = now;
        self.repacker.slabs = self.filler.slabs_to_vacate(threshold);
        self.slabs.mark(&self.repacker.slabs);
    }

    /// Cancels the round: its slabs are filled again.
    fn cancel_round(&mut self) {
        self.slabs.end_vacating();
        self.repacker.slabs.clear();
        self.repacker.failed_rounds = (self.repacker.failed_rounds + 1).min(PAUSE_DOUBLINGS_MAX);
        self.repacker.next_round_at = self.ports.now() + PAUSE * (1 << self.repacker.failed_rounds);
    }

    /// Begins the round, in which volumes move pages.
    fn begin_round(&mut self, now: Duration) {
        self.slabs.begin_vacating();
        self.repacker.began = now;
    }

    /// Whether WRITEs to a chosen slab are in flight. Volumes that have already searched would miss
    /// their pages.
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
