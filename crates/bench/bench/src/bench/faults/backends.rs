//! The backends of the program's memory, and runs of the program on each.

use std::collections::BTreeMap;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::Command;

use aquifer_bench::BenchError;
use aquifer_bench::support::bytes::float;
use aquifer_bench::support::child::{self, ProgramOutcome, Streams, Watched};
use aquifer_bench::support::cluster::{Cluster, read_statistics};
use aquifer_bench::support::programs::{Figures, Programs};
use aquifer_swap::setup::SetupError;
use tempfile::TempDir;

use super::{Case, Sample, Size};
use crate::peers::{Peer, PeerSetup, ReadAhead};

/// Memory of the programs that measure lower bounds. The bounds do not depend on this size.
const FLOOR_BYTES: u64 = 24 << 20;
const MIB: f64 = 1_048_576.0;

/// The backend that resolves the program's page faults.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum FaultBackend {
    /// All resident.
    Plain,
    /// On memory nodes.
    Pool,
    /// On memory nodes, with a page cache in the host's idle memory.
    PoolCached,
    /// On kernel swap.
    Swap {
        /// Whether the device is a zram instead of a file.
        zram: bool,
        /// Whether the read-ahead is eight pages instead of one.
        eight: bool,
    },
    /// Lower bound: the kernel's own fault on fresh memory.
    PlainFault,
    /// Lower bound: another process resolves faults from its memory through a bare userfaultfd.
    Bare {
        /// Whether that process is on another processor.
        other: bool,
    },
}

impl FaultBackend {
    /// The backends that every machine supports, in the order of a round.
    pub const ALWAYS: [Self; 6] = [
        Self::Plain,
        Self::PlainFault,
        Self::Bare { other: false },
        Self::Bare { other: true },
        Self::Pool,
        Self::PoolCached,
    ];
    /// The backends that need root and swap.
    pub const PEERS: [Self; 4] = [
        Self::Swap { zram: false, eight: false },
        Self::Swap { zram: false, eight: true },
        Self::Swap { zram: true, eight: false },
        Self::ZRAM_8,
    ];
    /// zram with a read-ahead of eight pages, which rarely helps.
    pub const ZRAM_8: Self = Self::Swap { zram: true, eight: true };

    /// Name in the report.
    pub fn name(self) -> &'static str {
        match self {
            Self::Plain => "plain, all resident",
            Self::Pool => "pool",
            Self::PoolCached => "pool, page cache",
            Self::Swap { zram: false, eight: false } => "swap file, read-ahead 1",
            Self::Swap { zram: false, eight: true } => "swap file, read-ahead 8",
            Self::Swap { zram: true, eight: false } => "zram, read-ahead 1",
            Self::Swap { zram: true, eight: true } => "zram, read-ahead 8",
            Self::PlainFault => "floor: plain fault",
            Self::Bare { other: false } => "floor: bare userfaultfd, same CPU",
            Self::Bare { other: true } => "floor: bare userfaultfd, other CPU",
        }
    }

    /// Whether the backend is the pool.
    pub fn is_pool(self) -> bool {
        matches!(self, Self::Pool | Self::PoolCached)
    }

    /// Whether the backend is kernel swap.
    pub fn is_peer(self) -> bool {
        matches!(self, Self::Swap { .. })
    }

    fn setup(self, limit_bytes: u64, swap_bytes: u64) -> Result<Option<PeerSetup>, SetupError> {
        let Self::Swap { zram, eight } = self else {
            return Ok(None);
        };
        let peer = if zram { Peer::Zram } else { Peer::SwapFile };
        let mut setup = PeerSetup::new(peer, limit_bytes, swap_bytes)?;
        setup.set_read_ahead(if eight { ReadAhead::EightPages } else { ReadAhead::OnePage })?;
        Ok(Some(setup))
    }

    /// Sets up a small swap device and removes it.
    ///
    /// # Errors
    /// If that is not possible.
    pub fn try_out(self) -> Result<(), SetupError> {
        self.setup(4 << 20, 4 << 20)?.map_or(Ok(()), PeerSetup::close)
    }
}

