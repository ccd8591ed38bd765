//! `aquifer bench alloc`: the cost of allocating an extent on this machine, beside peers, after the
//! evaluation of FineMem (OSDI 2025; design.md, section 15). `aquifer-research alloc` has the cost
//! under a model of RDMA.

mod real;
mod service;

use std::path::Path;

use aquifer_bench::support::allocation_trace;
use aquifer_bench::support::bytes::float;
use aquifer_bench::support::report::Report;
use aquifer_bench::support::spread::short;

use super::{BenchArgs, BenchError};
pub use real::serve_at;

/// Targets, for `aquifer bench list`.
pub const TARGETS: &str = "targets: the node's CPU over TCP ≤ 0.33 of RPC's; the service ≤ 2 µs for an \
    extent in stock";

/// Clients that replay a trace.
const REPLAY_CLIENTS: usize = 16;

/// Amount of work.
#[derive(Clone, Copy, Debug)]
struct Volume {
    rounds: usize,
    requests: usize,
    /// Allocations of a round.
    real: usize,
}

/// Runs the bench.
///
/// # Errors
/// If an allocator fails.
pub fn run(args: &BenchArgs) -> Result<Report, BenchError> {
    let volume = if args.quick {
        Volume { rounds: 1, requests: 5_000, real: 2_000 }
    } else {
        Volume { rounds: 5, requests: 20_000, real: 10_000 }
    };
    if let Some(path) = &args.trace {
        return replay(path, args.quick, volume);
    }
    let mut report = Report::new("alloc", args.quick);
    let (service, service_targets) = service::measure(volume.rounds, volume.requests)?;
    let (real, real_targets) = real::measure(volume.rounds, volume.real)?;
    report.notes.push(
        "the service is measured in the program, call by call; program, agent and node share the \
         processors of this machine"
            .into(),
    );
    report.tables = real;
    report.tables.extend(service);
    report.targets = real_targets;
    report.targets.extend(service_targets);
    Ok(report)
}

/// Replays a trace, and measures nothing else.
fn replay(path: &Path, quick: bool, volume: Volume) -> Result<Report, BenchError> {
    let arrivals = allocation_trace::read(path)?;
    let mut report = Report::new("alloc-trace", quick);
    let last_s = arrivals.last().map_or(0.0, |last| float(last.at_ns) / 1e9);
    report.notes.push(format!(
        "{} allocations in {} s, by {REPLAY_CLIENTS} clients in turn; the delay of a busy client counts. A \
         client that holds its share of half of the memory frees its oldest extent first. The node's CPU \
         includes frees",
        arrivals.len(),
        short(last_s)
    ));
    report.tables = real::replay(&arrivals, REPLAY_CLIENTS, volume.rounds)?;
    Ok(report)
}
