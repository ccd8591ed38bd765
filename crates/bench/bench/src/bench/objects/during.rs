//! Figures 14 and 16: reads of a heap that is whole, fragmented, being compacted, and compacted.

use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use aquifer_bench::BenchError;
use aquifer_bench::support::bytes::float;
use aquifer_bench::support::cluster::{Cluster, aquifer_program};
use aquifer_bench::support::interrupt;
use aquifer_bench::support::random::Random;
use aquifer_bench::support::report::{Column, Row, Series, Table, Target};
use aquifer_bench::support::spread::Spread;
use aquifer_objects::client::HeapClient;
use aquifer_objects::pointer::Pointer;
use aquifer_objects::service::report::HeapReport;

use super::live::{check, connect, fill, split};

const SIZE: usize = 256;
const HEAP_BYTES: u64 = 512 << 20;
const ROUNDS: usize = 3;
const FREED_PERCENT: usize = 80;
/// Interval of the values over time.
const SLICE: Duration = Duration::from_millis(20);
const COLUMNS: [&str; 6] =
    ["whole k/s", "during ÷ whole", "after ÷ whole", "longest pause ms", "usual longest ms", "merges"];

/// Reads of one client, over time.
#[derive(Default)]
struct Progress {
    /// Reads in each slice of time.
    slices: Vec<u64>,
    longest: Duration,
    reads: u64,
    elapsed: Duration,
}

impl Progress {
    fn rate(&self) -> f64 {
        float(self.reads) / self.elapsed.as_secs_f64()
    }
}

/// Tables, series and targets of figures 14 and 16.
pub struct During {
    pub tables: Vec<Table>,
    pub series: Vec<Series>,
    pub targets: Vec<Target>,
}

/// Measures.
pub fn figures(is_quick: bool) -> Result<During, BenchError> {
    let objects = if is_quick { 40_000 } else { 400_000 };
    let (mut rows, mut series, mut targets) = (Vec::new(), Vec::new(), Vec::new());
    for (name, scans) in [("the client looks in the block", true), ("the service corrects", false)] {
        let mut measured: [Vec<f64>; 6] = Default::default();
        for round in 0..ROUNDS {
            interrupt::check()?;
            let (values, during) = measure(objects, scans)?;
            measured.iter_mut().zip(values).for_each(|(measured, value)| measured.push(value));
            if round == 0 {
                let slices = during.slices.iter().enumerate();
                let slice_s = SLICE.as_secs_f64();
                series.push(Series {
                    title: "figure 16: thousand reads a second, by s; freeing and compaction".into(),
                    name: name.into(),
                    points: slices
                        .map(|(at, reads)| (float(at as u64) * slice_s, float(*reads) / slice_s / 1e3))
                        .collect(),
                });
            }
        }
        let spread = |at: usize| Spread::of(&measured[at]).expect("they were measured");
        targets.extend([
            Target {
                name: format!("reads during compaction ÷ before, {name}"),
                value: spread(1),
                bound: 0.9,
                at_most: false,
            },
            Target {
                name: format!("reads after compaction ÷ before, {name}"),
                value: spread(2),
                bound: 0.97,
                at_most: false,
            },
            Target {
                name: format!("longest pause of a read in ms, {name}; or twice the usual one"),
                value: spread(3),
                bound: f64::max(5.0, 2.0 * spread(4).median),
                at_most: true,
            },
        ]);
        let figures = COLUMNS.into_iter().enumerate().map(|(at, column)| (column, spread(at))).collect();
        rows.push(Row { name: name.into(), figures });
    }
    let table = Table {
        title: format!(
            "figures 14 and 16: reads of {SIZE} B in shared memory, while another client frees \
             {FREED_PERCENT} % of the objects and the heap is compacted"
        ),
        columns: COLUMNS.map(Column::full).to_vec(),
        pictured: None,
        ratio: None,
        rows,
    };
    Ok(During { tables: vec![table], series, targets })
}

