//! `aquifer bench faults`: a program accesses three times its limit, on the pool and on kernel
//! swap, beside faults that need no I/O.

mod backends;
mod calm;
mod processes;
mod summary;

use std::collections::BTreeMap;

use aquifer::Fabric;
use aquifer_bench::support::bytes::{MIB, show_bytes};
use aquifer_bench::support::cluster::{self, Cluster};
use aquifer_bench::support::folder;
use aquifer_bench::support::programs;
use aquifer_bench::support::progress;
use aquifer_bench::support::report::Report;
use aquifer_swap::setup::cleanup_stale;

use super::fabric::ReadFloor;
use super::{BenchArgs, BenchError};
use backends::{Bench, FaultBackend};

/// Targets, for `aquifer bench list`.
pub const TARGETS: &str = "targets: random p50 over shm ≤ 1.5× a bare userfaultfd, over tcp reading \
    ≤ 1.4× one and a raw READ, over both ≤ the swap file's; from the page cache ≤ 1.35× a bare \
    userfaultfd, and ≤ 0.5× tcp; sequential MB/s ≥ 1.5× (tcp: 1×) the best kernel swap's; without \
    pressure ≤ 1.03× the plain time; with --processes, faults/s ≥ those of one process, and no wait \
    > 100 ms × processes";

/// An access pattern and operation.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Case {
    random: bool,
    write: bool,
}

impl Case {
    const ALL: [Self; 4] = [
        Self { random: false, write: false },
        Self { random: false, write: true },
        Self { random: true, write: false },
        Self { random: true, write: true },
    ];

    fn pattern(self) -> &'static str {
        if self.random { "random" } else { "seq" }
    }

    fn op(self) -> &'static str {
        if self.write { "write" } else { "read" }
    }

    fn name(self) -> String {
        format!("{} {}", if self.random { "random" } else { "sequential" }, self.op())
    }
}

/// Sizes and rounds of the bench.
#[derive(Clone, Copy, Debug)]
pub struct Size {
    limit_bytes: u64,
    bytes: u64,
    passes: u64,
    /// Whether an unmeasured pass precedes the measured ones. Without it a run begins with the last
    /// pages of the fill resident.
    warm: bool,
    rounds: usize,
    calm_rounds: usize,
}

impl Size {
    const QUICK: Self =
        Self { limit_bytes: 16 * MIB, bytes: 48 * MIB, passes: 1, warm: false, rounds: 2, calm_rounds: 5 };
    const FULL: Self =
        Self { limit_bytes: 64 * MIB, bytes: 192 * MIB, passes: 1, warm: true, rounds: 3, calm_rounds: 9 };

    /// Walks over all pages in one run: the warm pass, the measured ones, and the check of every
    /// word at the end.
    fn walks(self) -> u64 {
        self.passes + u64::from(self.warm) + 1
    }
}

/// The figures of one run, by name.
pub type Sample = BTreeMap<&'static str, f64>;

/// Latency of one READ of a page over the fabric.
#[derive(Clone, Debug)]
pub struct Reads {
    fabric: Fabric,
    /// Latency for each round in µs.
    us: Vec<f64>,
}

/// Samples by case and backend, one for each round; `None` if the kernel killed the program.
pub type Samples = BTreeMap<(Case, FaultBackend), Vec<Option<Sample>>>;

/// Runs the bench.
///
/// # Errors
/// If something could not be measured or a page was wrong.
pub fn run(args: &BenchArgs) -> Result<Report, BenchError> {
    if args.processes {
        return processes::run(args);
    }
    let size = if args.quick { Size::QUICK } else { Size::FULL };
    let fabric = args.fabric.unwrap_or(Fabric::Shm);
    let folder = folder::temporary()?;
    let programs = programs::build(folder.path())?;
    let mut notes = vec![
        format!(
            "{} accessed with a limit of {}, {} rounds in alternation, every page verified",
            show_bytes(size.bytes),
            show_bytes(size.limit_bytes),
            size.rounds
        ),
        format!("memory nodes of the pool: {}, over {}", cluster::nodes(), fabric.name()),
        "the program's thread is pinned to processor 0 in every run; daemons and kernel threads are \
            not"
        .into(),
        "latencies are the program's own, of touches that took over 1 µs; CPU is of program and daemons, \
            beyond a plain run"
            .into(),
    ];
    let backends = choose_backends(args.quick, &mut notes);
    // Three times the working set, so that memory that is freed late does not fill the nodes.
    let cluster = Cluster::up(size.bytes * 3, fabric, None)?;
    let cached_cluster = Cluster::up_with_cache(size.bytes * 3, fabric, None)?;
    let mut bench = Bench { size, programs, cluster, cached_cluster, folder, notes };
    let mut reads = Reads { fabric, us: Vec::new() };
    let samples = measure(&mut bench, &backends, &mut reads)?;
    let calm = calm::measure(&bench)?;
    // Reports over both fabrics can be in one folder.
    let name = if fabric == Fabric::Tcp { "faults-tcp" } else { "faults" };
    let mut report = Report::new(name, args.quick);
    summary::fill(&mut report, size, &backends, &samples, &calm, &reads);
    report.notes = bench.notes;
    Ok(report)
}

/// All backends that this machine supports. A note names each of the others.
fn choose_backends(quick: bool, notes: &mut Vec<String>) -> Vec<FaultBackend> {
    // Swap devices of a killed run would slow this one down.
    if let Err(error) = cleanup_stale() {
        notes.push(format!("cleanup after an earlier run failed: {error}"));
    }
    let mut backends = FaultBackend::ALWAYS.to_vec();
    for peer in FaultBackend::PEERS.into_iter().filter(|backend| !quick || *backend != FaultBackend::ZRAM_8) {
        match peer.try_out() {
            Ok(()) => backends.push(peer),
            Err(error) => notes.push(format!("not measured: {}: {error}", peer.name())),
        }
    }
    backends
}

fn measure(bench: &mut Bench, backends: &[FaultBackend], reads: &mut Reads) -> Result<Samples, BenchError> {
    let rounds = bench.size.rounds;
    let mut floor = ReadFloor::start(reads.fabric)?;
    let bar = progress::bar(rounds * Case::ALL.len() * backends.len());
    let mut samples = Samples::new();
    for round in 1..=rounds {
        bar.set_message(format!("round {round}: one READ"));
        reads.us.push(floor.measure_us()?);
        for case in Case::ALL {
            for &backend in backends {
                bar.set_message(format!("round {round}: {}, {}", case.name(), backend.name()));
                let sample = bench.run(case, backend)?;
                samples.entry((case, backend)).or_default().push(sample);
                bar.inc(1);
            }
        }
    }
    bar.finish_and_clear();
    Ok(samples)
}
