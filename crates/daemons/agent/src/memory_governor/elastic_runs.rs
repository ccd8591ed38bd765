//! Lends idle memory to elastic runs, and takes it back.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use aquifer_faults::serve::Run;
use aquifer_host_memory::CgroupMemory;
use aquifer_pager::PAGE_BYTES;

use super::borrowing::{Activity, Borrower, Lender};

/// Interval at which the processor time of runs, and their cgroups, are read.
const OBSERVE_INTERVAL: Duration = Duration::from_secs(1);
/// Ticks of the kernel in a second (`USER_HZ`), which are the unit of processor times.
const TICKS_PER_S: f64 = 100.0;
/// Part of the last second in the average of a run's activity.
const NEWEST_WEIGHT: f64 = 1.0 / 8.0;
/// Processors that a run with little activity uses at least.
const LOW_PROCESSORS: f64 = 0.01;
/// Processors that a run with much activity uses at least.
const HIGH_PROCESSORS: f64 = 0.25;
/// Time for which a program has waited for a fault, roughly: a run that waits for its pages is not
/// idle, though it uses no processor.
const FAULT_S: f64 = 20e-6;
/// Part of the limit of a run's cgroup that the run leaves free: 1/`CGROUP_FREE_DIVISOR`.
const CGROUP_FREE_DIVISOR: u64 = 16;

/// The observations of one run.
#[derive(Debug)]
struct ObservedRun {
    ticks: u64,
    faults: u64,
    /// Average of the processors that the run has used, and of its waits for pages.
    processors: f64,
    /// Bytes that the run may get beyond what it has, below the limit of its cgroup.
    cgroup_remaining: Option<u64>,
}

impl ObservedRun {
    /// A run that was not observed before counts as active.
    fn first(run: &Run) -> Self {
        Self {
            ticks: run.processor_ticks(),
            faults: run.fault_count(),
            processors: 1.0,
            cgroup_remaining: remaining_of(run),
        }
    }

    /// Observes the run `seconds` after the last time.
    fn observe(&mut self, run: &Run, seconds: f64) {
        let ticks = run.processor_ticks();
        let faults = run.fault_count();
        #[expect(clippy::cast_precision_loss, reason = "the counts of one second are small")]
        let of = |now: u64, before: u64| now.saturating_sub(before) as f64;
        let busy_s = of(ticks, self.ticks) / TICKS_PER_S + of(faults, self.faults) * FAULT_S;
        self.processors += (busy_s / seconds - self.processors) * NEWEST_WEIGHT;
        (self.ticks, self.faults) = (ticks, faults);
        self.cgroup_remaining = remaining_of(run);
    }

    fn activity(&self) -> Activity {
        if self.processors >= HIGH_PROCESSORS {
            Activity::High
        } else if self.processors >= LOW_PROCESSORS {
            Activity::Low
        } else {
            Activity::Idle
        }
    }
}

/// The memory that is left below the limit of the run's cgroup, in bytes, less what should stay
/// free there; `None` if there is no limit.
fn remaining_of(run: &Run) -> Option<u64> {
    let cgroup = CgroupMemory::of_process(run.some_pid()?)?;
    let kept_free = cgroup.limit_bytes()? / CGROUP_FREE_DIVISOR;
    Some(cgroup.remaining_bytes()?.saturating_sub(kept_free))
}

/// The elastic runs of the host.
#[derive(Debug)]
pub(super) struct ElasticRuns {
    lender: Lender,
    /// By the number of the run.
    observed: HashMap<u64, ObservedRun>,
    observed_at: Instant,
}

impl ElasticRuns {
    pub fn new(keep_free: u64) -> Self {
        Self { lender: Lender::new(keep_free), observed: HashMap::new(), observed_at: Instant::now() }
    }

    /// Sets how much each elastic run may have, while `idle` bytes are idle that no run has.
    pub fn adjust(&mut self, runs: &[Arc<Run>], idle: u64) {
        let runs: Vec<_> = runs.iter().filter(|run| run.limit_max_bytes().is_some()).collect();
        self.observed.retain(|id, _| runs.iter().any(|run| run.id() == *id));
        self.observe(&runs);
        let count = runs.len() as u64;
        let borrowers: Vec<_> = runs.iter().map(|run| self.borrower(run, count)).collect();
        for (run, limits) in runs.iter().zip(self.lender.lend(idle, &borrowers)) {
            run.budget().set_borrowed(pages(limits.max), pages(limits.target));
        }
    }

    fn observe(&mut self, runs: &[&Arc<Run>]) {
        let elapsed = self.observed_at.elapsed();
        let is_due = elapsed >= OBSERVE_INTERVAL;
        for run in runs {
            let observed = self.observed.entry(run.id()).or_insert_with(|| ObservedRun::first(run));
            if is_due {
                observed.observe(run, elapsed.as_secs_f64());
            }
        }
        if is_due {
            self.observed_at = Instant::now();
        }
    }

    /// The state of a run as a borrower; `count` is the number of elastic runs.
    fn borrower(&self, run: &Run, count: u64) -> Borrower {
        let page = PAGE_BYTES as u64;
        let budget = run.budget();
        let borrowed = budget.borrowed().saturating_mul(page);
        let guaranteed = budget.guaranteed().saturating_mul(page);
        let observed = &self.observed[&run.id()];
        let range = run.limit_max_bytes().unwrap_or(0).saturating_sub(guaranteed);
        let in_cgroup =
            observed.cgroup_remaining.map_or(u64::MAX, |left| borrowed.saturating_add(left / count));
        Borrower {
            owner: run.id_owner(),
            range: range.min(in_cgroup),
            borrowed,
            max: budget.borrowed_max().saturating_mul(page),
            activity: observed.activity(),
        }
    }
}

fn pages(bytes: u64) -> u64 {
    bytes / PAGE_BYTES as u64
}
