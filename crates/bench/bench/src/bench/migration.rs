//! `aquifer bench migration`: segments that move between two hosts, after Figure 4 of RaMP.
//!
//! Two agents on this machine hand segments over to each other over TCP, like agents of two hosts.
//! The programs are processes of this bench.

mod gets;
mod hosts;
mod pages;
mod player;
mod source;
mod sync;
mod transfers;

use aquifer_bench::support::report::Report;
use aquifer_bench::support::{interrupt, progress};

use super::{BenchArgs, BenchError};
pub use player::serve_at;

/// Targets, for `aquifer bench list`.
pub const TARGETS: &str = "targets: a hand-over of 1 MiB to 4 GiB within 1.5× of each other, p99 ≤ 1 ms; \
    pulls at ≥ 80 % of READs of the same pages; a map in a segment at ≥ 0.98 of one on the heap; \
    a source that keeps ≥ 95 % of its speed with a limit of the pull rate";

/// Runs the bench.
///
/// # Errors
/// If it is interrupted, or a program fails.
pub fn run(args: &BenchArgs) -> Result<Report, BenchError> {
    let hosts = hosts::Hosts::start(None)?;
    let mut report = Report::new("migration", args.quick);
    report.notes = notes();
    let bar = progress::bar(4);
    bar.set_message("hand-overs");
    let (table, targets) = transfers::table(&hosts, args.quick)?;
    report.tables.push(table);
    report.targets.extend(targets);
    bar.inc(1);
    interrupt::check()?;
    bar.set_message("figure 4");
    let figure = gets::figure(&hosts, args.quick)?;
    report.tables.extend(figure.tables);
    report.series.extend(figure.series);
    report.targets.extend(figure.targets);
    drop(hosts);
    bar.inc(1);
    bar.set_message("the source");
    let (table, targets) = source::table(args.quick)?;
    report.tables.push(table);
    report.targets.extend(targets);
    bar.inc(1);
    bar.set_message("syncs");
    report.tables.push(sync::table(args.quick)?);
    bar.finish_and_clear();
    Ok(report)
}

fn notes() -> Vec<String> {
    [
        "hand-overs: two processes hand a segment back and forth between two agents. transfer: from the \
         call to the return of receive in the other process; write: to its first write, with a page that \
         is pulled for it; connect: the preparation. floor: a move of a mapping of this size, two messages \
         between processes, and one over TCP",
        "figure 4: a map of 8-byte keys and 128-byte values; one thread gets random keys, before and after \
         the hand-over. on touch: pages come when they are touched; ahead: also before; stop and copy: all \
         come first. The longest gap is that between two gets, in one process or across the hand-over",
        "the paper, at 10 Gb/s: 1.5 s of higher latency, tail below 50 µs, several hundred ms for stop and \
         copy",
        "pull: all pages of the map's segment, without a program that uses it; READs: the same pages over \
         TCP, 64 at once, encrypted like all traffic",
        "source keeps: random accesses of a thread of the source while a segment follows to the target, ÷ \
         those before; all threads share the processors",
        "sync: to a node on this machine, over TCP, encrypted; file: what has changed is written to a \
         temporary file, and fdatasync; revert: all of the segment is read back, beside a read of the file",
        "heap: gets of a map in memory of the process, of the same kind and with the same hash function",
    ]
    .map(str::to_owned)
    .into()
}
