//! `aquifer bench objects`: what compaction saves, after the figures of CoRM (SIGMOD 2021).
//!
//! Figures 9 to 16 are measured: on a cluster, and figure 15 on a heap in this process. Figures 7
//! and 17 to 19 are simulated with the product's allocator and packing, without bytes.

mod deallocation;
mod during;
mod latency;
mod live;
mod load;
mod merges;
mod merging;
mod preloaded;
mod reads;
mod redis;
mod schemes;
mod traces;
mod worker;

use super::support::interrupt;
use super::support::progress;
use super::support::report::{Report, Series, Table};
use super::{BenchArgs, BenchError};

/// Targets, for `aquifer bench list`.
pub const TARGETS: &str = "targets: ≤ 1.05× the best packing of whole blocks, ≤ 1.05× ideal with splits \
    (Fig. 17), never above CoRM-0 (Fig. 19); direct reads ≥ 0.97× a raw READ and ≥ 1× a \
    read by the service over TCP, ≥ 3× in shared memory (Fig. 11)";

pub use preloaded::{Play, play};

/// Runs the bench.
///
/// # Errors
/// If it is interrupted, or `--only` names no figure.
pub fn run(args: &BenchArgs) -> Result<Report, BenchError> {
    let (pairs, objects) = if args.quick { (2_000, 200_000) } else { (20_000, 2_000_000) };
    let mut report = Report::new("objects", args.quick);
    report.notes = notes(objects);
    let figures = figures(args)?;
    let bar = progress::bar(figures.len());
    for figure in figures {
        interrupt::check()?;
        bar.set_message(format!("figure {figure}"));
        let (tables, targets) = match figure {
            7 => {
                let (tables, target) = merging::tables(pairs);
                (tables, vec![target])
            }
            3 => (vec![merges::headers()], Vec::new()),
            8 => (vec![merges::remaps()?], Vec::new()),
            9 => (latency::tables(args.quick)?, Vec::new()),
            11 => reads::tables(args.quick)?,
            12 => load::tables(args.quick)?,
            15 => (merges::compactions(args.quick)?, Vec::new()),
            16 => {
                let during = during::figures(args.quick)?;
                report.series.extend(during.series);
                (during.tables, during.targets)
            }
            17 => deallocation::tables(objects)?,
            _ => redis::tables(figure == 19, args.mesh.as_deref())?,
        };
        let by = if figure == 17 { "by % freed" } else { "by threads" };
        let lines = tables.iter().filter(|_| figure >= 17).flat_map(|table| series(table, by));
        report.series.extend(lines.collect::<Vec<_>>());
        report.tables.extend(tables);
        report.targets.extend(targets);
        bar.inc(1);
    }
    bar.finish_and_clear();
    Ok(report)
}

/// A line for each column of a table, over the number with which the names of its rows begin.
fn series(table: &Table, by: &str) -> Vec<Series> {
    let mut lines: Vec<Series> = Vec::new();
    for row in &table.rows {
        let number = row.name.split(' ').next().and_then(|number| number.parse().ok()).unwrap_or(f64::NAN);
        for (name, spread) in &row.figures {
            let point = (number, spread.median);
            match lines.iter_mut().find(|line| line.name == *name) {
                Some(line) => line.points.push(point),
                None => lines.push(Series {
                    title: format!("{}, {by}", table.title),
                    name: (*name).to_owned(),
                    points: vec![point],
                }),
            }
        }
    }
    lines
}

/// Figure 9 includes 10, figure 12 includes 13, and figure 16 includes 14. 3 is Table 3.
const FIGURES: [u32; 11] = [3, 7, 8, 9, 11, 12, 15, 16, 17, 18, 19];

fn figures(args: &BenchArgs) -> Result<Vec<u32>, BenchError> {
    let Some(only) = &args.only else { return Ok(FIGURES.into()) };
    let chosen = FIGURES.iter().find(|figure| figure.to_string() == *only);
    let known = || FIGURES.map(|figure| figure.to_string()).join(", ");
    chosen
        .map(|figure| vec![*figure])
        .ok_or_else(|| BenchError::NoSuchFigure { only: only.clone(), known: known() })
}

fn notes(objects: u64) -> Vec<String> {
    vec![
        format!(
            "simulated with {objects} objects of each size and scaled to the paper's 8 million; the \
             product's blocks, ids and packing, without bytes"
        ),
        "none: no compaction. Mesh: objects keep their offsets. CoRM-n: random ids of n bits; blocks with \
         more slots than ids are not compacted. Headers as in Table 3, without lock and \
         version: 28 + n bits; Aquifer has 44"
            .into(),
        "best whole: no packing of whole blocks is better (bounds of Fekete and Schepers). ideal: slots in \
         use. \
         Both with Aquifer's header"
            .into(),
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
        "malloc: memory of a process that plays the trace with the library of --mesh, \
         such as Mesh; what it takes before is subtracted. Aquifer's headers of 44 bits are in its \
         columns, and in no other allocator's"
            .into(),
        "the paper's claims: a pause of 700 ms by compaction; fewer than 0.1 % of direct reads fail; CoRM-16 \
         is ideal from 2 KiB on at 50 % freed; at 256 B it needs more than no compaction; 3 to 12 times less \
         memory with 32 threads on the traces of Redis"
            .into(),
    ]
}
