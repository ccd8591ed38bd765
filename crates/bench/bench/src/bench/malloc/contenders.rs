//! The compared combinations of allocator and paging, and runs of a benchmark with each.

use std::path::{Path, PathBuf};
use std::process::Command;

use aquifer::Fabric;
use aquifer_bench::BenchError;
use aquifer_bench::support::bytes::{MIB, float};
use aquifer_bench::support::child::{self, ProgramOutcome, Streams, Watched};
use aquifer_bench::support::cluster::{Cluster, aquifer_program};
use aquifer_bench::support::folder;
use aquifer_bench::support::programs;
use aquifer_ipc::LOCAL_VARIABLE;
use aquifer_swap::setup::SetupError;
use serde::Deserialize;
use tempfile::TempDir;

use super::Sample;
use crate::peers::{Peer, PeerSetup, ReadAhead};

const LIBRARY: &str = "libaquifer_malloc.so";
/// Attempts of a run on kernel swap, because the kernel sometimes kills a program that succeeds the
/// next time.
const ATTEMPTS: usize = 4;

/// Allocator and paging of a run.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum MallocContender {
    /// glibc, all resident.
    Glibc,
    /// The library without a limit: mimalloc, all resident.
    Plain,
    /// The library with a limit.
    Library,
    /// glibc under `aquifer run`.
    Run,
    /// glibc in a cgroup with a swap file, with the kernel's usual read-ahead.
    SwapFile,
}

impl MallocContender {
    /// Name in the report.
    pub fn name(self) -> &'static str {
        match self {
            Self::Glibc => "glibc, all resident",
            Self::Plain => "library without limit",
            Self::Library => "library with limit",
            Self::Run => "glibc, aquifer run",
            Self::SwapFile => "glibc, swap file",
        }
    }

    /// Sets up a small swap device and removes it, if the contender is kernel swap.
    ///
    /// # Errors
    /// If that is not possible.
    pub fn try_out(self) -> Result<(), SetupError> {
        if self == Self::SwapFile { swap(4 << 20, 4 << 20)?.close() } else { Ok(()) }
    }
}

fn swap(limit_bytes: u64, swap_bytes: u64) -> Result<PeerSetup, SetupError> {
    let mut setup = PeerSetup::new(Peer::SwapFile, limit_bytes, swap_bytes)?;
    setup.set_read_ahead(ReadAhead::EightPages)?;
    Ok(setup)
}

/// A benchmark with its parameters.
#[derive(Clone, Copy, Debug)]
pub struct Job {
    /// Name of the benchmark in the program.
    pub name: &'static str,
    /// Bytes that the benchmark keeps allocated.
    pub bytes: u64,
    /// Number of operations.
    pub operations: u64,
    /// Limit of resident memory, for contenders with a limit.
    pub limit_bytes: u64,
    /// The limit in percent of the peak.
    pub percent: u64,
}

/// The results that the program prints.
#[derive(Debug, Deserialize)]
struct Figures {
    ops: u64,
    seconds: f64,
    errors: u64,
}

/// State that all runs share.
#[derive(Debug)]
pub struct Stage {
    folder: TempDir,
    program: PathBuf,
    library: PathBuf,
    cluster: Cluster,
    /// Notes for the report.
    pub notes: Vec<String>,
}

impl Stage {
    /// Starts a cluster that lends `memory_bytes`.
    ///
    /// # Errors
    /// If the cluster does not start, the program cannot be compiled, or the library is not in the
    /// folder of this binary.
    pub fn new(memory_bytes: u64) -> Result<Self, BenchError> {
        let folder = folder::temporary()?;
        let program = programs::build(folder.path())?.mallocbench;
        let library = aquifer_program()?.with_file_name(LIBRARY);
        if !library.exists() {
            let missing = std::io::Error::from(std::io::ErrorKind::NotFound);
            return Err(BenchError::io("find the allocator", &library)(missing));
        }
        let cluster = Cluster::up(memory_bytes, Fabric::Shm, None)?;
        Ok(Self { folder, program, library, cluster, notes: Vec::new() })
    }

