//! `aquifer bench objects`: calls and reads of objects on a cluster, after the figures of CoRM
//! (SIGMOD 2021). `aquifer-research objects` has those that need no cluster.

mod during;
mod latency;
mod live;
mod load;
mod reads;
mod worker;

use aquifer_bench::support::benches::select_figures;
use aquifer_bench::support::interrupt;
use aquifer_bench::support::progress;
use aquifer_bench::support::report::Report;

use super::{BenchArgs, BenchError};

/// Targets, for `aquifer bench list`.
pub const TARGETS: &str = "targets: direct reads ≥ 0.97× a raw READ and ≥ 1× a read by the service over \
    TCP, ≥ 3× in shared memory (Fig. 11)";

/// Runs the bench.
///
/// # Errors
/// If it is interrupted, or `--only` names no figure.
pub fn run(args: &BenchArgs) -> Result<Report, BenchError> {
    let mut report = Report::new("objects", args.quick);
    report.notes = notes();
    let figures = select_figures(args.only.as_deref(), &FIGURES)?;
    let bar = progress::bar(figures.len());
    for figure in figures {
        interrupt::check()?;
        bar.set_message(format!("figure {figure}"));
        let (tables, targets) = match figure {
            9 => (latency::tables(args.quick)?, Vec::new()),
            11 => reads::tables(args.quick)?,
            12 => load::tables(args.quick)?,
            _ => {
                let during = during::figures(args.quick)?;
                report.series.extend(during.series);
                (during.tables, during.targets)
            }
        };
        report.tables.extend(tables);
        report.targets.extend(targets);
        bar.inc(1);
    }
    bar.finish_and_clear();
    Ok(report)
}

/// Figure 9 includes 10, figure 12 includes 13, and figure 16 includes 14.
const FIGURES: [u32; 4] = [9, 11, 12, 16];

fn notes() -> Vec<String> {
    vec![
        "figure 11: one client that waits for each read; copy: out of a mapping of the same size, without \
         translation or header; FaRM: with a header that is compared before and after, as objects that \
             never move need. CoRM-0 reads as Aquifer does. READ: the same bytes, encrypted as all traffic \
             is. Requests are answered in the thread of the transport; worker: in this process, by a service \
             whose transport hands them to another thread"
            .into(),
        "figures 12 and 13: each client is a thread with a connection of its own; all share the processors \
         with the service"
            .into(),
        "figure 16: the heap is compacted by `aquifer heap compact`, beside the service's own compaction. A \
         pause is the time from one read to the next"
            .into(),
        "the paper's claims: a pause of 700 ms by compaction; fewer than 0.1 % of direct reads fail".into(),
    ]
}