/// State that all runs share.
#[derive(Debug)]
pub struct Bench {
    /// Sizes and rounds.
    pub size: Size,
    /// The measured programs.
    pub programs: Programs,
    /// The cluster with the pool.
    pub cluster: Cluster,
    /// A cluster with a page cache.
    pub cached_cluster: Cluster,
    /// Folder for outputs.
    pub folder: TempDir,
    /// Notes for the report.
    pub notes: Vec<String>,
}

impl Bench {
    /// Runs a case on a backend. `None` if the kernel killed the program twice for lack of memory.
    ///
    /// # Errors
    /// If the program failed otherwise, or found a wrong page.
    pub fn run(&mut self, case: Case, backend: FaultBackend) -> Result<Option<Sample>, BenchError> {
        match backend {
            FaultBackend::PlainFault | FaultBackend::Bare { .. } => self.floor(case, backend).map(Some),
            FaultBackend::Plain => self.plain(case).map(Some),
            FaultBackend::Pool => self.pool(case, &self.cluster).map(Some),
            FaultBackend::PoolCached => self.pool(case, &self.cached_cluster).map(Some),
            FaultBackend::Swap { .. } => match self.swap(case, backend)? {
                Some(sample) => Ok(Some(sample)),
                None => self.swap(case, backend),
            },
        }
    }

    fn floor(&self, case: Case, backend: FaultBackend) -> Result<Sample, BenchError> {
        let mut command = Command::new(&self.programs.zerofloor);
        command.args(["--bytes", &FLOOR_BYTES.to_string(), "--cpu", "0"]);
        command.args(["--pattern", case.pattern(), "--op", case.op()]);
        match backend {
            FaultBackend::Bare { other } => {
                command.args(["--mode", "uffd", "--who", "process", "--place"]);
                command.arg(if other { "other" } else { "same" });
            }
            _ => {
                command.args(["--mode", "plain"]);
            }
        }
        let (_, figures) = self.measured(command, Watched::All, "zerofloor", backend.name())?;
        Ok(latencies(&figures))
    }

    fn arguments(&self, command: &mut Command, case: Case) {
        let Size { bytes, passes, warm, .. } = self.size;
        command.args(["--bytes", &bytes.to_string(), "--passes", &passes.to_string(), "--cpu", "0"]);
        command.args(["--pattern", case.pattern(), "--op", case.op()]);
        if warm {
            command.arg("--warm");
        }
    }

    fn plain(&self, case: Case) -> Result<Sample, BenchError> {
        let mut command = Command::new(&self.programs.faultbench);
        self.arguments(&mut command, case);
        let (outcome, figures) =
            self.measured(command, Watched::All, "faultbench", FaultBackend::Plain.name())?;
        let mut sample = latencies(&figures);
        add_common(&mut sample, &outcome, 0);
        Ok(sample)
    }

    fn pool(&self, case: Case, cluster: &Cluster) -> Result<Sample, BenchError> {
        let stats = self.folder.path().join("stats.json");
        let mut command = cluster.pooled_command(self.size.limit_bytes, &stats, &self.programs.faultbench)?;
        self.arguments(&mut command, case);
        let before_us = cluster.cpu_us();
        let (outcome, figures) = self.measured(command, Watched::Started, "faultbench", "on the pool")?;
        let mut sample = latencies(&figures);
        add_common(&mut sample, &outcome, cluster.cpu_us().saturating_sub(before_us));
        let stats = read_statistics(&stats)?;
        if stats.remote_reads > 0 {
            sample.insert("READs/page", float(stats.remote_read_trips) / float(stats.remote_reads));
        }
        if stats.remote_writes > 0 {
            sample.insert("WRITEs/page", float(stats.remote_write_trips) / float(stats.remote_writes));
        }
        sample.insert("elsewhere MiB", float(stats.remote_peak_bytes) / MIB);
        sample.insert("faults", float(stats.faults));
        sample.insert("cache hits", float(stats.cache_hits));
        sample.insert("agent's p50 µs", stats.fault_latency_us.p50);
        sample.insert("prefetched", float(stats.prefetched));
        sample.insert("lost pages", float(stats.lost_pages));
        Ok(sample)
    }

