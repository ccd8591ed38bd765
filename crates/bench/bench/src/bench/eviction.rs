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
use full_pool::Backend;
use withdrawal::Way;

/// Targets, for `aquifer bench list`.
pub const TARGETS: &str = "targets: while a node is emptied at the default rate a program keeps 95 % of \
    its speed, and it has 97 % afterwards; in a full pool with a disk node it has 0.8 of its speed with a \
    swap file on the same disk";

/// Runs the bench.
///
/// # Errors
/// If something could not be measured or a page was wrong.
pub fn run(args: &BenchArgs) -> Result<Report, BenchError> {
    let rounds = if args.quick { 1 } else { 3 };
    let fabric = args.fabric.unwrap_or(Fabric::Tcp);
    let size = if args.quick { withdrawal::Size::QUICK } else { withdrawal::Size::FULL };
    let full_size = if args.quick { full_pool::Size::QUICK } else { full_pool::Size::FULL };
    let folder = folder::temporary()?;
    let program = programs::build(folder.path())?.processbench;
    let mut report = Report::new("eviction", args.quick);
    report.notes = withdrawal::notes(size, rounds, fabric);
    let has_peer = match full_pool::try_out() {
        Ok(()) => true,
        Err(error) => {
            report.notes.push(format!("a full pool is not measured, because its peer cannot be: {error}"));
            false
        }
    };
    let backends: &[Backend] = if has_peer { &Backend::ALL } else { &[] };
    let bar = progress::bar(rounds * (Way::ALL.len() + backends.len()));
    let (mut of_ways, mut of_backends) = (BTreeMap::<_, Vec<_>>::new(), BTreeMap::<_, Vec<_>>::new());
    for round in 1..=rounds {
        for way in Way::ALL {
            bar.set_message(format!("round {round}: {}", way.describe()));
            let sample = withdrawal::measure(way, size, fabric, &program, folder.path())?;
            of_ways.entry(way).or_default().push(sample);
            bar.inc(1);
        }
        for backend in backends {
            bar.set_message(format!("round {round}: full pool, {}", backend.name()));
            let figures = full_pool::measure(*backend, full_size, fabric, &program, folder.path())?;
            of_backends.entry(*backend).or_default().push(figures);
            bar.inc(1);
        }
    }
    bar.finish_and_clear();
    withdrawal::fill(&mut report, &of_ways);
    if has_peer {
        report.notes.push(full_pool::note(full_size));
        full_pool::fill(&mut report, &of_backends);
    }
    Ok(report)
}