fn measure(objects: usize, scans: bool) -> Result<([f64; 6], Progress), BenchError> {
    let cluster = Cluster::up_with_heaps(64 << 20, HEAP_BYTES)?;
    let agent = cluster.state().join("agent.sock");
    let mut client = connect(&agent, false)?;
    let pointers = fill(&mut client, objects, SIZE)?;
    let mut reader = connect(&agent, false)?;
    reader.set_scans(scans);
    let all: Vec<(usize, Pointer)> = pointers.iter().copied().enumerate().collect();
    // The number of objects that are left after freeing.
    let mut kept: Vec<(usize, Pointer)> = all.into_iter().step_by(100 / (100 - FREED_PERCENT)).collect();
    let whole = read(&mut reader, &mut kept, &|elapsed| elapsed > Duration::from_secs(1))?;
    let (mut left, freed) = split(pointers, FREED_PERCENT);
    let is_done = AtomicBool::new(false);
    let (during, merges) = std::thread::scope(|scope| {
        let others = scope.spawn(|| {
            let mut free_and_compact = || {
                freed.iter().try_for_each(|pointer| client.free(*pointer).map_err(BenchError::heap))?;
                compact(cluster.state())?;
                merges(cluster.state())
            };
            let result = free_and_compact();
            is_done.store(true, Ordering::SeqCst);
            result
        });
        let during = read(&mut reader, &mut left, &|_| is_done.load(Ordering::SeqCst));
        let merges = others.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        Ok::<_, BenchError>((during?, merges?))
    })?;
    let after = read(&mut reader, &mut left, &|elapsed| elapsed > Duration::from_secs(1))?;
    let values = [
        whole.rate() / 1e3,
        during.rate() / whole.rate(),
        after.rate() / whole.rate(),
        during.longest.as_secs_f64() * 1e3,
        whole.longest.as_secs_f64() * 1e3,
        float(merges),
    ];
    Ok((values, during))
}

/// The merges of the service so far.
fn merges(state: &Path) -> Result<u64, BenchError> {
    let mut command = Command::new(aquifer_program()?);
    command.arg("--state").arg(state).args(["heap", "list", "--json"]);
    let output = command.output().map_err(BenchError::io("start", Path::new("aquifer")))?;
    let reports: Vec<HeapReport> = serde_json::from_slice(&output.stdout).map_err(BenchError::heap)?;
    Ok(reports.iter().map(|report| report.merges).sum())
}

/// Compacts until nothing can be merged.
fn compact(state: &Path) -> Result<(), BenchError> {
    let uid = rustix::process::geteuid().as_raw().to_string();
    let mut command = Command::new(aquifer_program()?);
    command.arg("--state").arg(state).args(["heap", "compact", &uid]);
    let output = command.output().map_err(BenchError::io("start", Path::new("aquifer")))?;
    match output.status.success() {
        true => Ok(()),
        false => Err(BenchError::heap(String::from_utf8_lossy(&output.stderr))),
    }
}

/// Reads random objects until `is_over` returns true.
fn read(
    client: &mut HeapClient,
    objects: &mut [(usize, Pointer)],
    is_over: &dyn Fn(Duration) -> bool,
) -> Result<Progress, BenchError> {
    let mut random = Random(3);
    let mut progress = Progress::default();
    let mut out = [0; SIZE];
    let began = Instant::now();
    let mut last = began;
    loop {
        let (object, pointer) = &mut objects[random.below(objects.len())];
        client.get(pointer, &mut out).map_err(BenchError::heap)?;
        check(*object, &out)?;
        let now = Instant::now();
        progress.longest = progress.longest.max(now - last);
        last = now;
        progress.reads += 1;
        let elapsed = now - began;
        let slice = usize::try_from(elapsed.as_nanos() / SLICE.as_nanos()).unwrap_or(usize::MAX);
        progress.slices.resize(progress.slices.len().max(slice + 1), 0);
        progress.slices[slice] += 1;
        if progress.reads.is_multiple_of(64) && is_over(elapsed) {
            progress.elapsed = elapsed;
            return Ok(progress);
        }
    }
}
