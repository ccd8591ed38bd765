//! `aquifer bench eviction`: a memory node is emptied while a program writes to random pages of
//! which half are there (Valet, figures 5 and 23).
//!
//! The agent's count of served faults shows the throughput before, during and after that.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use aquifer::Fabric;
use aquifer_bench::support::bytes::{MIB, float, show_bytes};
use aquifer_bench::support::cluster::Cluster;
use aquifer_bench::support::folder;
use aquifer_bench::support::processbench::{self, Load};
use aquifer_bench::support::programs;
use aquifer_bench::support::progress;
use aquifer_bench::support::report::{Column, Report, Row, Table, Target};
use aquifer_bench::support::spread::Spread;

use super::{BenchArgs, BenchError};

/// Targets, for `aquifer bench list`.
pub const TARGETS: &str = "targets: while a node is emptied at the default rate a program keeps 95 % of \
    its speed, and it has 97 % afterwards";

const NODES: u16 = 2;
/// The node that is emptied.
const NODE: u16 = 1;
const DURING_MIN: f64 = 0.95;
const AFTER_MIN: f64 = 0.97;

/// The rate at which a host moves slabs off the node.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Rate {
    Default,
    Unlimited,
}

impl Rate {
    const ALL: [Self; 2] = [Self::Default, Self::Unlimited];

    const fn describe(self) -> &'static str {
        match self {
            Self::Default => "default rate",
            Self::Unlimited => "no limit",
        }
    }

    /// The option of `aquifer up`.
    const fn options(self) -> &'static [&'static str] {
        match self {
            Self::Default => &[],
            Self::Unlimited => &["--move-rate=0"],
        }
    }
}

/// Amount of work.
#[derive(Clone, Copy, Debug)]
struct Size {
    rounds: usize,
    bytes: u64,
    limit_bytes: u64,
    /// Time until the program has filled its memory.
    fill: Duration,
    /// Time for which the program is measured before and after.
    window: Duration,
}

impl Size {
    const QUICK: Self = Self {
        rounds: 1,
        bytes: 192 * MIB,
        limit_bytes: 48 * MIB,
        fill: Duration::from_secs(3),
        window: Duration::from_secs(2),
    };
    const FULL: Self = Self {
        rounds: 3,
        bytes: 1280 * MIB,
        limit_bytes: 256 * MIB,
        fill: Duration::from_secs(15),
        window: Duration::from_secs(8),
    };

    /// The time for which the program runs: longer than everything takes.
    fn seconds(self) -> u64 {
        2 * (self.fill + 2 * self.window).as_secs() + self.bytes / (40 * MIB)
    }
}

/// The figures of one run.
#[derive(Clone, Copy, Debug)]
struct Sample {
    before: f64,
    during: f64,
    after: f64,
    moved_bytes: f64,
    drain: Duration,
}

/// Runs the bench.
///
/// # Errors
/// If something could not be measured or a page was wrong.
pub fn run(args: &BenchArgs) -> Result<Report, BenchError> {
    let size = if args.quick { Size::QUICK } else { Size::FULL };
    let fabric = args.fabric.unwrap_or(Fabric::Tcp);
    let folder = folder::temporary()?;
    let programs = programs::build(folder.path())?;
    let bar = progress::bar(size.rounds * Rate::ALL.len());
    let mut samples: BTreeMap<Rate, Vec<Sample>> = BTreeMap::new();
    for round in 1..=size.rounds {
        for rate in Rate::ALL {
            bar.set_message(format!("round {round}: {}", rate.describe()));
            // Each node alone has room for all.
            let cluster = Cluster::up_with_nodes(NODES, 2 * size.bytes, fabric, rate.options())?;
            let load = Load {
                processes: 1,
                bytes: size.bytes,
                limit_bytes: size.limit_bytes,
                seconds: size.seconds(),
                replicas: 1,
            };
            let sample = std::thread::scope(|scope| {
                let observer = scope.spawn(|| observe(&cluster, size));
                let figures = processbench::run(&cluster, &programs.processbench, folder.path(), load);
                let sample = observer.join().expect("it does not panic");
                figures.and(sample)
            })?;
            samples.entry(rate).or_default().push(sample);
            bar.inc(1);
        }
    }
    bar.finish_and_clear();
    let mut report = Report::new("eviction", args.quick);
    report.notes = vec![
        format!(
            "a process writes to random pages of {} with a limit of {}; then one of {NODES} memory nodes is \
             emptied by `aquifer drain`; {} rounds, every page verified",
            show_bytes(size.bytes),
            show_bytes(size.limit_bytes),
            size.rounds
        ),
        format!(
            "faults are counted for {} s before, during the drain, and for as long after it",
            size.window.as_secs()
        ),
        format!("memory nodes over {}", fabric.name()),
    ];
    fill(&mut report, &samples);
    Ok(report)
}

