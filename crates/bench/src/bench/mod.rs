//! `aquifer bench`: measurements beside their peers and floors, in one run, on one machine.
//!
//! Machines are noisy, so a bench runs what it compares in alternation, takes ratios within one round, and
//! says how far they spread over the rounds. A missed target is printed as missed, and is no failure of the
//! command: it ends with 0 when everything could be measured and every page was right.

mod alloc;
mod apps;
mod dilemma;
mod error;
pub mod fabric;
mod faults;
mod malloc;
mod packing;
pub mod support;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Args;

use aquifer::say::{say, say_line};
pub use error::BenchError;
use support::interrupt;
use support::report::Report;

use aquifer::Fabric;

/// The arguments of `aquifer bench`.
#[derive(Args, Clone, Debug)]
pub struct BenchArgs {
    /// Which bench; `list` names them all
    pub name: String,
    /// Less memory and fewer rounds: under a minute, and less to be trusted
    #[arg(long)]
    pub quick: bool,
    /// Write all figures to this file
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Draw pictures into this folder
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,
    /// How memory nodes are reached, in `bench faults` [default: shm] and `bench dilemma` [default: both ways]
    #[arg(long, value_name = "FABRIC")]
    pub fabric: Option<Fabric>,
    /// A trace for `bench alloc` to be replayed: lines MICROSECONDS SIZE_CLASS (class k is 4 KiB·2^k)
    #[arg(long, value_name = "FILE")]
    pub trace: Option<PathBuf>,
    /// Only programs of `bench apps` whose name contains this, as in `--only postgres`; only blocks of this size in `bench dilemma`, beside the
    /// largest, as in `--only "4 KiB"`
    #[arg(long, value_name = "NAME")]
    pub only: Option<String>,
    /// Only with so many per cent of a program's memory, in `bench apps`
    #[arg(long, value_name = "PERCENT", value_parser = clap::value_parser!(u64).range(1..=100))]
    pub fit: Option<u64>,
    /// Where the other process of `bench fabric` or `bench alloc` listens; it is that process, if this is given
    #[arg(long, hide = true)]
    pub serve_at: Option<PathBuf>,
}

const FABRIC: &str = "--fabric";
const TRACE: &str = "--trace";
const ONLY: &str = "--only";
const FIT: &str = "--fit";

impl BenchArgs {
    /// The flags that were given, of those that not every bench takes.
    fn flags(&self) -> impl Iterator<Item = &'static str> {
        let given = [
            (FABRIC, self.fabric.is_some()),
            (TRACE, self.trace.is_some()),
            (ONLY, self.only.is_some()),
            (FIT, self.fit.is_some()),
        ];
        given.into_iter().filter(|(_, is_given)| *is_given).map(|(flag, _)| flag)
    }
}

/// The other process of a bench: serves at a path, without end.
type Serve = fn(&Path) -> Result<(), BenchError>;

struct Bench {
    name: &'static str,
    about: &'static str,
    targets: &'static str,
    /// Flags that not every bench has a use for.
    takes: &'static [&'static str],
    serve_at: Option<Serve>,
    run: fn(&BenchArgs) -> Result<Report, BenchError>,
}

const BENCHES: [Bench; 7] = [
    Bench {
        name: "alloc",
        about: "taking extents, beside RPC and a one-sided array: under a cost model of RDMA, over TCP and shared memory",
        targets: alloc::TARGETS,
        takes: &[TRACE],
        serve_at: Some(alloc::serve_at),
        run: alloc::run,
    },
    Bench {
        name: "apps",
        about: "redis, PostgreSQL and k-means in a part of their memory, on the pool and on kernel swap",
        targets: apps::TARGETS,
        takes: &[ONLY, FIT],
        serve_at: None,
        run: apps::run,
    },
    Bench {
        name: "dilemma",
        about: "throughput and memory held against the size of blocks, for a load of page writes and frees",
        targets: dilemma::TARGETS,
        takes: &[FABRIC, ONLY],
        serve_at: None,
        run: dilemma::run,
    },
    Bench {
        name: "faults",
        about: "a program's memory on the pool, beside kernel swap and a bare userfaultfd",
        targets: faults::TARGETS,
        takes: &[FABRIC],
        serve_at: None,
        run: faults::run,
    },
    Bench {
        name: "fabric",
        about: "shared-memory READ, WRITE, atomics and messages, beside memcpy and bare atomics",
        targets: fabric::TARGETS,
        takes: &[],
        serve_at: Some(fabric::serve_at),
        run: fabric::run,
    },
    Bench {
        name: "malloc",
        about: "the usual malloc benchmarks on the paged allocator, beside glibc's on the pool and on kernel swap",
        targets: malloc::TARGETS,
        takes: &[],
        serve_at: None,
        run: malloc::run,
    },
    Bench {
        name: "packing",
        about: "how well jobs that swap use a pool, with memory mapped beforehand and taken as pages leave; simulated over the real allocator",
        targets: packing::TARGETS,
        takes: &[],
        serve_at: None,
        run: packing::run,
    },
];

