//! How many pages of a run are resident if its processes share pages after forks.
//!
//! The kernel counts a shared page for each process that has it. What each has in proportion is
//! known exactly at a *count* only, which takes long. Between two counts, pages are added and
//! subtracted as the processes grow and shrink.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use aquifer_pager::Budget;

use super::count::{MemoryUsage, shared_pages};
use super::program::Program;

/// Shortest time between two counts, as a multiple of what a count took.
const INTERVAL_FACTOR_MIN: u32 = 4;
/// The factor doubles up to this while what is shared is steady.
const INTERVAL_FACTOR_MAX: u32 = 128;
/// It is steady if it changes by less than this part of the limit.
const CHANGE_DIVISOR: u64 = 64;
/// Longest time between two counts.
const INTERVAL_MAX: Duration = Duration::from_millis(200);

/// What a process had at the last count, in pages.
#[derive(Clone, Copy, Debug)]
struct Counted {
    /// Resident pages, shared ones too.
    resident: u64,
    /// The same, with shared pages in proportion.
    share: u64,
}

impl Counted {
    /// Its share with this many resident pages now.
    fn share_with(self, resident: u64) -> u64 {
        (self.share + resident).saturating_sub(self.resident)
    }
}

/// The processes of a run that have shared pages.
#[derive(Debug)]
pub(super) struct Family {
    /// By the number of the program.
    counted: HashMap<u64, Counted>,
    /// Pages granted at the last count; pages granted since are not shared any more.
    granted: u64,
    /// Pages that were counted more than once at the last count.
    overlap: u64,
    next_count: Instant,
    /// Time to the next count, as a multiple of what the last one took.
    interval_factor: u32,
}

impl Family {
    pub fn new() -> Self {
        Self {
            counted: HashMap::new(),
            granted: 0,
            overlap: 0,
            next_count: Instant::now(),
            interval_factor: INTERVAL_FACTOR_MIN,
        }
    }

    /// Resident pages of the run, each counted once, by what its programs use.
    pub fn resident(&mut self, programs: &[(&Arc<Program>, MemoryUsage)], budget: &Budget) -> u64 {
        if !programs.iter().any(|(program, _)| program.is_forked.load(Relaxed)) {
            self.counted.clear();
            return programs.iter().map(|(_, usage)| usage.counted).sum();
        }
        if Instant::now() >= self.next_count {
            self.count(programs, budget);
        }
        let share = |(program, usage): &(&Arc<Program>, MemoryUsage)| {
            // A child of a fork since the last count shares all that it has.
            let unknown = if program.is_forked.load(Relaxed) { 0 } else { usage.counted };
            self.counted.get(&program.id).map_or(unknown, |counted| counted.share_with(usage.counted))
        };
        programs.iter().map(share).sum::<u64>() + (budget.granted() - self.granted)
    }

    /// Counts what each program has in proportion.
    fn count(&mut self, programs: &[(&Arc<Program>, MemoryUsage)], budget: &Budget) {
        let start = Instant::now();
        self.granted = budget.granted();
        self.counted.clear();
        let mut overlap = 0;
        for (program, usage) in programs {
            let counted =
                Counted { resident: usage.counted, share: shared_pages(program).unwrap_or(usage.counted) };
            overlap += counted.resident.saturating_sub(counted.share);
            self.counted.insert(program.id, counted);
        }
        let is_steady = overlap.abs_diff(self.overlap) < budget.resident_max() / CHANGE_DIVISOR;
        self.interval_factor =
            if is_steady { (self.interval_factor * 2).min(INTERVAL_FACTOR_MAX) } else { INTERVAL_FACTOR_MIN };
        self.overlap = overlap;
        self.next_count = Instant::now() + (start.elapsed() * self.interval_factor).min(INTERVAL_MAX);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_follows_the_size_of_the_process() {
        let counted = Counted { resident: 100, share: 40 };
        assert_eq!(counted.share_with(100), 40);
        assert_eq!(counted.share_with(130), 70, "new pages are its own");
        assert_eq!(counted.share_with(90), 30, "its own pages leave first");
        assert_eq!(counted.share_with(10), 0);
    }
}