    fn swap(&mut self, case: Case, backend: FaultBackend) -> Result<Option<Sample>, BenchError> {
        let Size { limit_bytes, bytes, .. } = self.size;
        let Some(setup) = backend.setup(limit_bytes, 2 * bytes)? else {
            return Ok(None);
        };
        let mut command = setup.command(&self.programs.faultbench)?;
        self.arguments(&mut command, case);
        let output = self.folder.path().join("output");
        let outcome = child::run(command, &Streams { input: None, output: &output }, Watched::All, |_| {})?;
        let usage = setup.usage()?;
        if usage.oom_kills > 0 {
            let name = case.name();
            self.notes.push(format!(
                "the kernel killed the program for lack of memory: {name}, {}",
                backend.name()
            ));
            setup.close()?;
            return Ok(None);
        }
        let figures = figures(&outcome, &output, "faultbench", backend.name())?;
        let mut sample = latencies(&figures);
        add_common(&mut sample, &outcome, 0);
        if let Some(peak_bytes) = usage.swap_peak_bytes {
            sample.insert("elsewhere MiB", float(peak_bytes) / MIB);
        }
        if usage.store_peak_bytes > 0 {
            sample.insert("store beside limit MiB", float(usage.store_peak_bytes) / MIB);
        }
        sample.insert("faults", float(usage.major_faults));
        setup.close()?;
        Ok(Some(sample))
    }

    /// Runs a program that must succeed and print its results. `backend` is named in errors.
    ///
    /// # Errors
    /// If the program fails, or prints no valid results.
    pub fn measured(
        &self,
        command: Command,
        watched: Watched,
        program: &str,
        backend: &str,
    ) -> Result<(ProgramOutcome, Figures), BenchError> {
        let output = self.folder.path().join("output");
        let outcome = child::run(command, &Streams { input: None, output: &output }, watched, |_| {})?;
        let figures = figures(&outcome, &output, program, backend)?;
        Ok((outcome, figures))
    }
}

fn figures(
    outcome: &ProgramOutcome,
    output: &Path,
    program: &str,
    backend: &str,
) -> Result<Figures, BenchError> {
    if !outcome.status.success() || outcome.status.signal().is_some() {
        return Err(BenchError::Program {
            program: program.into(),
            context: backend.into(),
            status: outcome.status.to_string(),
            message: outcome.message.clone(),
        });
    }
    let text = std::fs::read_to_string(output).map_err(BenchError::io("read", output))?;
    match serde_json::from_str::<Figures>(&text) {
        // The results count only if all pages were verified.
        Ok(figures) if figures.errors == 0 && figures.verified_pages >= figures.ops => Ok(figures),
        _ => Err(BenchError::Figures { program: program.into(), context: backend.into(), text }),
    }
}

fn latencies(figures: &Figures) -> Sample {
    BTreeMap::from([
        ("p50 µs", figures.faults.p50_us),
        ("p90 µs", figures.faults.p90_us),
        ("p99 µs", figures.faults.p99_us),
        ("MB/s", figures.mb_per_s),
        ("slow touches", float(figures.faults.count)),
        ("touches", float(figures.ops)),
        ("seconds", figures.seconds),
    ])
}

fn add_common(sample: &mut Sample, outcome: &ProgramOutcome, daemons_us: u64) {
    sample.insert("CPU µs", float(outcome.cpu_us + daemons_us));
    sample.insert("daemons' CPU µs", float(daemons_us));
    sample.insert("resident MiB", float(outcome.resident_peak_bytes) / MIB);
}
