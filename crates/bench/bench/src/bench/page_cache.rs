//! `aquifer bench page-cache`: the worth of a host's idle memory, and how fast it is returned.

mod redis;
mod runs;
mod squeeze;

use aquifer_bench::support::report::Report;

use super::{BenchArgs, BenchError};

/// Targets, for `aquifer bench list`.
pub const TARGETS: &str = "targets: with all that does not fit in the page cache, over tcp ≥ 1.5× as fast as \
    without; 32 runs together ≥ 0.8× one; a program that takes 500 MB/s finds memory, and the cache is back \
    within 1 s";

/// A part of the bench.
struct Part {
    name: &'static str,
    measure: fn(&mut Report, quick: bool) -> Result<(), BenchError>,
}

const PARTS: [Part; 4] = [
    Part { name: "sizes", measure: redis::measure_sizes },
    Part { name: "working-sets", measure: redis::measure_working_sets },
    Part { name: "runs", measure: runs::measure },
    Part { name: "squeeze", measure: squeeze::measure },
];

/// Runs the bench.
///
/// # Errors
/// If there is no such part, or it could not be measured.
pub fn run(args: &BenchArgs) -> Result<Report, BenchError> {
    let is_chosen = |part: &&Part| args.only.as_ref().is_none_or(|only| part.name == only);
    let mut report = Report::new("page-cache", args.quick);
    let mut chosen = PARTS.iter().filter(is_chosen).peekable();
    if let (None, Some(only)) = (chosen.peek(), &args.only) {
        let known = PARTS.each_ref().map(|part| part.name).join(", ");
        return Err(BenchError::NoSuchFigure { only: only.clone(), known });
    }
    for part in chosen {
        (part.measure)(&mut report, args.quick)?;
    }
    Ok(report)
}
