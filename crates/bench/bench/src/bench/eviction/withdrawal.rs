//! A program while the memory of one node is withdrawn.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use aquifer::Fabric;
use aquifer_bench::BenchError;
use aquifer_bench::support::bytes::{MIB, float, show_bytes};
use aquifer_bench::support::cluster::Cluster;
use aquifer_bench::support::interrupt;
use aquifer_bench::support::processbench::{self, Load};
use aquifer_bench::support::report::{Column, Report, Row, Table, Target};
use aquifer_bench::support::spread::Spread;
use aquifer_report::RunStatistics;
use rustix::process::Signal;

/// Three, so that programs use several nodes afterwards, too.
const NODES: u16 = 3;
/// The node whose memory is withdrawn.
const NODE: u16 = 1;
const DURING_MIN: f64 = 0.95;
const AFTER_MIN: f64 = 0.97;
/// Longest time until the program has filled its memory, or all pages have their copies again.
const WAIT_MAX: Duration = Duration::from_secs(300);
/// Longest time for which the program writes: longer than any measurement.
const SECONDS_MAX: u64 = 3600;
/// Time between two looks at the status.
const STATUS_INTERVAL: Duration = Duration::from_millis(50);

/// How the memory of the node is withdrawn.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Way {
    /// `aquifer drain` at the default rate.
    Drained,
    /// `aquifer drain` without a limit of the rate.
    DrainedFast,
    /// The node is killed: the only copies are on the disk, as in Infiniswap when memory is taken
    /// back.
    Deleted,
}

impl Way {
    pub const ALL: [Self; 3] = [Self::Drained, Self::DrainedFast, Self::Deleted];

    pub const fn describe(self) -> &'static str {
        match self {
            Self::Drained => "drained at the default rate",
            Self::DrainedFast => "drained without a limit",
            Self::Deleted => "deleted, copies on a disk",
        }
    }

    /// Further options of `aquifer up`.
    fn options(self, size: Size) -> Vec<String> {
        match self {
            Self::Drained => Vec::new(),
            Self::DrainedFast => vec!["--move-rate=0".into()],
            Self::Deleted => vec![format!("--disk={}", 2 * size.bytes)],
        }
    }

    const fn backup(self) -> &'static str {
        if matches!(self, Self::Deleted) { "always" } else { "never" }
    }
}

/// Amount of work.
#[derive(Clone, Copy, Debug)]
pub struct Size {
    bytes: u64,
    limit_bytes: u64,
    /// Time from the last of the fill to the first measurement.
    settle: Duration,
    /// Time for which the program is measured before and after.
    window: Duration,
}

impl Size {
    pub const QUICK: Self = Self {
        bytes: 192 * MIB,
        limit_bytes: 48 * MIB,
        settle: Duration::from_secs(1),
        window: Duration::from_secs(2),
    };
    pub const FULL: Self = Self {
        bytes: 3328 * MIB,
        limit_bytes: 256 * MIB,
        settle: Duration::from_secs(5),
        window: Duration::from_secs(10),
    };

    /// Least memory of the program that is on nodes when it has filled its memory.
    fn remote_bytes(self) -> u64 {
        (self.bytes - self.limit_bytes) / 100 * 97
    }
}

/// The figures of one run.
#[derive(Clone, Copy, Debug)]
pub struct Sample {
    before: f64,
    during: f64,
    after: f64,
    /// Bytes that were moved; `None` if the node was killed.
    moved_bytes: Option<f64>,
    time: Duration,
}

/// Withdraws the memory of a node under a program.
///
/// # Errors
/// If something could not be measured or a page was wrong.
pub fn measure(
    way: Way,
    size: Size,
    fabric: Fabric,
    program: &Path,
    folder: &Path,
) -> Result<Sample, BenchError> {
    let options = way.options(size);
    let options: Vec<&str> = options.iter().map(String::as_str).collect();
    // Each node alone has room for all.
    let cluster = Cluster::up_with_nodes(NODES, 2 * size.bytes, fabric, &options)?;
    let load = Load {
        processes: 1,
        bytes: size.bytes,
        limit_bytes: size.limit_bytes,
        seconds: SECONDS_MAX,
        is_sequential: false,
        replicas: 1,
        backup: way.backup(),
    };
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let observer = scope.spawn(|| {
            let sample = observe(&cluster, way, size);
            is_over.store(true, Relaxed);
            sample
        });
        let figures = processbench::run_until(&cluster, program, folder, load, &is_over);
        let sample = observer.join().expect("it does not panic");
        figures.and(sample)
    })
}

