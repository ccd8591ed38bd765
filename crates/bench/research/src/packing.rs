//! `aquifer-research packing`: use of a pool by jobs that swap to it, with memory allocated in
//! advance or at eviction, after FineMem's study of swapping (OSDI 2025; design.md, section 15).

mod cluster;
mod jobs;
mod pool;

use std::collections::BTreeMap;

use aquifer_bench::BenchError;
use aquifer_bench::support::bytes::float;
use aquifer_bench::support::interrupt;
use aquifer_bench::support::progress;
use aquifer_bench::support::report::{Column, Report, Row, Series, Table, Target};
use aquifer_bench::support::spread::{Spread, short};

use crate::ResearchArgs;
use cluster::{HOST_PAGES, HOSTS, PackingResult, Policy, Setting, WARM_S, play};
use jobs::Mix;

/// Targets, for `aquifer-research list`.
pub const TARGETS: &str = "targets: ≥ 74 % of the lent memory is used with allocation at eviction (the \
    paper has 41 % with allocation in advance), ≥ 1.08× as many jobs per hour";

/// Sections of the pool for each of the hosts' memory: halves, three quarters, seven eighths, all.
const RATIOS: [(u64, u64); 4] = [(1, 2), (3, 4), (7, 8), (1, 1)];
/// The ratio of most tables. With more memory, packing does not matter.
const MAIN: (u64, u64) = RATIOS[0];
const POLICIES: [Policy; 2] = [Policy::Static, Policy::Dynamic];
/// Points of a line in the picture.
const POINTS: usize = 240;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Case {
    mix: Mix,
    ratio: (u64, u64),
}

/// Runs the bench.
///
/// # Errors
/// If the allocator fails.
pub fn run(args: &ResearchArgs) -> Result<Report, BenchError> {
    let (time_s, seeds) = if args.quick { (2 * 3600, 2) } else { (8 * 3600, 5) };
    let mut report = Report::new("packing", args.quick);
    report.notes = notes(time_s, seeds);
    let by_mix = Mix::ALL.map(|mix| Case { mix, ratio: MAIN });
    let by_ratio =
        RATIOS.into_iter().filter(|ratio| *ratio != MAIN).map(|ratio| Case { mix: Mix::ALL[0], ratio });
    let cases: Vec<Case> = by_mix.into_iter().chain(by_ratio).collect();
    let bar = progress::bar(cases.len() * POLICIES.len());
    for (number, case) in cases.into_iter().enumerate() {
        let mut both = Vec::new();
        for policy in POLICIES {
            interrupt::check()?;
            bar.set_message(format!("{}, {policy:?}", case.name()));
            let setting = Setting { policy, mix: case.mix, sections: case.sections(), time_s };
            let outcomes: Result<Vec<PackingResult>, String> =
                (0..seeds).map(|seed| play(&setting, seed)).collect();
            both.push(outcomes.map_err(|reason| BenchError::Allocator { reason })?);
            bar.inc(1);
        }
        if number == 0 {
            report.series = series(&case, &both);
            report.targets = used_targets(&case, &both);
        }
        report.targets.extend(jobs_target(&case, &both));
        report.tables.push(case.table(&both));
    }
    bar.finish_and_clear();
    Ok(report)
}

fn notes(time_s: u64, seeds: u64) -> Vec<String> {
    vec![
        format!(
            "{HOSTS} hosts with {} MiB each for jobs, of which more always wait; virtual time of {} h after \
             the cluster is full, over {seeds} seeds. A job keeps half of its peak local, and swaps the rest",
            HOST_PAGES / 256,
            time_s / 3600
        ),
        "static: a job holds the most that it may ever swap, from start to end, in blocks of 16 MiB. \
         dynamic: extents of up to 256 KiB are allocated at eviction, and freed when their pages are freed. \
         Both use the product's state machines"
            .into(),
        "dynamic: a job starts if the pool has room for the expected need of it and of all running jobs, \
         without using the last tenth; a running job counts with what it holds if that is more. The \
         expected need is the mean of the ended jobs. An allocation that could lead to a deadlock (banker's \
         algorithm) stalls its job until it is safe; no data are lost"
            .into(),
    ]
}

impl Case {
    fn sections(&self) -> u32 {
        let (part, whole) = self.ratio;
        let pages = HOST_PAGES * HOSTS as u64 * part / whole;
        u32::try_from(pages / u64::from(aquifer_pool::size::SECTION_CHUNKS)).unwrap_or(u32::MAX)
    }

    fn name(&self) -> String {
        let (part, whole) = self.ratio;
        let ratio = if part == whole { "as large as".into() } else { format!("{part}/{whole} of") };
        format!("{} jobs, a pool {ratio} the hosts' memory", self.mix.name)
    }

    fn table(&self, both: &[Vec<PackingResult>]) -> Table {
        let jobs = both.first().map_or(&[][..], |outcomes| &outcomes[..]);
        let rows = POLICIES.iter().zip(both).map(|(policy, outcomes)| row(*policy, outcomes, jobs)).collect();
        let part = Spread::of(&jobs.iter().map(|outcome| outcome.mean_to_max).collect::<Vec<f64>>());
        let part = part.map_or(String::new(), |part| {
            format!(" (swapped memory, mean ÷ maximum: {})", short(part.median))
        });
        Table {
            title: format!("{}{part}", self.name()),
            columns: COLUMNS.map(Column::full).to_vec(),
            pictured: None,
            ratio: None,
            rows,
        }
    }
}

