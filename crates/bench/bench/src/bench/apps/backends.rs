//! The backends of a program's memory, and runs of a program on each.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use aquifer::Fabric;
use aquifer_bench::BenchError;
use aquifer_bench::support::bytes::{MIB, float, show_bytes};
use aquifer_bench::support::child::{ProgramOutcome, Watched};
use aquifer_bench::support::cluster::{Cluster, read_statistics};
use aquifer_bench::support::folder;
use aquifer_swap::setup::{SetupError, SetupUsage};
use tempfile::TempDir;

use super::unprivileged::UnprivilegedUser;
use super::{App, JUDGED_PERCENT, Played, Sample};
use crate::peers::{Peer, PeerSetup, ReadAhead};

/// A zram's store must leave at least 1/`LEFT_PART` of the limit to the program.
const LEFT_PART: u64 = 4;
/// A store of at most 1/`SMALL_PART` of the limit is mostly metadata of the device, and does not
/// show how well pages compress.
const SMALL_PART: u64 = 10;
/// Attempts of a run on kernel swap, because the kernel sometimes kills a program that succeeds the
/// next time.
const ATTEMPTS: usize = 4;

/// The backend of a program's memory.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum AppBackend {
    /// All resident.
    Plain,
    /// On memory nodes over shared memory.
    PoolShm,
    /// On memory nodes over TCP.
    PoolTcp,
    /// On memory nodes over TCP, with a page cache in the host's idle memory.
    PoolTcpCached,
    /// As [`Self::PoolTcpCached`]; the limit holds only while the host has no idle memory.
    PoolElastic,
    /// As [`Self::PoolElastic`], without a cache and on a host whose idle memory is half of what
    /// the program would have of it.
    PoolElasticHalf,
    /// As [`Self::PoolTcp`], with a limit that is larger by that half.
    PoolTcpHalf,
    /// In a swap file, with the kernel's usual read-ahead.
    SwapFile,
    /// In a zram, with the kernel's usual read-ahead. Its store is beyond the limit.
    Zram,
    /// As [`Self::Zram`]; the program has what the store leaves of the limit.
    ZramWithin,
}

impl AppBackend {
    /// All backends with a limit, in the order of a round. The peers need root.
    pub const LIMITED: [Self; 9] = [
        Self::PoolShm,
        Self::PoolTcp,
        Self::PoolTcpCached,
        Self::PoolElastic,
        Self::PoolElasticHalf,
        Self::PoolTcpHalf,
        Self::SwapFile,
        Self::Zram,
        Self::ZramWithin,
    ];

    /// Name in the report.
    pub fn name(self) -> &'static str {
        match self {
            Self::Plain => "plain, all resident",
            Self::PoolShm => "pool over shm",
            Self::PoolTcp => "pool over tcp",
            Self::PoolTcpCached => "tcp, page cache",
            Self::PoolElastic => "tcp, elastic",
            Self::PoolElasticHalf => "tcp, elastic, half idle",
            Self::PoolTcpHalf => "tcp, limit + that half",
            Self::SwapFile => "swap file",
            Self::Zram => "zram",
            Self::ZramWithin => "zram, store within limit",
        }
    }

    /// The cluster, if the backend is the pool.
    fn cluster(self) -> Option<ClusterKind> {
        match self {
            Self::PoolShm => Some(ClusterKind::Shm),
            Self::PoolTcp | Self::PoolTcpHalf => Some(ClusterKind::Tcp),
            Self::PoolElasticHalf => Some(ClusterKind::TcpWithIdle),
            Self::PoolTcpCached | Self::PoolElastic => Some(ClusterKind::TcpCached),
            _ => None,
        }
    }

    /// Whether the backend is the pool, and the program is always held at its limit.
    pub fn is_limited_pool(self) -> bool {
        matches!(self, Self::PoolShm | Self::PoolTcp | Self::PoolTcpCached)
    }

    /// Further options of `aquifer run`.
    fn run_options(self) -> &'static [&'static str] {
        let is_elastic = matches!(self, Self::PoolElastic | Self::PoolElasticHalf);
        if is_elastic { &["--local-max", "auto"] } else { &[] }
    }

    /// Whether the backend is measured with this percentage of a program's memory.
    pub fn is_measured_at(self, percent: u64) -> bool {
        !matches!(self, Self::PoolElasticHalf | Self::PoolTcpHalf) || percent == JUDGED_PERCENT
    }

    /// The limit of `aquifer run`.
    fn limit_bytes(self, fit: Fit) -> u64 {
        if self == Self::PoolTcpHalf { fit.limit_bytes() + fit.half_beyond() } else { fit.limit_bytes() }
    }

    fn setup(self, limit_bytes: u64, swap_bytes: u64) -> Result<PeerSetup, SetupError> {
        let peer = if self == Self::SwapFile { Peer::SwapFile } else { Peer::Zram };
        let mut setup = PeerSetup::new(peer, limit_bytes, swap_bytes)?;
        setup.set_read_ahead(ReadAhead::EightPages)?;
        Ok(setup)
    }

    /// Sets up a small swap device and removes it, if the backend is a peer.
    ///
    /// # Errors
    /// If that is not possible.
    pub fn try_out(self) -> Result<(), SetupError> {
        match self {
            Self::SwapFile | Self::Zram | Self::ZramWithin => self.setup(4 << 20, 4 << 20)?.close(),
            _ => Ok(()),
        }
    }
}

