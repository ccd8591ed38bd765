//! Sparse slabs are emptied into others, so that the pool gets their memory back. The sender chooses; the volumes move their pages, each as it finds the
//! time ([`Volume::look_for_moves`](crate::Volume::look_for_moves)); what has become empty goes back as ever.

use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use super::Sender;
use crate::filler::Worth;
use crate::page::PAGE_BYTES;
use crate::slabs::SlabId;

/// How often to look.
const LOOK_EVERY: Duration = Duration::from_millis(20);
/// A round ends after this, whatever is left.
const ROUND_MAX: Duration = Duration::from_secs(1);
/// Between two rounds; the double of that after each round of which little came, for then pages are shared, or their programs busy.
const REST: Duration = Duration::from_millis(100);
const REST_DOUBLINGS_MAX: u32 = 9;
/// Who has written nothing for so long does not want empty slabs soon.
const RESERVE_KEPT: Duration = Duration::from_secs(1);
/// If fewer holes than this are there for each page that was written since the last time, they are filled by that.
const HOLES_PER_WRITTEN: u64 = 8;

/// Which slabs are to become empty.
#[derive(Debug, Default)]
pub(super) struct Repacker {
    slabs: Vec<SlabId>,
    began: Duration,
    next_look: Duration,
    /// Pages that had been written when it was last looked, and since when there are no more.
    seen: u64,
    seen_since: Duration,
    /// No round begins before.
    not_before: Duration,
    /// Pages that had been written when it was last thought of a round.
    written: u64,
    /// Rounds in a row of which little came.
    fruitless: u32,
}

impl Sender {
    /// Look now and then whether slabs have become so sparse that they are worth emptying, or have been emptied.
    pub(super) fn repack(&mut self, is_starved: bool) {
        if is_starved && !self.repacker.slabs.is_empty() {
            // What waits for room goes into the holes of the very slabs that were to become empty.
            self.give_round_up();
        }
        let now = self.ports.now();
        if is_starved || now < self.repacker.next_look {
            return;
        }
        self.repacker.next_look = now + LOOK_EVERY;
        let is_short = self.is_pool_short.load(Relaxed);
        if self.stats.pages != self.repacker.seen {
            self.repacker.seen = self.stats.pages;
            self.repacker.seen_since = now;
        }
        let is_quiet = now >= self.repacker.seen_since + RESERVE_KEPT;
        if self.filler.trim_reserve(&mut self.pool, is_short || is_quiet) {
            self.repacker.next_look = now;
        }
        if !self.filler.repacks() {
            return;
        }
        if self.slabs.vacating_round().is_some() {
            self.end_round_if_over(now);
        } else if !self.repacker.slabs.is_empty() {
            if !self.is_writing_to_chosen() {
                self.begin_round(now);
            } else if now >= self.repacker.began + ROUND_MAX {
                self.give_round_up();
            }
        } else if now >= self.repacker.not_before && !self.healer.is_stopped() {
            self.choose(now, if is_short { Worth::Short } else { Worth::Usual });
        }
    }

    /// Have all slabs emptied from now on, sparse or not; for tests.
    pub fn repack_all(&mut self) {
        self.slabs.end_vacating();
        self.repacker.slabs = self.filler.movable();
        self.slabs.mark(&self.repacker.slabs);
        self.begin_round(self.ports.now());
    }

    fn choose(&mut self, now: Duration, worth: Worth) {
        self.repacker.not_before = now + REST;
        // Who writes that much fills the holes soon: slabs that are not filled meanwhile would only cost fresh ones.
        let written = self.stats.pages - std::mem::replace(&mut self.repacker.written, self.stats.pages);
        let holes = (self.slabs.bytes().0 / PAGE_BYTES as u64).saturating_sub(self.slabs.pages());
        if written * HOLES_PER_WRITTEN >= holes {
            return;
        }
        self.repacker.began = now;
        self.repacker.slabs = self.filler.worth_vacating(worth);
        self.slabs.mark(&self.repacker.slabs);
    }

    /// Slabs that were chosen are filled again.
    fn give_round_up(&mut self) {
        self.slabs.end_vacating();
        self.repacker.slabs.clear();
        self.repacker.fruitless = (self.repacker.fruitless + 1).min(REST_DOUBLINGS_MAX);
        self.repacker.not_before = self.ports.now() + REST * (1 << self.repacker.fruitless);
    }

    /// From now on pages are moved.
    fn begin_round(&mut self, now: Duration) {
        self.slabs.begin_vacating();
        self.repacker.began = now;
    }

    /// Whether something is on its way to a slab that was chosen: it would come after those who look for pages to move.
    fn is_writing_to_chosen(&self) -> bool {
        let mut locations = self.jobs.iter().flat_map(|job| job.locations.iter().flatten());
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
        let is_fruitless = vacated <= left;
        self.repacker.fruitless =
            if is_fruitless { (self.repacker.fruitless + 1).min(REST_DOUBLINGS_MAX) } else { 0 };
        self.repacker.not_before = now + REST * (1 << self.repacker.fruitless);
        self.repacker.slabs.clear();
    }
}
