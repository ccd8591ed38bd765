//! Partitions that move between the servers of a cache under load, after section 5 of RaMP.
//!
//! Servers, load and commands share all processors. The balancer of the servers also runs.

mod cluster;
mod gets;
mod latencies;
mod partitions;
mod pauses;
mod samples;
mod status;
mod timeline;
mod writes;

use std::time::Duration;

use aquifer_bench::BenchError;
use aquifer_bench::support::report::{Series, Table, Target};

use super::servers::Programs;
use cluster::{CacheCluster, SERVERS};
use gets::{CLIENTS, Gets};
use partitions::PARTITIONS;

/// Length of the values of all keys, as in the paper.
const VALUE_BYTES: usize = 128;
/// The number of calls of `on_figure`.
pub const STEPS: usize = 4;

/// Amount of work.
#[derive(Clone, Copy, Debug)]
pub struct Volume {
    /// Keys of the gets.
    pub keys: u32,
    /// Option `-m` of each server: no item is evicted.
    pub memory_mib: u32,
    /// The partitions are balanced if the balancer has moved none for this time.
    pub balanced_for: Duration,
    /// Longest time to wait for the balancer.
    pub balance_timeout: Duration,
    /// Time of figure 5 before the moves, between them, and after them.
    pub stage: Duration,
    /// Moves whose pauses are measured, in each row.
    pub paused_moves: usize,
}

/// Parts of the report.
#[derive(Debug, Default)]
pub struct Figures {
    pub tables: Vec<Table>,
    pub series: Vec<Series>,
    pub targets: Vec<Target>,
}

impl Figures {
    fn extend(&mut self, other: Self) {
        self.tables.extend(other.tables);
        self.series.extend(other.series);
        self.targets.extend(other.targets);
    }
}

/// Measures all figures. `on_step` is called after each of them, and when all keys are set.
///
/// # Errors
/// If a server cannot be used, a reply is wrong, or a set was lost.
pub fn figures(programs: &Programs, volume: Volume, on_step: &dyn Fn(&str)) -> Result<Figures, BenchError> {
    let mut cluster = CacheCluster::start(programs, volume.memory_mib)?;
    measure(&cluster, volume, on_step).map_err(|error| match error {
        BenchError::Interrupted => error,
        // Otherwise a connection that broke may be all that the error says.
        _ => cluster.ending().unwrap_or(error),
    })
}

fn measure(cluster: &CacheCluster, volume: Volume, on_step: &dyn Fn(&str)) -> Result<Figures, BenchError> {
    let mut gets = Gets::connect(cluster, volume.keys)?;
    on_step("moves: figure 5");
    let mut figures = latencies::figure(cluster, &mut gets, volume)?;
    on_step("moves: pauses of writes");
    figures.extend(pauses::figure(cluster, &mut gets, volume)?);
    on_step("moves: full write load");
    figures.extend(writes::figure(cluster, volume)?);
    on_step("moves");
    Ok(figures)
}

/// Notes on the measurement.
pub fn note(volume: Volume) -> String {
    format!(
        "moves: {SERVERS} servers of {PARTITIONS} partitions, {} keys with values of {VALUE_BYTES} bytes, by \
         Zipf's law (0.99); {CLIENTS} clients, each connected to one server, with one get in flight; \
         servers, load and commands share all processors. Figure 5 moves the most requested partition of \
         the most loaded server, twice; the balancer moves others. A dip is the windows below 90 % of the \
         rate before, within 1 s of a move. Sets one at a time: the client connects to the owner before \
         each move, and its sets are forwarded after it; seconds of moves: 1 s around each one; at rest: \
         before that. A move's time is that which `aquifer cache move` prints. Keys read back: each has the \
         value of its last acknowledged set, or the bench fails",
        volume.keys
    )
}
