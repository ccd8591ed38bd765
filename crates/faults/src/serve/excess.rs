//! Says why a run is over its limit: what of its memory cannot be evicted.

use std::sync::Arc;
use std::time::{Duration, Instant};

use aquifer_pager::PAGE_BYTES;

use super::observed::ObservedDuration;
use super::program::Program;
use crate::maps::{self, KeptPages};

/// Observed time after which a run that stays over its limit is ended.
const TOO_SMALL_AFTER: Duration = Duration::from_secs(10);
/// Observed time after which the owner of a run is told that it is over its limit.
const TELL_AFTER: Duration = Duration::from_secs(1);
/// Parts of the limit, and pages, above which the owner is told at once.
const TELL_AT_ONCE_FACTOR: u64 = 2;
const TELL_AT_ONCE_PAGES: u64 = (64 << 20) / PAGE_BYTES as u64;

/// A run is over its limit.
#[derive(Clone, Copy, Debug)]
pub(super) struct OverLimit {
    duration: ObservedDuration,
    /// Pages evicted from its programs when that began.
    evictions: u64,
}

/// What is due for a run that is over its limit.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum DueStep {
    Nothing,
    /// Tell its owner.
    Tell,
    /// End the run if it will stay over its limit.
    Judge,
}

impl OverLimit {
    /// `evictions`: pages evicted from its programs so far.
    pub fn begin(now: Instant, evictions: u64) -> Self {
        Self { duration: ObservedDuration::begin(now), evictions }
    }

    /// Notes that the run has `total` resident pages, of which it may have `max`.
    pub fn observe(&mut self, now: Instant, total: u64, max: u64) -> DueStep {
        let lasted = self.duration.observe(now);
        if lasted > TOO_SMALL_AFTER {
            DueStep::Judge
        } else if lasted > TELL_AFTER || total > max * TELL_AT_ONCE_FACTOR + TELL_AT_ONCE_PAGES {
            DueStep::Tell
        } else {
            DueStep::Nothing
        }
    }

    /// Whether the run will stay over its limit: either pages that cannot be evicted exceed it, or
    /// nothing was evicted meanwhile.
    pub fn is_hopeless(self, evictions: u64, unevictable: u64, max: u64) -> bool {
        unevictable > max || evictions == self.evictions
    }
}

/// The resident pages of a run that cannot be evicted now.
///
/// Takes as long as reading the maps of its programs.
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

/// The reasons for which pages stay, with their sizes; `None` if there is less than a mebibyte.
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

/// What the owner is told of a run with `total` resident pages, of which it may have `max`.
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
        assert!(!over.is_hopeless(101, 900, 1000));
        assert!(over.is_hopeless(100, 900, 1000), "nothing is evicted");
        assert!(over.is_hopeless(5000, 1001, 1000), "unevictable pages exceed the limit");
    }

    #[test]
    fn the_owner_is_told_soon_of_much_and_later_of_little() {
        let begun = Instant::now();
        let mut over = OverLimit::begin(begun, 0);
        assert_eq!(over.observe(begun, 1500, 1000), DueStep::Nothing);
        assert_eq!(over.observe(begun, 2001 + TELL_AT_ONCE_PAGES, 1000), DueStep::Tell);
        let observe_for = |over: &mut OverLimit, steps: u32| {
            (1..=steps).map(|step| over.observe(begun + step * Duration::from_millis(150), 1500, 1000)).last()
        };
        assert_eq!(observe_for(&mut over, 7), Some(DueStep::Tell));
        assert_eq!(observe_for(&mut OverLimit::begin(begun, 0), 68), Some(DueStep::Judge));
    }

    #[test]
    fn a_notice_says_how_much_stays_and_why() {
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