/// A cluster of the bench.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum ClusterKind {
    Shm,
    Tcp,
    /// Over TCP, with a page cache on the host.
    TcpCached,
    /// Over TCP, on a host with as much idle memory as the bench says.
    TcpWithIdle,
}

impl ClusterKind {
    const ALL: [Self; 4] = [Self::Shm, Self::Tcp, Self::TcpCached, Self::TcpWithIdle];

    /// Name of the shared socket.
    fn name(self) -> &'static str {
        match self {
            Self::Shm => "shm",
            Self::Tcp => "tcp",
            Self::TcpCached => "tcp-cached",
            Self::TcpWithIdle => "tcp-with-idle",
        }
    }

    fn start(self, memory_bytes: u64, socket: Option<&Path>) -> Result<Cluster, BenchError> {
        match self {
            Self::Shm => Cluster::up(memory_bytes, Fabric::Shm, socket),
            Self::Tcp => Cluster::up(memory_bytes, Fabric::Tcp, socket),
            Self::TcpCached => Cluster::up_with_cache(memory_bytes, Fabric::Tcp, socket),
            Self::TcpWithIdle => Cluster::up_with_idle_memory(memory_bytes, Fabric::Tcp, socket),
        }
    }
}

/// Memory limit of a program.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Fit {
    /// The limit in percent of the peak.
    pub percent: u64,
    /// Peak anonymous resident memory in the plain run.
    pub peak_bytes: u64,
}

impl Fit {
    /// The limit in bytes.
    pub fn limit_bytes(self) -> u64 {
        self.peak_bytes * self.percent / 100
    }

    /// Half of what the program needs beyond the limit.
    fn half_beyond(self) -> u64 {
        self.peak_bytes.saturating_sub(self.limit_bytes()) / 2
    }
}

/// State that all runs share.
#[derive(Debug)]
pub struct Stage {
    /// Folder of outputs and sockets.
    pub folder: TempDir,
    /// The user of servers that refuse root.
    pub user: UnprivilegedUser,
    clusters: Vec<(ClusterKind, Cluster)>,
    /// The use of the last zram, by program and percentage.
    zram_usage: BTreeMap<(&'static str, u64), SetupUsage>,
    /// Notes for the report.
    pub notes: Vec<String>,
}

impl Stage {
    /// State without clusters.
    ///
    /// # Errors
    /// If the folders cannot be created.
    pub fn new() -> Result<Self, BenchError> {
        let folder = folder::temporary()?;
        let user = UnprivilegedUser::new()?;
        Ok(Self { folder, user, clusters: Vec::new(), zram_usage: BTreeMap::new(), notes: Vec::new() })
    }

