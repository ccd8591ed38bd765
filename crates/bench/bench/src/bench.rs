//! `aquifer bench`: measures Aquifer beside its peers and lower bounds, in one run, on one machine.
//!
//! Machines are noisy, so a bench measures all compared systems in each round, takes ratios within
//! one round, and reports their spread over the rounds. A missed target is printed as missed. The
//! command fails only if something could not be measured, or data were wrong.

mod alloc;
mod apps;
mod cache;
mod eviction;
pub mod fabric;
mod failover;
mod faults;
mod kv;
mod malloc;
mod migration;
mod objects;
mod page_cache;
mod restart;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use aquifer::Fabric;
use aquifer::say::say;
pub use aquifer_bench::BenchError;
use aquifer_bench::support::benches::{Bench, BenchList};
use aquifer_bench::support::interrupt;
use clap::Args;

/// Arguments of `aquifer bench`.
#[derive(Args, Clone, Debug)]
pub struct BenchArgs {
    /// The bench; `list` lists all
    pub name: String,
    /// Use less memory and fewer rounds: takes less than a minute, with less reliable results
    #[arg(long)]
    pub quick: bool,
    /// Write the report as JSON to this file
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Draw pictures as SVG into this folder
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,
    /// Fabric between agent and nodes, for `bench faults` and `bench restart` [default: shm], and
    /// `bench eviction` and `bench failover` [default: tcp]
    #[arg(long, value_name = "FABRIC")]
    pub fabric: Option<Fabric>,
    /// Trace for `bench alloc` to replay: lines MICROSECONDS SIZE_CLASS, where class k has 4
    /// KiB·2^k
    #[arg(long, value_name = "FILE")]
    pub trace: Option<PathBuf>,
    /// For `bench apps`, measure only programs with this in their names, such as postgres; for
    /// `bench objects`, only this figure, such as 11; for `bench cache`, only this part: requests,
    /// threads, memory, hits, moves, or pool; for `bench page-cache`: sizes, working-sets, runs, or
    /// squeeze; for `bench eviction`: withdrawal, or full-pool
    #[arg(long, value_name = "NAME")]
    pub only: Option<String>,
    /// For `bench apps`, measure only with this percentage of a program's memory
    #[arg(long, value_name = "PERCENT", value_parser = clap::value_parser!(u64).range(1..=100))]
    pub fit: Option<u64>,
    /// For `bench faults`, measure the processes of one run that are together over its limit
    #[arg(long)]
    pub processes: bool,
    /// For `bench cache`, the program of pogocache, as a peer
    #[arg(long, value_name = "PROGRAM")]
    pub pogocache: Option<PathBuf>,
    /// Be the serving process of `bench fabric` or `bench alloc`, at this path, or one of `bench
    /// migration`, as this file says
    #[arg(long, hide = true)]
    pub serve_at: Option<PathBuf>,
}

const FABRIC: &str = "--fabric";
const TRACE: &str = "--trace";
const ONLY: &str = "--only";
const FIT: &str = "--fit";
const PROCESSES: &str = "--processes";
const POGOCACHE: &str = "--pogocache";

impl BenchArgs {
    /// The given options, of those that only some benches have.
    fn options(&self) -> impl Iterator<Item = &'static str> {
        let given = [
            (FABRIC, self.fabric.is_some()),
            (TRACE, self.trace.is_some()),
            (ONLY, self.only.is_some()),
            (FIT, self.fit.is_some()),
            (PROCESSES, self.processes),
            (POGOCACHE, self.pogocache.is_some()),
        ];
        given.into_iter().filter(|(_, is_given)| *is_given).map(|(option, _)| option)
    }
}

/// Main function of a serving process: serves at a path until the process is ended.
type Serve = fn(&Path) -> Result<(), BenchError>;

/// The benches that have serving processes.
const SERVING: [(&str, Serve); 3] =
    [("alloc", alloc::serve_at), ("fabric", fabric::serve_at), ("migration", migration::serve_at)];

const BENCHES: BenchList<BenchArgs> = BenchList { command: "aquifer bench", benches: &ALL };