const COLUMNS: [&str; 8] = [
    "used ÷ held %",
    "used ÷ lent %",
    "jobs at once",
    "jobs/h",
    "÷ static",
    "stalled %",
    "extents/job",
    "allocator ms/job",
];
/// Time of an operation on a node in ms, as in the cost model of `alloc`.
const TRIP_MS: f64 = 0.0017;

fn row(policy: Policy, outcomes: &[PackingResult], fixed: &[PackingResult]) -> Row {
    let spread =
        |of: &dyn Fn(&PackingResult) -> f64| Spread::of(&outcomes.iter().map(of).collect::<Vec<f64>>());
    let jobs = |outcomes: &[PackingResult]| outcomes.iter().map(jobs_per_h).collect::<Vec<f64>>();
    let figures = [
        (COLUMNS[0], spread(&used_of_held)),
        (COLUMNS[1], spread(&used_of_lent)),
        (COLUMNS[2], spread(&|of| sum(of, |sample| sample.jobs) / float(of.samples.len() as u64))),
        (COLUMNS[3], spread(&jobs_per_h)),
        (COLUMNS[4], Spread::of_ratios(&jobs(outcomes), &jobs(fixed))),
        (COLUMNS[5], spread(&|of| float(of.stalled_s) / float(of.job_s) * 100.0)),
        (COLUMNS[6], spread(&|of| float(of.taken) / float(of.jobs_in_all.max(1)))),
        (COLUMNS[7], spread(&|of| float(of.trips) * TRIP_MS / float(of.jobs_in_all.max(1)))),
    ];
    let figures: BTreeMap<_, _> =
        figures.into_iter().filter_map(|(name, spread)| Some((name, spread?))).collect();
    Row { name: name_of(policy).into(), figures }
}

fn name_of(policy: Policy) -> &'static str {
    match policy {
        Policy::Static => "static, allocated in advance",
        Policy::Dynamic => "pool, allocated at eviction",
    }
}

fn sum(outcome: &PackingResult, of: impl Fn(&cluster::ClusterSample) -> u64) -> f64 {
    float(outcome.samples.iter().map(of).sum())
}

fn used_of_held(outcome: &PackingResult) -> f64 {
    sum(outcome, |sample| sample.used) / sum(outcome, |sample| sample.held) * 100.0
}

fn used_of_lent(outcome: &PackingResult) -> f64 {
    sum(outcome, |sample| sample.used) / sum(outcome, |_| outcome.donated) * 100.0
}

fn jobs_per_h(outcome: &PackingResult) -> f64 {
    let time_s = outcome.samples.last().map_or(0, |last| last.at_s - WARM_S);
    float(outcome.ended) * 3600.0 / float(time_s)
}

fn used_targets(case: &Case, both: &[Vec<PackingResult>]) -> Vec<Target> {
    let target = |what: &str, figure: fn(&PackingResult) -> f64| {
        let value = Spread::of(&both[1].iter().map(figure).collect::<Vec<f64>>())?;
        let name = format!("{}: dynamic, % of {what} memory that is used", case.name());
        Some(Target { name, value, bound: 74.0, at_most: false })
    };
    [target("lent", used_of_lent), target("held", used_of_held)].into_iter().flatten().collect()
}

fn jobs_target(case: &Case, both: &[Vec<PackingResult>]) -> Option<Target> {
    let of = |policy: usize| both[policy].iter().map(jobs_per_h).collect::<Vec<f64>>();
    let value = Spread::of_ratios(&of(1), &of(0))?;
    let name = format!("{}: jobs per hour, dynamic ÷ static", case.name());
    Some(Target { name, value, bound: 1.08, at_most: false })
}

/// Used and held memory over time, of the first seed.
fn series(case: &Case, both: &[Vec<PackingResult>]) -> Vec<Series> {
    let mut all = Vec::new();
    for (policy, outcomes) in POLICIES.iter().zip(both) {
        let Some(outcome) = outcomes.first() else { continue };
        let step = outcome.samples.len().div_ceil(POINTS).max(1);
        let line = |of: &dyn Fn(&cluster::ClusterSample) -> u64| {
            let point = |sample: &cluster::ClusterSample| {
                (float(sample.at_s) / 3600.0, float(of(sample)) / float(outcome.donated) * 100.0)
            };
            outcome.samples.iter().step_by(step).map(point).collect::<Vec<(f64, f64)>>()
        };
        let held: (&str, &dyn Fn(&cluster::ClusterSample) -> u64) = ("held", &|sample| sample.held);
        let used: (&str, &dyn Fn(&cluster::ClusterSample) -> u64) = ("used", &|sample| sample.used);
        for (what, of) in [used, held] {
            let title = format!("{}: % of the lent memory, over hours", case.name());
            all.push(Series { title, name: format!("{}: {what}", name_of(*policy)), points: line(of) });
        }
    }
    all
}