    /// Starts all clusters.
    ///
    /// # Errors
    /// If a cluster does not start.
    pub fn bring_up(&mut self, memory_bytes: u64) -> Result<(), BenchError> {
        for kind in ClusterKind::ALL {
            let socket = self.user.socket(kind.name());
            self.clusters.push((kind, kind.start(memory_bytes, socket.as_deref())?));
        }
        Ok(())
    }

    /// Runs a program without a limit; also returns its peak resident memory.
    ///
    /// # Errors
    /// If it fails, or a signal asks to stop.
    pub fn plain(&self, app: &dyn App) -> Result<(Sample, Played, u64), BenchError> {
        let command = self.command(app, |program| Ok::<_, BenchError>(Command::new(program)))?;
        let (outcome, played) = self.play(app, AppBackend::Plain, command, Watched::All)?;
        Ok((sample(&outcome, &played, 0), played, outcome.resident_peak_bytes))
    }

    /// Runs a program with a limit. `None` if each attempt on kernel swap failed; a note has the
    /// reason of each.
    ///
    /// # Errors
    /// If it fails otherwise, or a signal asks to stop.
    pub fn limited(
        &mut self,
        app: &dyn App,
        backend: AppBackend,
        fit: Fit,
    ) -> Result<Option<(Sample, Played)>, BenchError> {
        match backend {
            AppBackend::Plain => self.plain(app).map(|(sample, played, _)| Some((sample, played))),
            AppBackend::SwapFile => self.swap_until_done(app, backend, fit, fit.limit_bytes()),
            AppBackend::Zram => self.zram(app, fit),
            AppBackend::ZramWithin => self.zram_within(app, fit),
            _ => self.pool(app, backend, fit).map(Some),
        }
    }

    fn command<E>(
        &self,
        app: &dyn App,
        start: impl FnOnce(&std::ffi::OsStr) -> Result<Command, E>,
    ) -> Result<Command, E> {
        if app.refuses_root() {
            self.user.command(app.program(), start)
        } else {
            start(app.program().as_os_str())
        }
    }

    fn play(
        &self,
        app: &dyn App,
        backend: AppBackend,
        command: Command,
        watched: Watched,
    ) -> Result<(ProgramOutcome, Played), BenchError> {
        let (outcome, done) = app.play(command, watched, &self.folder.path().join("output"))?;
        let is_well = outcome.status.success();
        match done {
            Ok(played) if is_well => Ok((outcome, played)),
            Err(error) if is_well => Err(error),
            // The client of a server that died reports only a closed connection.
            done => Err(BenchError::Program {
                program: app.name().into(),
                context: backend.name().into(),
                status: outcome.status.to_string(),
                message: outcome.message + &done.err().map_or(String::new(), |error| format!("\n{error}")),
            }),
        }
    }

    fn pool(&self, app: &dyn App, backend: AppBackend, fit: Fit) -> Result<(Sample, Played), BenchError> {
        let (_, cluster) = self
            .clusters
            .iter()
            .find(|(kind, _)| backend.cluster() == Some(*kind))
            .expect("clusters are brought up before any run on the pool");
        if backend == AppBackend::PoolElasticHalf {
            cluster.set_lendable(fit.half_beyond())?;
        }
        let limit_bytes = backend.limit_bytes(fit);
        let (command, stats) = self.pooled_command(app, backend, cluster, limit_bytes)?;
        let before_us = cluster.cpu_us();
        let (outcome, played) = self.play(app, backend, command, Watched::Started)?;
        let mut sample = sample(&outcome, &played, cluster.cpu_us().saturating_sub(before_us));
        let stats = read_statistics(&stats)?;
        sample.insert("elsewhere MiB", float(stats.remote_peak_bytes) / float(MIB));
        sample.insert("limit MiB", float(limit_bytes) / float(MIB));
        sample.insert("cache hits", float(stats.cache_hits));
        sample.insert("faults", float(stats.faults));
        sample.insert("prefetched", float(stats.prefetched));
        sample.insert("lost pages", float(stats.lost_pages));
        Ok((sample, played))
    }

