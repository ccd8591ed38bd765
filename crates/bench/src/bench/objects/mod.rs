//! `aquifer bench objects`: what compaction saves, after the figures of CoRM (SIGMOD 2021).
//!
//! Figure 11 is measured on a cluster. The others are simulated with the product's allocator and
//! packing, without bytes.

mod deallocation;
mod merging;
mod reads;
mod redis;
mod schemes;

use super::support::interrupt;
use super::support::progress;
use super::support::report::{Report, Series, Table};
use super::{BenchArgs, BenchError};

/// Targets, for `aquifer bench list`.
pub const TARGETS: &str = "targets: ≤ 1.05× the best packing of whole blocks, ≤ 1.05× ideal with splits \
    (Fig. 17), never above CoRM-0 (Fig. 19); direct reads ≥ 0.97× a raw READ and ≥ 1× a \
    read by the service over TCP, ≥ 3× in shared memory (Fig. 11)";

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
            11 => reads::tables(args.quick)?,
            17 => deallocation::tables(objects)?,
            _ => redis::tables(figure == 19)?,
        };
        let by = if figure == 17 { "by % freed" } else { "by threads" };
        let lines = tables.iter().filter(|_| ![7, 11].contains(&figure)).flat_map(|table| series(table, by));
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

const FIGURES: [u32; 5] = [7, 11, 17, 18, 19];

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
         translation or header. READ: the same bytes, encrypted as all traffic is"
            .into(),
        "the paper's claims: CoRM-16 is ideal from 2 KiB on at 50 % freed; at 256 B it needs more than no \
         compaction; 3 to 12 times less memory with 32 threads on the traces of Redis"
            .into(),
    ]
}
