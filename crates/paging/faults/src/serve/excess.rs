//! Runs over their limit: when to notify the owner, when to end the run, and which memory cannot be
//! evicted.

use std::sync::Arc;
use std::time::{Duration, Instant};

use aquifer_pager::PAGE_BYTES;

use super::observed::ObservedDuration;
use super::program::Program;
use crate::maps::{self, KeptPages};

/// Observed time after which a run that stays over its limit is ended.
const END_AFTER: Duration = Duration::from_secs(10);
/// Observed time after which the owner of a run is notified that it is over its limit.
const NOTIFY_AFTER: Duration = Duration::from_secs(1);
/// Multiple of the limit which, with [`NOTIFY_AT_ONCE_PAGES`] added, is the number of resident
/// pages above which the owner is notified at once.
const NOTIFY_AT_ONCE_FACTOR: u64 = 2;
/// See [`NOTIFY_AT_ONCE_FACTOR`]; in pages.
const NOTIFY_AT_ONCE_PAGES: u64 = (64 << 20) / PAGE_BYTES as u64;

/// The state of a run that is over its limit.
#[derive(Clone, Copy, Debug)]
pub(super) struct OverLimit {
    duration: ObservedDuration,
    /// Number of pages that were evicted from its programs before this state began.
    evictions: u64,
}

/// The next step for a run that is over its limit.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum DueStep {
    /// No step is due.
    Nothing,
    /// Notify the owner.
    Notify,
    /// End the run, if it will stay over its limit.
    Decide,
}

impl OverLimit {
    /// Begins the state. `evictions`: the number of pages evicted from the run's programs so far.
    pub fn begin(now: Instant, evictions: u64) -> Self {
        Self { duration: ObservedDuration::begin(now), evictions }
    }

    /// Records that the run has `total` resident pages and may have `max`. Returns the next step.
    pub fn observe(&mut self, now: Instant, total: u64, max: u64) -> DueStep {
        let lasted = self.duration.observe(now);
        if lasted > END_AFTER {
            DueStep::Decide
        } else if lasted > NOTIFY_AFTER || total > max * NOTIFY_AT_ONCE_FACTOR + NOTIFY_AT_ONCE_PAGES {
            DueStep::Notify
        } else {
            DueStep::Nothing
        }
    }

    /// Whether the run will stay over its limit: the pages that cannot be evicted exceed it, or no
    /// page was evicted since this state began.
    pub fn will_stay(self, evictions: u64, unevictable: u64, max: u64) -> bool {
        unevictable > max || evictions == self.evictions
    }
}

/// Counts the resident pages of a run that cannot be evicted now.
///
/// Reads `/proc/PID/smaps` of each program, which can take long.
pub(super) fn kept_pages(programs: &[Arc<Program>]) -> KeptPages {
    let mut kept = KeptPages::default();
    for program in programs {
        if let Some(text) = program.process().and_then(|process| process.read("smaps")) {
            kept.add(maps::kept_pages(&text, &program.bounds(), &program.pins()));
        }
    }
    kept
}

fn mebibytes(pages: u64) -> u64 {
    (pages * PAGE_BYTES as u64) >> 20
}

/// Returns a text with the reasons for which pages cannot be evicted, and their sizes; `None` if
/// each is less than a mebibyte.
pub(super) fn show_kept(kept: &KeptPages) -> Option<String> {
    let reasons = [
        (kept.locked, "locked (mlock)"),
        (kept.executable, "executable"),
        (kept.protected, "protected against writes (mprotect)"),
        (kept.other, "in stacks, small areas or private pages of files"),
    ];
    let parts: Vec<String> = reasons
        .iter()
        .filter(|(pages, _)| mebibytes(*pages) > 0)
        .map(|(pages, reason)| format!("{} MiB {reason}", mebibytes(*pages)))
        .collect();
    (!parts.is_empty()).then(|| parts.join(", "))
}

/// Returns the notice for the owner of a run that has `total` resident pages and may have `max`.
pub(super) fn notice(total: u64, max: u64, kept: &KeptPages) -> String {
    let (total, limit) = (mebibytes(total), mebibytes(max));
    let reason = show_kept(kept).map_or_else(
        || "it fills memory faster than pages can leave".to_owned(),
        |parts| format!("memory that cannot be paged stays resident ({parts})"),
    );
    format!("the program has {total} MiB resident, and its limit leaves it {limit} MiB: {reason}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_that_still_evicts_is_not_ended() {
        let over = OverLimit::begin(Instant::now(), 100);
        assert!(!over.will_stay(101, 900, 1000));
        assert!(over.will_stay(100, 900, 1000), "nothing is evicted");
        assert!(over.will_stay(5000, 1001, 1000), "unevictable pages exceed the limit");
    }

    #[test]
    fn the_owner_is_notified_at_once_of_a_large_excess_and_later_of_a_small_one() {
        let begun = Instant::now();
        let mut over = OverLimit::begin(begun, 0);
        assert_eq!(over.observe(begun, 1500, 1000), DueStep::Nothing);
        assert_eq!(over.observe(begun, 2001 + NOTIFY_AT_ONCE_PAGES, 1000), DueStep::Notify);
        let observe_for = |over: &mut OverLimit, steps: u32| {
            (1..=steps).map(|step| over.observe(begun + step * Duration::from_millis(150), 1500, 1000)).last()
        };
        assert_eq!(observe_for(&mut over, 7), Some(DueStep::Notify));
        assert_eq!(observe_for(&mut OverLimit::begin(begun, 0), 68), Some(DueStep::Decide));
    }

    #[test]
    fn a_notice_has_the_unevictable_memory_and_the_reasons() {
        let kept = KeptPages { locked: 10, executable: 0, protected: 30 << 8, other: 2 << 8 };
        assert_eq!(
            notice(150 << 8, 31 << 8, &kept),
            "the program has 150 MiB resident, and its limit leaves it 31 MiB: memory that cannot be paged \
             stays resident (30 MiB protected against writes (mprotect), 2 MiB in stacks, small areas or \
             private pages of files)"
        );
        assert!(notice(150 << 8, 31 << 8, &KeptPages::default()).contains("faster than pages can leave"));
    }
}
