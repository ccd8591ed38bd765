//! The binary `aquifer-research`: benches that replay figures on a model. They compare parts of the
//! product with alternatives that the product does not have.

#![forbid(unsafe_code)]

mod alloc;
#[cfg(test)]
mod golden_tests;
mod objects;
mod packing;

use std::path::PathBuf;
use std::process::ExitCode;

use aquifer::say::{say, say_line};
use aquifer_bench::BenchError;
use aquifer_bench::support::benches::{Bench, BenchList};
use aquifer_bench::support::interrupt;
use clap::Parser;

/// Replay figures on a model
#[derive(Parser, Clone, Debug)]
#[command(name = "aquifer-research", version)]
struct ResearchArgs {
    /// The bench; `list` lists all
    name: String,
    /// Simulate less, with less reliable results
    #[arg(long)]
    quick: bool,
    /// Write the report as JSON to this file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Draw pictures as SVG into this folder
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// For `objects`, only this figure, such as 17
    #[arg(long, value_name = "FIGURE")]
    only: Option<String>,
    /// For figures 18 and 19 of `objects`, the library of Mesh (libmesh.so), or of another malloc,
    /// as a peer
    #[arg(long, value_name = "LIBRARY")]
    mesh: Option<PathBuf>,
    /// Trace for `alloc` to replay: lines MICROSECONDS SIZE_CLASS, where class k has 4 KiB·2^k
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// Be the process of `objects` that plays a trace of Redis
    #[arg(long, hide = true)]
    play: Option<objects::Play>,
}

const ONLY: &str = "--only";
const MESH: &str = "--mesh";
const TRACE: &str = "--trace";

impl ResearchArgs {
    /// The given options, of those that only some benches have.
    fn options(&self) -> impl Iterator<Item = &'static str> {
        let given = [(ONLY, self.only.is_some()), (MESH, self.mesh.is_some()), (TRACE, self.trace.is_some())];
        given.into_iter().filter(|(_, is_given)| *is_given).map(|(option, _)| option)
    }
}

const BENCHES: BenchList<ResearchArgs> = BenchList { command: "aquifer-research", benches: &ALL };

const ALL: [Bench<ResearchArgs>; 3] = [
    Bench {
        name: "alloc",
        about: "allocation of extents with a cost model of RDMA, beside RPC and a one-sided array",
        targets: alloc::TARGETS,
        options: &[TRACE],
        run: alloc::run,
    },
    Bench {
        name: "objects",
        about: "memory that compaction of objects saves, by the figures of CoRM",
        targets: objects::TARGETS,
        options: &[ONLY, MESH],
        run: objects::run,
    },
    Bench {
        name: "packing",
        about: "use of a pool by jobs that swap, with memory allocated in advance or at eviction; \
            simulated with the real allocator",
        targets: packing::TARGETS,
        options: &[],
        run: packing::run,
    },
];

fn main() -> ExitCode {
    aquifer::prepare();
    aquifer::finish(run(&ResearchArgs::parse()).map_err(Into::into))
}

/// Runs a bench, prints its report, and writes the JSON and pictures.
///
/// # Errors
/// If there is no such bench, it does not have a given option, or it could not measure.
fn run(args: &ResearchArgs) -> Result<ExitCode, BenchError> {
    if args.name == "list" {
        say!("{}", BENCHES.to_text());
        return Ok(ExitCode::SUCCESS);
    }
    let bench = BENCHES.select(&args.name, args.options())?;
    if let Some(play) = args.play {
        say_line!("{}", objects::play(play)?);
        return Ok(ExitCode::SUCCESS);
    }
    interrupt::install();
    interrupt::outcome(measure(bench, args))
}

fn measure(bench: &Bench<ResearchArgs>, args: &ResearchArgs) -> Result<ExitCode, BenchError> {
    let report = (bench.run)(args)?;
    report.publish(BENCHES.command, args.json.as_deref(), args.out.as_deref())?;
    Ok(ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn make_runs_every_bench_that_is_listed() {
        let list = BENCHES.to_text();
        assert_eq!(list.lines().count(), ALL.len());
        assert!(list.lines().all(|line| line.contains("targets: ")), "{list}");
        let makefile = include_str!("../../../../Makefile");
        let run_by_make = makefile.lines().find_map(|line| line.strip_prefix("RESEARCH := ")).unwrap();
        let names: Vec<&str> = ALL.iter().map(|bench| bench.name).collect();
        assert_eq!(run_by_make.split(' ').collect::<Vec<_>>(), names);
    }

    #[test]
    fn errors_name_the_command() {
        let args = |words: &[&str]| ResearchArgs::parse_from([&["aquifer-research"], words].concat());
        let error = run(&args(&["pack"])).unwrap_err().to_string();
        assert!(error.contains("\"pack\"") && error.contains("`aquifer-research list`"), "{error}");
        let error = run(&args(&["packing", "--only", "17"])).unwrap_err().to_string();
        assert!(error.contains("`aquifer-research objects` has it"), "{error}");
        let error = run(&args(&["objects", "--only", "9"])).unwrap_err().to_string();
        assert!(error.contains("\"9\"") && error.contains("17"), "{error}");
    }
}
