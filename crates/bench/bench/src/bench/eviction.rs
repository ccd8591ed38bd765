//! `aquifer bench eviction`: a memory node is emptied or lost under a program, and a pool without
//! room uses a disk (Valet, figures 5 and 23, and Table 3).

mod full_pool;
mod withdrawal;

use std::collections::BTreeMap;

use aquifer::Fabric;
use aquifer_bench::support::folder;
use aquifer_bench::support::programs;
use aquifer_bench::support::progress;
use aquifer_bench::support::report::Report;

use super::{BenchArgs, BenchError};
use full_pool::Case;
use withdrawal::Way;

/// Targets, for `aquifer bench list`.
pub const TARGETS: &str = "targets: while a node is emptied at the default rate a program keeps 95 % of \
    its speed, and it has 97 % afterwards; in a full pool with a disk node it has 0.8 of its speed with a \
    swap file on the same disk";

const WITHDRAWAL: &str = "withdrawal";
const FULL_POOL: &str = "full-pool";
/// Parts of the bench, for `--only`.
const PARTS: [&str; 2] = [WITHDRAWAL, FULL_POOL];

/// Runs the bench.
///
/// # Errors
/// If something could not be measured or a page was wrong.
pub fn run(args: &BenchArgs) -> Result<Report, BenchError> {
    let ways: &[Way] = if is_chosen(args, WITHDRAWAL)? { &Way::ALL } else { &[] };
    let mut cases = if is_chosen(args, FULL_POOL)? { Case::all() } else { Vec::new() };
    let rounds = if args.quick { 1 } else { 3 };
    let fabric = args.fabric.unwrap_or(Fabric::Tcp);
    let size = if args.quick { withdrawal::Size::QUICK } else { withdrawal::Size::FULL };
    let full_size = if args.quick { full_pool::Size::QUICK } else { full_pool::Size::FULL };
    let folder = folder::temporary()?;
    let program = programs::build(folder.path())?.processbench;
    let mut report = Report::new("eviction", args.quick);
    report.notes = vec![format!("{rounds} rounds, every page verified; memory nodes over {}", fabric.name())];
    if !cases.is_empty()
        && let Err(error) = full_pool::try_out()
    {
        report.notes.push(format!("a full pool is not measured, because its peer cannot be: {error}"));
        cases.clear();
    }
    let bar = progress::bar(rounds * (ways.len() + cases.len()));
    let (mut of_ways, mut of_cases) = (BTreeMap::<_, Vec<_>>::new(), BTreeMap::<_, Vec<_>>::new());
    for round in 1..=rounds {
        for way in ways {
            bar.set_message(format!("round {round}: {}", way.describe()));
            let sample = withdrawal::measure(*way, size, fabric, &program, folder.path())?;
            of_ways.entry(*way).or_default().push(sample);
            bar.inc(1);
        }
        for case in &cases {
            bar.set_message(format!("round {round}: full pool, {}", case.name()));
            let figures = full_pool::measure(*case, full_size, fabric, &program, folder.path())?;
            of_cases.entry(*case).or_default().push(figures);
            bar.inc(1);
        }
    }
    bar.finish_and_clear();
    if !ways.is_empty() {
        report.notes.extend(withdrawal::notes(size));
        withdrawal::fill(&mut report, &of_ways);
    }
    if !cases.is_empty() {
        report.notes.push(full_pool::note(full_size));
        full_pool::fill(&mut report, &of_cases);
    }
    Ok(report)
}

/// Whether a part is measured.
fn is_chosen(args: &BenchArgs, part: &str) -> Result<bool, BenchError> {
    let Some(only) = &args.only else { return Ok(true) };
    if !PARTS.contains(&only.as_str()) {
        return Err(BenchError::NoSuchFigure { only: only.clone(), known: PARTS.join(", ") });
    }
    Ok(only == part)
}
