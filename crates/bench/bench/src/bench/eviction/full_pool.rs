//! A program in a pool whose memory is full, so that its pages are on a disk node, and the same
//! program with a swap file on the same disk.

use std::collections::BTreeMap;
use std::path::Path;

use aquifer::Fabric;
use aquifer_bench::BenchError;
use aquifer_bench::support::bytes::{MIB, float, show_bytes};
use aquifer_bench::support::child::{self, Streams, Watched};
use aquifer_bench::support::cluster::Cluster;
use aquifer_bench::support::processbench::{self, Figures, Load};
use aquifer_bench::support::report::{Column, Report, Row, Table, Target};
use aquifer_bench::support::spread::Spread;
use aquifer_swap::setup::SetupError;

use crate::peers::{LimitedCgroup, Peer, PeerSetup, ReadAhead};

/// Memory of the only memory node: a few slabs.
const NODE_BYTES: u64 = 16 * MIB;
/// The number of the disk node, after the memory node.
const DISK_NODE: u16 = 2;
/// Memory of the disk node's process, so that the kernel caches few pages of its file.
const DISK_NODE_LIMIT_BYTES: u64 = 48 * MIB;
const RATIO_MIN: f64 = 0.8;

/// The place of the program's pages.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Backend {
    DiskNode,
    SwapFile,
}

/// The accesses of the program.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Pattern {
    Sequential,
    Random,
    RandomByEight,
}

impl Pattern {
    const ALL: [Self; 3] = [Self::Sequential, Self::Random, Self::RandomByEight];

    const fn describe(self) -> &'static str {
        match self {
            Self::Sequential => "one page after another",
            Self::Random => "random pages",
            Self::RandomByEight => "random pages, 8 processes",
        }
    }

    /// The read-ahead of the swap file that is best for it.
    const fn read_ahead(self) -> ReadAhead {
        if matches!(self, Self::Sequential) { ReadAhead::EightPages } else { ReadAhead::OnePage }
    }
}

/// A run of the program.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Case {
    pattern: Pattern,
    backend: Backend,
}

impl Case {
    /// All runs, those that are compared next to each other.
    pub fn all() -> Vec<Self> {
        let of = |pattern| [Backend::DiskNode, Backend::SwapFile].map(|backend| Self { pattern, backend });
        Pattern::ALL.into_iter().flat_map(of).collect()
    }

    /// Name in the report.
    pub fn name(self) -> String {
        let backend = match self.backend {
            Backend::DiskNode => "disk node",
            Backend::SwapFile => "swap file",
        };
        format!("{}: {backend}", self.pattern.describe())
    }
}

/// Amount of work.
#[derive(Clone, Copy, Debug)]
pub struct Size {
    bytes: u64,
    limit_bytes: u64,
    seconds: u64,
}

impl Size {
    pub const QUICK: Self = Self { bytes: 192 * MIB, limit_bytes: 48 * MIB, seconds: 2 };
    pub const FULL: Self = Self { bytes: 768 * MIB, limit_bytes: 128 * MIB, seconds: 20 };

    fn load(self, pattern: Pattern) -> Load {
        let Self { bytes, limit_bytes, seconds } = self;
        let processes = if pattern == Pattern::RandomByEight { 8 } else { 1 };
        let is_sequential = pattern == Pattern::Sequential;
        Load { processes, bytes, limit_bytes, is_sequential, seconds, replicas: 1, backup: "if-needed" }
    }
}

/// Sets up a small swap file and removes it.
///
/// # Errors
/// If that is not possible.
pub fn try_out() -> Result<(), SetupError> {
    PeerSetup::new(Peer::SwapFile, 4 << 20, 4 << 20)?.close()
}

/// Runs the program.
///
/// # Errors
/// If it could not be measured or a page was wrong.
pub fn measure(
    Case { pattern, backend }: Case,
    size: Size,
    fabric: Fabric,
    program: &Path,
    folder: &Path,
) -> Result<Figures, BenchError> {
    let load = size.load(pattern);
    match backend {
        Backend::DiskNode => on_disk_node(load, fabric, program, folder),
        Backend::SwapFile => on_swap_file(load, pattern.read_ahead(), program, folder),
    }
}

fn on_disk_node(load: Load, fabric: Fabric, program: &Path, folder: &Path) -> Result<Figures, BenchError> {
    // Declared first, because the cgroup is removed after its process has ended.
    let cgroup = LimitedCgroup::new(DISK_NODE_LIMIT_BYTES)?;
    let disk = format!("--disk={}", 2 * load.bytes);
    let cluster = Cluster::up_with_nodes(1, NODE_BYTES, fabric, &[&disk])?;
    cgroup.add(cluster.node_pid(DISK_NODE)?)?;
    processbench::run(&cluster, program, folder, load)
}

fn on_swap_file(
    load: Load,
    read_ahead: ReadAhead,
    program: &Path,
    folder: &Path,
) -> Result<Figures, BenchError> {
    let mut setup = PeerSetup::new(Peer::SwapFile, load.limit_bytes, 2 * load.bytes)?;
    setup.set_read_ahead(read_ahead)?;
    let mut command = setup.command(program)?;
    load.add_arguments(&mut command);
    let output = folder.join("output");
    let outcome = child::run(command, &Streams { input: None, output: &output }, Watched::All, |_| {})?;
    setup.close()?;
    processbench::figures(&outcome, &output, "with a swap file")
}

/// Notes of the report.
pub fn note(size: Size) -> String {
    format!(
        "full pool: processes write to the pages of {} with a limit of {}, for {} s; the only memory node \
         lends {}, and the process of the disk node has {} for its memory and for what the kernel caches of \
         its file; the swap file has a read-ahead of 8 pages for sequential accesses, and of 1 for random \
         ones",
        show_bytes(size.bytes),
        show_bytes(size.limit_bytes),
        size.seconds,
        show_bytes(NODE_BYTES),
        show_bytes(DISK_NODE_LIMIT_BYTES)
    )
}

/// Adds the table and the targets.
pub fn fill(report: &mut Report, figures: &BTreeMap<Case, Vec<Figures>>) {
    let writes = |of: &[Figures]| of.iter().map(|one| float(one.touches) / one.seconds).collect::<Vec<_>>();
    let rows = figures.iter().map(|(case, of)| Row {
        name: case.name(),
        figures: [
            ("writes/s", Spread::of(&writes(of))),
            ("fault p50 µs", Spread::of(&of.iter().map(|one| one.faults.p50_us).collect::<Vec<_>>())),
            ("fault p99 µs", Spread::of(&of.iter().map(|one| one.faults.p99_us).collect::<Vec<_>>())),
        ]
        .into_iter()
        .filter_map(|(name, spread)| Some((name, spread?)))
        .collect(),
    });
    report.tables.push(Table {
        title: "a program in a full pool".into(),
        columns: ["writes/s", "fault p50 µs", "fault p99 µs"].map(Column::full).to_vec(),
        pictured: Some("writes/s"),
        ratio: None,
        rows: rows.collect(),
    });
    report.targets.extend(Pattern::ALL.into_iter().filter_map(|pattern| {
        let of = |backend| Some(writes(figures.get(&Case { pattern, backend })?));
        let value = Spread::of_ratios(&of(Backend::DiskNode)?, &of(Backend::SwapFile)?)?;
        let name = format!("full pool, {}: writes/s on a disk node ÷ swap file", pattern.describe());
        Some(Target { name, value, bound: RATIO_MIN, at_most: false })
    }));
}