    /// Runs a benchmark; returns its figures and its peak resident memory. `None` if the kernel
    /// killed each attempt on kernel swap.
    ///
    /// # Errors
    /// If it fails otherwise, or a signal asks to stop.
    pub fn play(
        &mut self,
        contender: MallocContender,
        job: Job,
    ) -> Result<Option<(Sample, u64)>, BenchError> {
        let played = match contender {
            MallocContender::Glibc => self.watch(contender, job, Command::new(&self.program), Watched::All),
            MallocContender::Plain | MallocContender::Library => {
                let mut command = Command::new(&self.program);
                command.env("LD_PRELOAD", &self.library).env_remove(LOCAL_VARIABLE);
                if contender == MallocContender::Library {
                    command.env(LOCAL_VARIABLE, job.limit_bytes.to_string());
                    command.env("AQUIFER_AGENT", self.cluster.state().join("agent.sock"));
                }
                self.watch(contender, job, command, Watched::All)
            }
            MallocContender::Run => {
                let stats = self.folder.path().join("stats.json");
                let command = self.cluster.pooled_command(job.limit_bytes, &stats, &self.program)?;
                self.watch(contender, job, command, Watched::Started)
            }
            MallocContender::SwapFile => return self.swap_until_done(job),
        };
        played.map(Some)
    }

    fn watch(
        &self,
        contender: MallocContender,
        job: Job,
        mut command: Command,
        watched: Watched,
    ) -> Result<(Sample, u64), BenchError> {
        command.args([job.name, &job.bytes.to_string(), &job.operations.to_string()]);
        let output = self.folder.path().join("output");
        let before_us = self.cluster.cpu_us();
        let outcome = child::run(command, &Streams { input: None, output: &output }, watched, |_| {})?;
        if !outcome.status.success() {
            return Err(BenchError::Program {
                program: job.name.into(),
                context: contender.name().into(),
                status: outcome.status.to_string(),
                message: outcome.message,
            });
        }
        let mut sample = sample(contender, job, &outcome, &output)?;
        let daemons_us = self.cluster.cpu_us().saturating_sub(before_us);
        sample.insert("CPU s", float(outcome.cpu_us + daemons_us) / 1e6);
        Ok((sample, outcome.resident_peak_bytes))
    }

    /// Runs a benchmark on kernel swap, and repeats it if the kernel killed it.
    fn swap_until_done(&mut self, job: Job) -> Result<Option<(Sample, u64)>, BenchError> {
        for _ in 0..ATTEMPTS {
            let setup = swap(job.limit_bytes, 4 * job.bytes.max(64 * MIB))?;
            let command = setup.command(&self.program)?;
            let (played, has_waited) =
                setup.with_oom_waits(|| self.watch(MallocContender::SwapFile, job, command, Watched::All))?;
            let usage = setup.usage()?;
            setup.close()?;
            let reason = match played {
                _ if usage.oom_kills > 0 => "killed for lack of memory".to_owned(),
                Err(error @ BenchError::Program { .. }) => error.to_string(),
                played => {
                    let (mut sample, peak_bytes) = played?;
                    sample.insert("in want", f64::from(has_waited));
                    return Ok(Some((sample, peak_bytes)));
                }
            };
            self.notes.push(format!("{} on a swap file at {} %: {reason}", job.name, job.percent));
        }
        Ok(None)
    }
}

fn sample(
    contender: MallocContender,
    job: Job,
    outcome: &ProgramOutcome,
    output: &Path,
) -> Result<Sample, BenchError> {
    let text = std::fs::read(output).map_err(BenchError::io("read", output))?;
    let figures: Figures = serde_json::from_slice(&text)
        .map_err(|error| BenchError::io("parse the results in", output)(error.into()))?;
    if figures.errors > 0 {
        return Err(BenchError::Wrong {
            program: job.name.into(),
            context: format!("{}, {} % fit", contender.name(), job.percent),
            what: format!("{} blocks differ from the written bytes", figures.errors),
        });
    }
    Ok(Sample::from([
        ("thousand ops/s", float(figures.ops) / figures.seconds / 1e3),
        ("whole s", outcome.elapsed.as_secs_f64()),
        ("resident MiB", float(outcome.resident_peak_bytes) / float(MIB)),
        ("limit MiB", float(job.limit_bytes) / float(MIB)),
    ]))
}