/// Withdraws the memory, and measures the faults before, during and after that.
fn observe(cluster: &Cluster, way: Way, size: Size) -> Result<Sample, BenchError> {
    let is_backed = |run: &RunStatistics| way != Way::Deleted || run.disk_bytes >= size.remote_bytes();
    await_run(cluster, "the program with all its memory", |run| {
        run.remote_bytes >= size.remote_bytes() && run.degraded_slabs == 0 && is_backed(run)
    })?;
    std::thread::sleep(size.settle);
    let start = Counters::read(cluster)?;
    std::thread::sleep(size.window);
    let withdrawn = Counters::read(cluster)?;
    if way == Way::Deleted {
        cluster.signal_node(NODE, Signal::KILL)?;
        let mut displaced: u64 = 0;
        await_run(cluster, "the program with all its copies", |run| {
            displaced = displaced.max(run.displaced_slabs);
            displaced > 0 && run.displaced_slabs == 0 && run.degraded_slabs == 0
        })?;
    } else {
        cluster.drain(NODE)?;
    }
    let empty = Counters::read(cluster)?;
    std::thread::sleep(size.window);
    let end = Counters::read(cluster)?;
    Ok(Sample {
        before: withdrawn.faults_per_second_since(start),
        during: empty.faults_per_second_since(withdrawn),
        after: end.faults_per_second_since(empty),
        moved_bytes: (way != Way::Deleted).then(|| float(empty.moved_bytes - withdrawn.moved_bytes)),
        time: empty.at - withdrawn.at,
    })
}

/// Waits until the status of the program fits. `what` is named if it never does.
fn await_run(
    cluster: &Cluster,
    what: &'static str,
    mut fits: impl FnMut(&RunStatistics) -> bool,
) -> Result<(), BenchError> {
    let start = Instant::now();
    loop {
        interrupt::check()?;
        let status = cluster.status();
        if status.and_then(|status| status.runs.into_iter().next()).is_some_and(|run| fits(&run)) {
            return Ok(());
        }
        if start.elapsed() > WAIT_MAX {
            return Err(BenchError::NoStatus { what });
        }
        std::thread::sleep(STATUS_INTERVAL);
    }
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

/// Notes of the report.
pub fn notes(size: Size) -> Vec<String> {
    vec![
        format!(
            "a process writes to random pages of {} with a limit of {}; then the memory of one of {NODES} \
             memory nodes is withdrawn",
            show_bytes(size.bytes),
            show_bytes(size.limit_bytes)
        ),
        format!(
            "faults are counted for {} s before, until all pages are on the other nodes, and for as long \
             after it",
            size.window.as_secs()
        ),
        "deleted: `aquifer run --backup always`, and the node is killed; until the other nodes have them, \
            its pages are on the disk only, of which the kernel of this machine caches what it has memory for"
            .into(),
    ]
}

/// Adds the table and the targets.
pub fn fill(report: &mut Report, samples: &BTreeMap<Way, Vec<Sample>>) {
    let spread = |of: &[Sample], value: &dyn Fn(&Sample) -> Option<f64>| {
        Spread::of(&of.iter().filter_map(value).collect::<Vec<_>>())
    };
    let rows = samples.iter().map(|(way, of)| Row {
        name: way.describe().into(),
        figures: [
            ("faults/s before", spread(of, &|sample| Some(sample.before))),
            ("during ÷ before", spread(of, &|sample| Some(sample.during / sample.before))),
            ("after ÷ before", spread(of, &|sample| Some(sample.after / sample.before))),
            ("MiB", spread(of, &|sample| Some(sample.moved_bytes? / float(MIB)))),
            (
                "MiB/s",
                spread(of, &|sample| Some(sample.moved_bytes? / float(MIB) / sample.time.as_secs_f64())),
            ),
            ("seconds", spread(of, &|sample| Some(sample.time.as_secs_f64()))),
        ]
        .into_iter()
        .filter_map(|(name, spread)| Some((name, spread?)))
        .collect(),
    });
    report.tables.push(Table {
        title: "a program while the memory of a node is withdrawn".into(),
        columns: ["faults/s before", "during ÷ before", "after ÷ before", "MiB", "MiB/s", "seconds"]
            .map(Column::full)
            .to_vec(),
        pictured: Some("during ÷ before"),
        ratio: None,
        rows: rows.collect(),
    });
    let Some(of) = samples.get(&Way::Drained) else { return };
    let during = spread(of, &|sample| Some(sample.during / sample.before));
    let after = spread(of, &|sample| Some(sample.after / sample.before));
    let bounds = [("during ÷ before", during, DURING_MIN), ("after ÷ before", after, AFTER_MIN)];
    report.targets.extend(bounds.into_iter().filter_map(|(name, value, bound)| {
        Some(Target {
            name: format!("{}: {name}", Way::Drained.describe()),
            value: value?,
            bound,
            at_most: false,
        })
    }));
}