/// Drains the node, and measures the faults before, during and after that.
fn observe(cluster: &Cluster, size: Size) -> Result<Sample, BenchError> {
    std::thread::sleep(size.fill);
    let start = Counters::read(cluster)?;
    std::thread::sleep(size.window);
    let drained = Counters::read(cluster)?;
    cluster.drain(NODE)?;
    let empty = Counters::read(cluster)?;
    std::thread::sleep(size.window);
    let end = Counters::read(cluster)?;
    Ok(Sample {
        before: drained.faults_per_second_since(start),
        during: empty.faults_per_second_since(drained),
        after: end.faults_per_second_since(empty),
        moved_bytes: float(empty.moved_bytes - drained.moved_bytes),
        drain: empty.at - drained.at,
    })
}

/// The counters of the run at one time.
#[derive(Clone, Copy, Debug)]
struct Counters {
    at: Instant,
    faults: u64,
    moved_bytes: u64,
}

impl Counters {
    fn read(cluster: &Cluster) -> Result<Self, BenchError> {
        let status = cluster.status();
        let run = status.as_ref().and_then(|status| status.runs.first());
        let run = run.ok_or(BenchError::NoStatus { what: "the measured program" })?;
        Ok(Self { at: Instant::now(), faults: run.faults, moved_bytes: run.moved_bytes })
    }

    fn faults_per_second_since(self, earlier: Self) -> f64 {
        float(self.faults - earlier.faults) / (self.at - earlier.at).as_secs_f64()
    }
}

fn fill(report: &mut Report, samples: &BTreeMap<Rate, Vec<Sample>>) {
    let spread =
        |of: &[Sample], value: &dyn Fn(&Sample) -> f64| Spread::of(&of.iter().map(value).collect::<Vec<_>>());
    let rows = samples.iter().map(|(rate, of)| Row {
        name: rate.describe().into(),
        figures: [
            ("faults/s before", spread(of, &|sample| sample.before)),
            ("during ÷ before", spread(of, &|sample| sample.during / sample.before)),
            ("after ÷ before", spread(of, &|sample| sample.after / sample.before)),
            ("moved MiB", spread(of, &|sample| sample.moved_bytes / float(MIB))),
            ("MiB/s", spread(of, &|sample| sample.moved_bytes / float(MIB) / sample.drain.as_secs_f64())),
            ("drain s", spread(of, &|sample| sample.drain.as_secs_f64())),
        ]
        .into_iter()
        .filter_map(|(name, spread)| Some((name, spread?)))
        .collect(),
    });
    report.tables.push(Table {
        title: "a program while a node is emptied".into(),
        columns: ["faults/s before", "during ÷ before", "after ÷ before", "moved MiB", "MiB/s", "drain s"]
            .map(Column::full)
            .to_vec(),
        pictured: Some("during ÷ before"),
        ratio: None,
        rows: rows.collect(),
    });
    let Some(of) = samples.get(&Rate::Default) else { return };
    let during = spread(of, &|sample| sample.during / sample.before);
    let after = spread(of, &|sample| sample.after / sample.before);
    let bounds = [("during ÷ before", during, DURING_MIN), ("after ÷ before", after, AFTER_MIN)];
    report.targets.extend(bounds.into_iter().filter_map(|(name, value, bound)| {
        Some(Target { name: format!("default rate: {name}"), value: value?, bound, at_most: false })
    }));
}