/// Runs a bench, prints its report, and writes what was asked for.
///
/// # Errors
/// If there is no such bench, or it could not measure what it should.
pub fn run(args: &BenchArgs) -> Result<ExitCode, BenchError> {
    if args.name == "list" {
        say!("{}", list());
        return Ok(ExitCode::SUCCESS);
    }
    let bench = BENCHES
        .iter()
        .find(|bench| bench.name == args.name)
        .ok_or_else(|| BenchError::NoSuchBench { name: args.name.clone() })?;
    if let Some(flag) = args.flags().find(|flag| !bench.takes.contains(flag)) {
        let takers = BENCHES.iter().filter(|other| other.takes.contains(&flag));
        let takers = takers.map(|other| format!("`aquifer bench {}`", other.name)).collect();
        return Err(BenchError::NotTaken { name: bench.name, flag, takers });
    }
    if let (Some(path), Some(serve_at)) = (&args.serve_at, bench.serve_at) {
        serve_at(path)?;
        return Ok(ExitCode::SUCCESS);
    }
    interrupt::install();
    interrupt::outcome(measure(bench, args))
}

fn measure(bench: &Bench, args: &BenchArgs) -> Result<ExitCode, BenchError> {
    let report = (bench.run)(args)?;
    say!("{}", report.to_text());
    if let Some(path) = &args.json {
        let text = serde_json::to_string_pretty(&report).expect("figures can be written");
        std::fs::write(path, text + "\n").map_err(BenchError::io("write", path))?;
        say_line!("figures: {}", path.display());
    }
    if let Some(folder) = &args.out {
        std::fs::create_dir_all(folder).map_err(BenchError::io("create the folder", folder))?;
        let path = folder.join(format!("{}.svg", report.bench));
        report.draw(&path)?;
        say_line!("picture: {}", path.display());
    }
    Ok(ExitCode::SUCCESS)
}

fn list() -> String {
    let lines = BENCHES.iter().map(|bench| format!("{:8} {}; {}\n", bench.name, bench.about, bench.targets));
    lines.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(name: &str, fabric: Option<Fabric>) -> BenchArgs {
        BenchArgs {
            name: name.into(),
            quick: true,
            json: None,
            out: None,
            fabric,
            trace: None,
            only: None,
            fit: None,
            serve_at: None,
        }
    }

    #[test]
    fn every_bench_is_listed_with_its_targets() {
        let list = list();
        assert_eq!(list.lines().count(), BENCHES.len());
        assert!(list.lines().all(|line| line.contains("targets: ")), "{list}");
    }

    #[test]
    fn an_unknown_bench_is_refused_by_name() {
        let error = run(&args("fault", None)).unwrap_err().to_string();
        assert!(error.contains("\"fault\"") && error.contains("bench list"), "{error}");
    }

    #[test]
    fn a_bench_of_all_fabrics_takes_none() {
        let error = run(&args("fabric", Some(Fabric::Tcp))).unwrap_err().to_string();
        assert!(error.contains("bench fabric") && error.contains("--fabric"), "{error}");
    }

    #[test]
    fn only_one_bench_takes_a_trace() {
        let args = BenchArgs { trace: Some("x.trace".into()), ..args("fabric", None) };
        let error = run(&args).unwrap_err().to_string();
        assert!(error.contains("bench fabric") && error.contains("--trace"), "{error}");
    }

    #[test]
    fn what_there_is_nothing_to_choose_from_is_refused() {
        for (chosen, flag) in [
            (BenchArgs { only: Some("redis".into()), ..args("fabric", None) }, "--only"),
            (BenchArgs { fit: Some(25), ..args("fabric", None) }, "--fit"),
        ] {
            let error = run(&chosen).unwrap_err().to_string();
            assert!(error.contains("bench fabric") && error.contains(flag), "{error}");
        }
    }
}
