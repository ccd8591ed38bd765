//! `aquifer bench malloc`: malloc benchmarks with `libaquifer-malloc`, plainly and with a part of
//! their memory, beside glibc's allocator plainly, under `aquifer run` and on kernel swap.

mod contenders;
mod summary;

use std::collections::BTreeMap;

use aquifer_bench::support::bytes::{MIB, show_bytes};
use aquifer_bench::support::report::Report;
use aquifer_bench::support::{cluster, progress};
use aquifer_swap::setup::cleanup_stale;

use super::{BenchArgs, BenchError};
use contenders::{Job, MallocContender, Stage};

/// Targets, for `aquifer bench list`.
pub const TARGETS: &str = "targets: with a quarter of its memory each benchmark is faster than on a swap \
    file, \
    and not slower than with glibc under aquifer run; limits are kept";

/// Size of the bench.
#[derive(Clone, Copy, Debug)]
struct Size {
    rounds: usize,
    /// Limits in percent of a benchmark's peak.
    fits: &'static [u64],
    bytes: u64,
    /// Divisor of the numbers of operations.
    divisor: u64,
}

const QUICK: Size = Size { rounds: 1, fits: &[100, 25], bytes: 64 * MIB, divisor: 4 };
const FULL: Size = Size { rounds: 3, fits: &[100, 50, 25], bytes: 128 * MIB, divisor: 1 };

/// A benchmark of the program.
#[derive(Debug)]
struct Benchmark {
    /// Name in the program.
    name: &'static str,
    operations: u64,
    /// Whether the benchmark uses much memory. The others end before a limit matters.
    is_large: bool,
}

const BENCHMARKS: [Benchmark; 5] = [
    Benchmark { name: "larson", operations: 100_000, is_large: true },
    Benchmark { name: "random", operations: 200_000, is_large: true },
    Benchmark { name: "zipf", operations: 200_000, is_large: true },
    Benchmark { name: "xmalloc", operations: 2_400_000, is_large: false },
    Benchmark { name: "thrash", operations: 4_000_000, is_large: false },
];
/// Limit of small benchmarks, which use much less.
const SMALL_LIMIT_BYTES: u64 = 256 * MIB;

/// Figures of a run, by name.
type Sample = BTreeMap<&'static str, f64>;
/// Samples of each round, by benchmark, percentage of its memory, and contender. `None` if the
/// kernel killed the program.
type Samples = BTreeMap<(usize, u64, MallocContender), Vec<Option<Sample>>>;

/// Runs the bench.
///
/// # Errors
/// If something could not be measured, or a block had wrong data.
pub fn run(args: &BenchArgs) -> Result<Report, BenchError> {
    let size = if args.quick { QUICK } else { FULL };
    let mut report = Report::new("malloc", args.quick);
    if let Err(error) = cleanup_stale() {
        report.notes.push(format!("cleanup after an earlier run failed: {error}"));
    }
    let mut stage = Stage::new(size.bytes * 4)?;
    let mut limited = vec![MallocContender::Library, MallocContender::Run];
    match MallocContender::SwapFile.try_out() {
        Ok(()) => limited.push(MallocContender::SwapFile),
        Err(error) => {
            report.notes.push(format!("not measured: {}: {error}", MallocContender::SwapFile.name()))
        }
    }
    let (samples, peaks) = measure(size, &mut stage, &limited)?;
    report.notes.extend(notes(size));
    for (benchmark, peak_bytes) in BENCHMARKS.iter().zip(&peaks) {
        report.notes.push(format!(
            "{}: peak memory {}, in a plain run with glibc",
            benchmark.name,
            show_bytes(*peak_bytes)
        ));
    }
    report.notes.append(&mut stage.notes);
    for (at, benchmark) in BENCHMARKS.iter().enumerate() {
        for percent in fits(size, benchmark) {
            summary::fill(&mut report, size.rounds, (at, benchmark), *percent, &limited, &samples);
        }
    }
    Ok(report)
}

fn fits(size: Size, benchmark: &Benchmark) -> &'static [u64] {
    if benchmark.is_large { size.fits } else { &[100] }
}

/// Measures; also returns the peak resident memory of each benchmark in the plain run with glibc.
fn measure(
    size: Size,
    stage: &mut Stage,
    limited: &[MallocContender],
) -> Result<(Samples, Vec<u64>), BenchError> {
    let tables: usize = BENCHMARKS.iter().map(|benchmark| fits(size, benchmark).len()).sum();
    let bar = progress::bar(size.rounds * (2 * BENCHMARKS.len() + tables * limited.len()));
    let mut samples = Samples::new();
    let mut peaks = Vec::new();
    for round in 1..=size.rounds {
        for (at, benchmark) in BENCHMARKS.iter().enumerate() {
            let mut play = |percent: u64, contender: MallocContender, limit_bytes: u64| {
                bar.set_message(format!(
                    "round {round}: {}, {percent} % fit, {}",
                    benchmark.name,
                    contender.name()
                ));
                let operations = benchmark.operations / size.divisor;
                let job = Job { name: benchmark.name, bytes: size.bytes, operations, limit_bytes, percent };
                let played = stage.play(contender, job)?;
                bar.inc(1);
                let peak_bytes = played.as_ref().map_or(0, |(_, peak_bytes)| *peak_bytes);
                samples.entry((at, percent, contender)).or_default().push(played.map(|(sample, _)| sample));
                Ok::<_, BenchError>(peak_bytes)
            };
            let peak_bytes = play(100, MallocContender::Glibc, 0)?;
            play(100, MallocContender::Plain, 0)?;
            if round == 1 {
                peaks.push(peak_bytes);
            }
            for percent in fits(size, benchmark) {
                let part_bytes = peaks[at] * percent / 100;
                let limit_bytes = if benchmark.is_large { part_bytes } else { SMALL_LIMIT_BYTES };
                for contender in limited {
                    play(*percent, *contender, limit_bytes)?;
                }
            }
        }
    }
    bar.finish_and_clear();
    Ok((samples, peaks))
}

fn notes(size: Size) -> [String; 4] {
    [
        format!("{} rounds in alternation, two threads each; every block was checked", size.rounds),
        format!(
            "memory nodes of the pool: {}, over shared memory, on this machine like the programs",
            cluster::nodes()
        ),
        format!(
            "a limit is a percentage of the benchmark's peak anonymous resident memory in a plain run with \
             glibc; xmalloc and thrash, which use little memory, have {}",
            show_bytes(SMALL_LIMIT_BYTES)
        ),
        "operations are counted once the set is filled; CPU is of the whole run, with the daemons".into(),
    ]
}
