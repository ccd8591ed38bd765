//! `aquifer-research objects`: memory saved by compaction, after the figures of CoRM (SIGMOD 2021).
//!
//! Figures 8 and 15 are measured in this process. Figures 7 and 17 to 19 are simulated with the
//! product's blocks, without bytes: by the product's packing, and with the ids of the paper and of
//! Mesh by a model.

mod conflict_packer;
mod deallocation;
mod drawn_ids;
mod id_mode;
mod merges;
mod merging;
mod modelled_heap;
mod preloaded;
mod redis;
mod schemes;
mod traces;

use aquifer_bench::BenchError;
use aquifer_bench::support::benches::select_figures;
use aquifer_bench::support::interrupt;
use aquifer_bench::support::progress;
use aquifer_bench::support::report::{Report, Series, Table};

use crate::ResearchArgs;

/// Targets, for `aquifer-research list`.
pub const TARGETS: &str = "targets: ≤ 1.05× the best packing of whole blocks, ≤ 1.05× ideal with splits \
    (Fig. 17), never above CoRM-0 (Fig. 19)";

pub use preloaded::{Play, play};

/// Runs the bench.
///
/// # Errors
/// If it is interrupted, or `--only` names no figure.
pub fn run(args: &ResearchArgs) -> Result<Report, BenchError> {
    let (pairs, objects) = if args.quick { (2_000, 200_000) } else { (20_000, 2_000_000) };
    let mut report = Report::new("objects-model", args.quick);
    report.notes = notes(objects);
    let figures = select_figures(args.only.as_deref(), &FIGURES)?;
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
            15 => (merges::compactions(args.quick)?, Vec::new()),
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

/// The figures of the paper; 3 is Table 3.
const FIGURES: [u32; 7] = [3, 7, 8, 15, 17, 18, 19];

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
        "malloc: memory of a process that plays the trace with the library of --mesh, \
         such as Mesh; what it takes before is subtracted. Aquifer's headers of 44 bits are in its \
         columns, and in no other allocator's"
            .into(),
        "the paper's claims: CoRM-16 is ideal from 2 KiB on at 50 % freed; at 256 B it needs more than no \
         compaction; 3 to 12 times less memory with 32 threads on the traces of Redis"
            .into(),
    ]
}