    fn pooled_command(
        &self,
        app: &dyn App,
        backend: AppBackend,
        cluster: &Cluster,
        limit_bytes: u64,
    ) -> Result<(Command, PathBuf), BenchError> {
        let socket = backend.cluster().and_then(|kind| self.user.socket(kind.name()));
        let options = backend.run_options();
        if let Some(socket) = socket.filter(|_| app.refuses_root()) {
            let stats = self.user.home().join("stats.json");
            return Ok((
                self.user.pooled_command(&socket, options, limit_bytes, &stats, app.program()),
                stats,
            ));
        }
        let stats = self.folder.path().join("stats.json");
        Ok((cluster.pooled_command_with(options, limit_bytes, &stats, app.program())?, stats))
    }

    /// Runs a program on kernel swap. Repeats the run if the kernel found no page to swap out, and
    /// killed the program or failed a system call.
    fn swap_until_done(
        &mut self,
        app: &dyn App,
        backend: AppBackend,
        fit: Fit,
        limit_bytes: u64,
    ) -> Result<Option<(Sample, Played)>, BenchError> {
        for _ in 0..ATTEMPTS {
            match self.swap(app, backend, fit, limit_bytes)? {
                Ok((mut sample, played, usage)) => {
                    if backend == AppBackend::Zram {
                        self.zram_usage.insert((app.name(), fit.percent), usage);
                    }
                    let taken_bytes = limit_bytes + usage.store_peak_bytes;
                    let beyond = float(taken_bytes.saturating_sub(fit.limit_bytes())) / float(MIB);
                    sample.insert("beyond limit MiB", beyond);
                    return Ok(Some((sample, played)));
                }
                Err(reason) => {
                    let (name, backend) = (app.name(), backend.name());
                    self.notes.push(format!("{name} on {backend} at {} %: {reason}", fit.percent));
                }
            }
        }
        Ok(None)
    }

    fn swap(
        &self,
        app: &dyn App,
        backend: AppBackend,
        fit: Fit,
        limit_bytes: u64,
    ) -> Result<Result<(Sample, Played, SetupUsage), String>, BenchError> {
        let setup =
            backend.setup(limit_bytes + app.shared_bytes(), 2 * (fit.peak_bytes + app.shared_bytes()))?;
        let command = self.command(app, |program| setup.command(program))?;
        let (result, has_waited) = setup.with_oom_waits(|| self.play(app, backend, command, Watched::All))?;
        let usage = setup.usage()?;
        setup.close()?;
        let (outcome, played) = match result {
            _ if usage.oom_kills > 0 => return Ok(Err("killed for lack of memory".into())),
            Err(error @ (BenchError::Program { .. } | BenchError::Server { .. })) => {
                return Ok(Err(error.to_string()));
            }
            result => result?,
        };
        let mut sample = sample(&outcome, &played, 0);
        if let Some(peak_bytes) = usage.swap_peak_bytes {
            sample.insert("elsewhere MiB", float(peak_bytes) / float(MIB));
        }
        sample.insert("faults", float(usage.major_faults));
        sample.insert("in want", f64::from(has_waited));
        Ok(Ok((sample, played, usage)))
    }

    /// Runs a program on a zram, whose store is beyond the limit.
    fn zram(&mut self, app: &dyn App, fit: Fit) -> Result<Option<(Sample, Played)>, BenchError> {
        self.swap_until_done(app, AppBackend::Zram, fit, fit.limit_bytes())
    }

