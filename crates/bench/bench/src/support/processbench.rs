//! Runs of `processbench`, whose processes write to random pages.

use std::path::Path;

use serde::Deserialize;

use super::child::{self, Streams, Watched};
use super::cluster::Cluster;
use super::programs::Latencies;
use crate::BenchError;

/// Parameters of the program.
#[derive(Clone, Copy, Debug)]
pub struct Load {
    /// Number of processes.
    pub processes: u64,
    /// Memory of all processes together.
    pub bytes: u64,
    /// Limit of the run.
    pub limit_bytes: u64,
    /// Time for which the processes write.
    pub seconds: u64,
    /// Replicas of each page.
    pub replicas: u64,
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
    let mut command = cluster.pooled_command(load.limit_bytes, &folder.join("stats.json"), program)?;
    command.env("AQUIFER_REPLICAS", load.replicas.to_string());
    command.args(["--processes", &load.processes.to_string(), "--bytes", &load.bytes.to_string()]);
    command.args(["--seconds", &load.seconds.to_string()]);
    let output = folder.join("output");
    let streams = Streams { input: None, output: &output };
    let outcome = child::run(command, &streams, Watched::Started, |_| {})?;
    let (program, context) = ("processbench".to_owned(), format!("{} processes on the pool", load.processes));
    if !outcome.status.success() {
        let (status, message) = (outcome.status.to_string(), outcome.message);
        return Err(BenchError::Program { program, context, status, message });
    }
    let text = std::fs::read_to_string(&output).map_err(BenchError::io("read", &output))?;
    match serde_json::from_str::<Figures>(&text) {
        Ok(figures) if figures.errors == 0 => Ok(figures),
        _ => Err(BenchError::Figures { program, context, text }),
    }
}
