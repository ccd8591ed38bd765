//! Estimate of a run's resident pages if its processes share pages after forks.
//!
//! The resident set size (RSS) counts a shared page for each process that has it. The proportional
//! set size (PSS) divides it among them, but its measurement, a *count*, takes long. Between two
//! counts, the PSS of a process is taken to change by as much as its RSS.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use aquifer_pager::Budget;

use super::count::{MemoryUsage, pss_pages};
use super::program::Program;

/// Minimum time between two counts, as a multiple of the duration of a count.
const INTERVAL_FACTOR_MIN: u32 = 4;
/// Multiple of the duration of a count up to which the interval doubles while the number of shared
/// pages is steady.
const INTERVAL_FACTOR_MAX: u32 = 128;
/// The number of shared pages is steady if it changes by less than 1/`CHANGE_DIVISOR` of the limit.
const CHANGE_DIVISOR: u64 = 64;
/// Maximum time between two counts.
const INTERVAL_MAX: Duration = Duration::from_millis(200);

/// The memory of a process at the last count.
#[derive(Clone, Copy, Debug)]
struct Counted {
    /// Resident set size (RSS), in pages.
    rss: u64,
    /// Proportional set size (PSS), in pages.
    pss: u64,
}

impl Counted {
    /// Estimates the PSS of the process from its RSS now.
    fn pss_with(self, rss: u64) -> u64 {
        (self.pss + rss).saturating_sub(self.rss)
    }
}

/// Estimates the resident pages of one run.
#[derive(Debug)]
pub(super) struct ResidentEstimator {
    /// The memory of each process at the last count, by the number of the program.
    counted: HashMap<u64, Counted>,
    /// Number of pages granted until the last count. Pages granted since then are not shared any
    /// more.
    granted: u64,
    /// Sum of RSS less PSS at the last count.
    overlap: u64,
    next_count: Instant,
    /// Time to the next count, as a multiple of the duration of the last one.
    interval_factor: u32,
}

impl ResidentEstimator {
    pub fn new() -> Self {
        Self {
            counted: HashMap::new(),
            granted: 0,
            overlap: 0,
            next_count: Instant::now(),
            interval_factor: INTERVAL_FACTOR_MIN,
        }
    }

    /// Returns the resident pages of the run, each counted once. `programs`: the memory of each
    /// program now.
    pub fn resident(&mut self, programs: &[(&Arc<Program>, MemoryUsage)], budget: &Budget) -> u64 {
        if !programs.iter().any(|(program, _)| program.is_forked.load(Relaxed)) {
            self.counted.clear();
            return programs.iter().map(|(_, usage)| usage.counted).sum();
        }
        if Instant::now() >= self.next_count {
            self.count(programs, budget);
        }
        let pss = |(program, usage): &(&Arc<Program>, MemoryUsage)| {
            // A child that was forked since the last count shares all of its pages.
            let unknown = if program.is_forked.load(Relaxed) { 0 } else { usage.counted };
            self.counted.get(&program.id).map_or(unknown, |counted| counted.pss_with(usage.counted))
        };
        programs.iter().map(pss).sum::<u64>() + (budget.granted() - self.granted)
    }

    /// Measures the PSS of each program.
    fn count(&mut self, programs: &[(&Arc<Program>, MemoryUsage)], budget: &Budget) {
        let start = Instant::now();
        self.granted = budget.granted();
        self.counted.clear();
        let mut overlap = 0;
        for (program, usage) in programs {
            let counted = Counted { rss: usage.counted, pss: pss_pages(program).unwrap_or(usage.counted) };
            overlap += counted.rss.saturating_sub(counted.pss);
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
    fn the_estimated_pss_follows_the_rss() {
        let counted = Counted { rss: 100, pss: 40 };
        assert_eq!(counted.pss_with(100), 40);
        assert_eq!(counted.pss_with(130), 70, "new pages are not shared");
        assert_eq!(counted.pss_with(90), 30, "pages that are not shared leave first");
        assert_eq!(counted.pss_with(10), 0);
    }
}