    /// Runs a program on a zram whose store is within the limit, by the size of the store in the
    /// last run beyond it. `None` if the store leaves too little to the program.
    fn zram_within(&mut self, app: &dyn App, fit: Fit) -> Result<Option<(Sample, Played)>, BenchError> {
        let Some(usage) = self.zram_usage.get(&(app.name(), fit.percent)) else { return Ok(None) };
        match beside_store(fit.limit_bytes(), usage) {
            Some(left) => self.swap_until_done(app, AppBackend::ZramWithin, fit, left),
            None => {
                let note = format!(
                    "zram, {} at {} %: its store of {} leaves too little of the limit of {}",
                    app.name(),
                    fit.percent,
                    show_bytes(usage.store_peak_bytes),
                    show_bytes(fit.limit_bytes())
                );
                if !self.notes.contains(&note) {
                    self.notes.push(note);
                }
                Ok(None)
            }
        }
    }
}

/// Memory of a program such that it and the store fit into `limit_bytes`. A byte less for the
/// program is a byte more on swap, which enlarges the store by the compressed size of a byte.
fn beside_store(limit_bytes: u64, usage: &SetupUsage) -> Option<u64> {
    let store_bytes = usage.store_peak_bytes;
    let swapped_bytes = usage.swap_peak_bytes.filter(|_| store_bytes > limit_bytes / SMALL_PART);
    let taken_bytes = match swapped_bytes {
        Some(swapped_bytes) => {
            let saved_bytes =
                swapped_bytes.checked_sub(store_bytes).filter(|&saved_bytes| saved_bytes > 0)?;
            let taken_bytes = u128::from(store_bytes) * u128::from(swapped_bytes) / u128::from(saved_bytes);
            u64::try_from(taken_bytes).ok()?
        }
        None => store_bytes,
    };
    limit_bytes.checked_sub(taken_bytes).filter(|&left_bytes| left_bytes >= limit_bytes / LEFT_PART)
}

fn sample(outcome: &ProgramOutcome, played: &Played, daemons_us: u64) -> Sample {
    let mut sample = Sample::from([
        ("s", played.seconds),
        ("CPU s", float(outcome.cpu_us + daemons_us) / 1e6),
        ("daemons' CPU s", float(daemons_us) / 1e6),
        ("resident MiB", float(outcome.resident_peak_bytes) / float(MIB)),
    ]);
    for (name, percent) in [("p50 µs", 50), ("p99 µs", 99)] {
        if let Some(&latency_us) = played.latencies_us.get(played.latencies_us.len() * percent / 100) {
            sample.insert(name, latency_us);
        }
    }
    sample
}

/// Path of a program, as a shell finds it.
pub fn find_program(name: &str) -> Option<PathBuf> {
    let paths = std::env::var_os("PATH")?;
    std::env::split_paths(&paths).map(|folder| folder.join(name)).find(|path| Path::is_file(path))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn usage(store_bytes: u64, swap_bytes: Option<u64>) -> SetupUsage {
        SetupUsage { store_peak_bytes: store_bytes, swap_peak_bytes: swap_bytes, ..SetupUsage::default() }
    }

    #[test]
    fn program_and_store_fit_in_the_limit_together() {
        // 40 MiB are swapped into a store of a quarter; so are the 13 1/3 MiB that are swapped in
        // addition.
        let left = beside_store(40 * MIB, &usage(10 * MIB, Some(40 * MIB))).unwrap();
        let taken = 40 * MIB - left;
        assert_eq!(taken >> 10, (40 * MIB / 3) >> 10);
        let store = (40 * MIB + taken) / 4;
        assert!(left + store <= 40 * MIB + 4096, "{left} {store}");
        assert_eq!(beside_store(40 * MIB, &usage(MIB, None)), Some(39 * MIB));
        assert_eq!(beside_store(40 * MIB, &usage(0, Some(0))), Some(40 * MIB));
        // Almost nothing was swapped.
        assert_eq!(beside_store(40 * MIB, &usage(2 * MIB, Some(MIB))), Some(38 * MIB));
    }

    #[test]
    fn a_store_that_leaves_too_little_is_not_counted() {
        assert_eq!(beside_store(40 * MIB, &usage(20 * MIB, Some(40 * MIB))), None);
        assert_eq!(beside_store(40 * MIB, &usage(41 * MIB, Some(40 * MIB))), None);
        assert_eq!(beside_store(MIB, &usage(2 * MIB, None)), None);
    }

    #[test]
    fn a_limit_is_the_part_of_the_peak_that_fits() {
        assert_eq!(Fit { percent: 25, peak_bytes: 40 * MIB }.limit_bytes(), 10 * MIB);
    }
}
