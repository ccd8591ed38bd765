//! Overhead for a program that stays well below its limit.

use std::process::Command;

use aquifer_bench::BenchError;
use aquifer_bench::support::bytes::{MIB, float};
use aquifer_bench::support::child::Watched;

use super::backends::Bench;

/// The programs' limit: many times what they use.
const LIMIT_BYTES: u64 = 512 * MIB;

/// Times of one program, round by round.
#[derive(Debug, Default)]
pub struct Calm {
    /// Name of the program.
    pub name: &'static str,
    /// Times of the plain runs in seconds.
    pub plain_s: Vec<f64>,
    /// Times of the runs on the pool in seconds.
    pub pool_s: Vec<f64>,
    /// Processor times of the plain runs.
    pub plain_cpu_us: Vec<f64>,
    /// Processor times of the runs on the pool, with `aquifer run`.
    pub pool_cpu_us: Vec<f64>,
}

/// Runs two programs plainly and on the pool, once each in every round.
///
/// # Errors
/// If a program fails.
pub fn measure(bench: &Bench) -> Result<Vec<Calm>, BenchError> {
    let walk = ["--bytes", "64M", "--pattern", "random", "--op", "write", "--passes", "100", "--cpu", "0"];
    let fresh = ["--bytes", "64M", "--mode", "plain", "--passes", "20", "--op", "write", "--cpu", "0"];
    let programs = [
        ("memory accessed repeatedly", &bench.programs.faultbench, walk),
        ("memory freed and allocated again", &bench.programs.zerofloor, fresh),
    ];
    let stats = bench.folder.path().join("stats.json");
    let mut all = Vec::new();
    for (name, program, args) in programs {
        let mut calm = Calm { name, ..Calm::default() };
        for round in 0..bench.size.calm_rounds {
            // The order alternates, so that neither always starts with the caches of the other.
            for pooled in [round % 2 == 0, round % 2 == 1] {
                let mut command = if pooled {
                    bench.cluster.pooled_command(LIMIT_BYTES, &stats, program)?
                } else {
                    Command::new(program)
                };
                command.args(args);
                let watched = if pooled { Watched::Started } else { Watched::All };
                let (outcome, _) = bench.measured(command, watched, name, "without pressure")?;
                let (times, cpu) = if pooled {
                    (&mut calm.pool_s, &mut calm.pool_cpu_us)
                } else {
                    (&mut calm.plain_s, &mut calm.plain_cpu_us)
                };
                times.push(outcome.elapsed.as_secs_f64());
                cpu.push(float(outcome.cpu_us));
            }
        }
        all.push(calm);
    }
    Ok(all)
}
