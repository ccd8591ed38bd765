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

/// Where the program's pages are.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Backend {
    DiskNode,
    SwapFile,
}

impl Backend {
    pub const ALL: [Self; 2] = [Self::DiskNode, Self::SwapFile];

    pub const fn name(self) -> &'static str {
        match self {
            Self::DiskNode => "disk node",
            Self::SwapFile => "swap file, read-ahead 1",
        }
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

    fn load(self) -> Load {
        let Self { bytes, limit_bytes, seconds } = self;
        Load { processes: 1, bytes, limit_bytes, seconds, replicas: 1, backup: "if-needed" }
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
    backend: Backend,
    size: Size,
    fabric: Fabric,
    program: &Path,
    folder: &Path,
) -> Result<Figures, BenchError> {
    match backend {
        Backend::DiskNode => on_disk_node(size, fabric, program, folder),
        Backend::SwapFile => on_swap_file(size, program, folder),
    }
}

fn on_disk_node(size: Size, fabric: Fabric, program: &Path, folder: &Path) -> Result<Figures, BenchError> {
    // Declared first, because the cgroup is removed after its process has ended.
    let cgroup = LimitedCgroup::new(DISK_NODE_LIMIT_BYTES)?;
    let disk = format!("--disk={}", 2 * size.bytes);
    let cluster = Cluster::up_with_nodes(1, NODE_BYTES, fabric, &[&disk])?;
    cgroup.add(cluster.node_pid(DISK_NODE)?)?;
    processbench::run(&cluster, program, folder, size.load())
}

fn on_swap_file(size: Size, program: &Path, folder: &Path) -> Result<Figures, BenchError> {
    let mut setup = PeerSetup::new(Peer::SwapFile, size.limit_bytes, 2 * size.bytes)?;
    // The accesses are random.
    setup.set_read_ahead(ReadAhead::OnePage)?;
    let mut command = setup.command(program)?;
    size.load().add_arguments(&mut command);
    let output = folder.join("output");
    let outcome = child::run(command, &Streams { input: None, output: &output }, Watched::All, |_| {})?;
    setup.close()?;
    processbench::figures(&outcome, &output, "with a swap file")
}

/// Notes of the report.
pub fn note(size: Size) -> String {
    format!(
        "full pool: the process writes to random pages of {} with a limit of {}, for {} s; the only memory \
         node lends {}, and the process of the disk node has {} for its memory and for what the kernel \
         caches of its file",
        show_bytes(size.bytes),
        show_bytes(size.limit_bytes),
        size.seconds,
        show_bytes(NODE_BYTES),
        show_bytes(DISK_NODE_LIMIT_BYTES)
    )
}

/// Adds the table and the target.
pub fn fill(report: &mut Report, figures: &BTreeMap<Backend, Vec<Figures>>) {
    let writes = |of: &[Figures]| of.iter().map(|one| float(one.touches) / one.seconds).collect::<Vec<_>>();
    let rows = figures.iter().map(|(backend, of)| Row {
        name: backend.name().into(),
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
    let of = |backend| figures.get(&backend).map(|of| writes(of)).unwrap_or_default();
    let value = Spread::of_ratios(&of(Backend::DiskNode), &of(Backend::SwapFile));
    report.targets.extend(value.map(|value| Target {
        name: "full pool: writes/s on a disk node ÷ swap file".into(),
        value,
        bound: RATIO_MIN,
        at_most: false,
    }));
}