const ALL: [Bench<BenchArgs>; 13] = [
    Bench {
        name: "alloc",
        about: "allocation of extents over shared memory and over TCP, beside RPC and a one-sided array",
        targets: alloc::TARGETS,
        options: &[TRACE],
        run: alloc::run,
    },
    Bench {
        name: "apps",
        about: "redis, memcached, PostgreSQL and models with a part of their memory, on the pool and on swap",
        targets: apps::TARGETS,
        options: &[ONLY, FIT],
        run: apps::run,
    },
    Bench {
        name: "cache",
        about: "requests, memory and hit ratio of `aquifer cache`, beside memcached",
        targets: cache::TARGETS,
        options: &[ONLY, POGOCACHE],
        run: cache::run,
    },
    Bench {
        name: "eviction",
        about: "speed of a program while a memory node is emptied, and in a full pool with a disk",
        targets: eviction::TARGETS,
        options: &[FABRIC, ONLY],
        run: eviction::run,
    },
    Bench {
        name: "failover",
        about: "pauses of programs with replicas when a memory node is killed or stopped",
        targets: failover::TARGETS,
        options: &[FABRIC],
        run: failover::run,
    },
    Bench {
        name: "faults",
        about: "page faults on the pool, beside kernel swap and a bare userfaultfd",
        targets: faults::TARGETS,
        options: &[FABRIC, PROCESSES],
        run: faults::run,
    },
    Bench {
        name: "fabric",
        about: "shared-memory READ, WRITE, atomics and messages, beside memcpy and bare atomics",
        targets: fabric::TARGETS,
        options: &[],
        run: fabric::run,
    },
    Bench {
        name: "kv",
        about: "gets and YCSB of a key-value store in remote memory, beside redis and memcached",
        targets: kv::TARGETS,
        options: &[],
        run: kv::run,
    },
    Bench {
        name: "malloc",
        about: "malloc benchmarks on the paged allocator, beside glibc on the pool and on kernel swap",
        targets: malloc::TARGETS,
        options: &[],
        run: malloc::run,
    },
    Bench {
        name: "migration",
        about: "segments that move between two agents, and a map that is used meanwhile, by Figure 4 of RaMP",
        targets: migration::TARGETS,
        options: &[],
        run: migration::run,
    },
    Bench {
        name: "objects",
        about: "calls and direct reads of objects, also while they are compacted, by the figures of CoRM",
        targets: objects::TARGETS,
        options: &[ONLY],
        run: objects::run,
    },
    Bench {
        name: "page-cache",
        about: "idle memory of the host: sizes of the page cache, working sets, many runs, and its return",
        targets: page_cache::TARGETS,
        options: &[ONLY],
        run: page_cache::run,
    },
    Bench {
        name: "restart",
        about: "pauses of programs on the pool when their agent is killed and another one is started",
        targets: restart::TARGETS,
        options: &[FABRIC],
        run: restart::run,
    },
];

/// Runs a bench, prints its report, and writes the JSON and pictures.
///
/// # Errors
/// If there is no such bench, it does not have a given option, or it could not measure.
pub fn run(args: &BenchArgs) -> Result<ExitCode, BenchError> {
    if args.name == "list" {
        say!("{}", BENCHES.to_text());
        return Ok(ExitCode::SUCCESS);
    }
    let bench = BENCHES.select(&args.name, args.options())?;
    let serve_at = SERVING.iter().find(|(name, _)| *name == bench.name);
    if let (Some(path), Some((_, serve_at))) = (&args.serve_at, serve_at) {
        serve_at(path)?;
        return Ok(ExitCode::SUCCESS);
    }
    interrupt::install();
    interrupt::outcome(measure(bench, args))
}

fn measure(bench: &Bench<BenchArgs>, args: &BenchArgs) -> Result<ExitCode, BenchError> {
    let report = (bench.run)(args)?;
    report.publish(BENCHES.command, args.json.as_deref(), args.out.as_deref())?;
    Ok(ExitCode::SUCCESS)
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
            processes: false,
            pogocache: None,
            serve_at: None,
        }
    }

    #[test]
    fn every_bench_is_listed_with_its_targets() {
        let list = BENCHES.to_text();
        assert_eq!(list.lines().count(), ALL.len());
        let makefile = include_str!("../../../../Makefile");
        let run_by_make = makefile.lines().find_map(|line| line.strip_prefix("BENCHES := ")).unwrap();
        for bench in &ALL {
            let is_run = run_by_make.split([' ', '\'']).any(|name| name == bench.name);
            assert!(is_run, "`make bench` does not run {}", bench.name);
        }
        assert!(list.lines().all(|line| line.contains("targets: ")), "{list}");
    }

    #[test]
    fn an_unknown_bench_is_refused_by_name() {
        let error = run(&args("fault", None)).unwrap_err().to_string();
        assert!(error.contains("\"fault\"") && error.contains("bench list"), "{error}");
    }

    #[test]
    fn a_bench_without_the_option_fabric_refuses_it() {
        let error = run(&args("fabric", Some(Fabric::Tcp))).unwrap_err().to_string();
        assert!(error.contains("bench fabric") && error.contains("--fabric"), "{error}");
    }

    #[test]
    fn a_bench_without_the_option_trace_refuses_it() {
        let args = BenchArgs { trace: Some("x.trace".into()), ..args("fabric", None) };
        let error = run(&args).unwrap_err().to_string();
        assert!(error.contains("bench fabric") && error.contains("--trace"), "{error}");
    }

    #[test]
    fn a_bench_without_the_options_only_and_fit_refuses_them() {
        for (chosen, flag) in [
            (BenchArgs { only: Some("redis".into()), ..args("fabric", None) }, "--only"),
            (BenchArgs { fit: Some(25), ..args("fabric", None) }, "--fit"),
        ] {
            let error = run(&chosen).unwrap_err().to_string();
            assert!(error.contains("bench fabric") && error.contains(flag), "{error}");
        }
    }
}
