//! Runs of `processbench`, whose processes write to the pages of their memory.

use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use rustix::process::{Signal, kill_process};
use serde::Deserialize;

use super::child::{self, ProgramOutcome, Streams, Watched};
use super::cluster::Cluster;
use super::programs::Latencies;
use crate::BenchError;

/// Name of the program in errors.
const PROGRAM: &str = "processbench";

/// Parameters of the program.
#[derive(Clone, Copy, Debug)]
pub struct Load {
    /// Number of processes.
    pub processes: u64,
    /// Memory of all processes together.
    pub bytes: u64,
    /// Limit of the run.
    pub limit_bytes: u64,
    /// Whether they write to one page after another, instead of to random ones.
    pub is_sequential: bool,
    /// Time for which the processes write.
    pub seconds: u64,
    /// Replicas of each page.
    pub replicas: u64,
    /// Policy of copies on a disk, as `aquifer run --backup` has it.
    pub backup: &'static str,
}

impl Load {
    /// The program's arguments.
    pub fn add_arguments(&self, command: &mut Command) {
        command.args(["--processes", &self.processes.to_string(), "--bytes", &self.bytes.to_string()]);
        command.args(["--seconds", &self.seconds.to_string()]);
        command.args(self.is_sequential.then_some("--sequential"));
    }
}

/// The results that the program prints as a line of JSON.
#[derive(Debug, Deserialize)]
pub struct Figures {
    /// Time of the measurement.
    pub seconds: f64,
    /// Writes of all processes.
    pub touches: u64,
    /// Writes that took over 1 µs.
    pub faults: Latencies,
    /// The longest write.
    pub longest_us: f64,
    /// Wrong words.
    errors: u64,
}

/// Runs the program on the pool.
///
/// # Errors
/// If the program fails, or has found a wrong word.
pub fn run(cluster: &Cluster, program: &Path, folder: &Path, load: Load) -> Result<Figures, BenchError> {
    run_until(cluster, program, folder, load, &AtomicBool::new(false))
}

/// Like [`run`], but ends the program when `is_over` is set.
///
/// # Errors
/// Those of [`run`].
pub fn run_until(
    cluster: &Cluster,
    program: &Path,
    folder: &Path,
    load: Load,
    is_over: &AtomicBool,
) -> Result<Figures, BenchError> {
    let mut command = cluster.pooled_command(load.limit_bytes, &folder.join("stats.json"), program)?;
    command.env("AQUIFER_REPLICAS", load.replicas.to_string()).env("AQUIFER_BACKUP", load.backup);
    load.add_arguments(&mut command);
    let output = folder.join("output");
    let streams = Streams { input: None, output: &output };
    let mut is_ended = false;
    let outcome = child::run_with_pid(command, &streams, Watched::Started, |pid, _| {
        if !is_ended && is_over.load(Relaxed) {
            is_ended = true;
            // Fails if the program has just ended.
            let _ = kill_process(pid, Signal::TERM);
        }
    })?;
    figures(&outcome, &output, "on the pool")
}

/// The figures that the program has printed. `context` is named in errors.
///
/// # Errors
/// If the program failed, or has found a wrong word.
pub fn figures(outcome: &ProgramOutcome, output: &Path, context: &str) -> Result<Figures, BenchError> {
    let (program, context) = (PROGRAM.to_owned(), context.to_owned());
    if !outcome.status.success() {
        let (status, message) = (outcome.status.to_string(), outcome.message.clone());
        return Err(BenchError::Program { program, context, status, message });
    }
    let text = std::fs::read_to_string(output).map_err(BenchError::io("read", output))?;
    match serde_json::from_str::<Figures>(&text) {
        Ok(figures) if figures.errors == 0 => Ok(figures),
        _ => Err(BenchError::Figures { program, context, text }),
    }
}
