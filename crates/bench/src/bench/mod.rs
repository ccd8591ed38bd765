//! `aquifer bench`: measures Aquifer beside its peers and lower bounds, in one run, on one machine.
//!
//! Machines are noisy, so a bench runs the compared ways in alternation, takes ratios within one
//! round, and reports their spread over the rounds. A missed target is printed as missed. The
//! command fails only if something could not be measured, or data were wrong.

mod alloc;
mod apps;
mod cache;
mod error;
pub mod fabric;
mod failover;
mod faults;
mod kv;
mod malloc;
mod migration;
mod objects;
mod packing;
mod restart;
pub mod support;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Args;

use aquifer::say::{say, say_line};
pub use error::BenchError;
use support::interrupt;
use support::report::Report;

use aquifer::Fabric;

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
    /// `bench failover` [default: tcp]
    #[arg(long, value_name = "FABRIC")]
    pub fabric: Option<Fabric>,
    /// Trace for `bench alloc` to replay: lines MICROSECONDS SIZE_CLASS, where class k has 4
    /// KiB·2^k
    #[arg(long, value_name = "FILE")]
    pub trace: Option<PathBuf>,
    /// For `bench apps`, measure only programs with this in their names, such as postgres; for
    /// `bench objects`, only this figure, such as 17; for `bench cache`, only this part: requests,
    /// threads, memory, hits, moves, or pool
    #[arg(long, value_name = "NAME")]
    pub only: Option<String>,
    /// For `bench apps`, measure only with this percentage of a program's memory
    #[arg(long, value_name = "PERCENT", value_parser = clap::value_parser!(u64).range(1..=100))]
    pub fit: Option<u64>,
    /// For `bench faults`, measure the processes of one run that are together over its limit
    #[arg(long)]
    pub processes: bool,
    /// For figures 18 and 19 of `bench objects`, the library of Mesh (libmesh.so), or of another
    /// malloc, as a peer
    #[arg(long, value_name = "LIBRARY")]
    pub mesh: Option<PathBuf>,
    /// For `bench cache`, the program of pogocache, as a peer
    #[arg(long, value_name = "PROGRAM")]
    pub pogocache: Option<PathBuf>,
    /// Be the process of `bench objects` that plays a trace of Redis
    #[arg(long, hide = true)]
    pub play: Option<objects::Play>,
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
const MESH: &str = "--mesh";
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
            (MESH, self.mesh.is_some()),
            (POGOCACHE, self.pogocache.is_some()),
        ];
        given.into_iter().filter(|(_, is_given)| *is_given).map(|(option, _)| option)
    }
}

/// Main function of a serving process: serves at a path until the process is ended.
type Serve = fn(&Path) -> Result<(), BenchError>;

/// A bench in the list.
struct Bench {
    name: &'static str,
    about: &'static str,
    targets: &'static str,
    /// The options it has, of those that only some benches have.
    options: &'static [&'static str],
    serve_at: Option<Serve>,
    run: fn(&BenchArgs) -> Result<Report, BenchError>,
}

const BENCHES: [Bench; 12] = [
    Bench {
        name: "alloc",
        about: "allocation of extents, beside RPC and a one-sided array: with a cost model of RDMA, over \
            TCP and over shared memory",
        targets: alloc::TARGETS,
        options: &[TRACE],
        serve_at: Some(alloc::serve_at),
        run: alloc::run,
    },
    Bench {
        name: "apps",
        about: "redis, PostgreSQL and k-means with a part of their memory, on the pool and on kernel swap",
        targets: apps::TARGETS,
        options: &[ONLY, FIT],
        serve_at: None,
        run: apps::run,
    },
    Bench {
        name: "cache",
        about: "requests, memory and hit ratio of `aquifer cache`, beside memcached",
        targets: cache::TARGETS,
        options: &[ONLY, POGOCACHE],
        serve_at: None,
        run: cache::run,
    },
    Bench {
        name: "failover",
        about: "pauses of programs with replicas when a memory node is killed or stopped",
        targets: failover::TARGETS,
        options: &[FABRIC],
        serve_at: None,
        run: failover::run,
    },
    Bench {
        name: "faults",
        about: "page faults on the pool, beside kernel swap and a bare userfaultfd",
        targets: faults::TARGETS,
        options: &[FABRIC, PROCESSES],
        serve_at: None,
        run: faults::run,
    },
    Bench {
        name: "fabric",
        about: "shared-memory READ, WRITE, atomics and messages, beside memcpy and bare atomics",
        targets: fabric::TARGETS,
        options: &[],
        serve_at: Some(fabric::serve_at),
        run: fabric::run,
    },
    Bench {
        name: "kv",
        about: "gets and YCSB of a key-value store in remote memory, beside redis and memcached",
        targets: kv::TARGETS,
        options: &[],
        serve_at: None,
        run: kv::run,
    },
    Bench {
        name: "malloc",
        about: "malloc benchmarks on the paged allocator, beside glibc on the pool and on kernel swap",
        targets: malloc::TARGETS,
        options: &[],
        serve_at: None,
        run: malloc::run,
    },
    Bench {
        name: "migration",
        about: "segments that move between two agents, and a map that is used meanwhile, by Figure 4 of RAMP",
        targets: migration::TARGETS,
        options: &[],
        serve_at: Some(migration::serve_at),
        run: migration::run,
    },
    Bench {
        name: "objects",
        about: "memory that compaction of objects saves, by the figures of CoRM",
        targets: objects::TARGETS,
        options: &[ONLY, MESH],
        serve_at: None,
        run: objects::run,
    },
    Bench {
        name: "packing",
        about: "use of a pool by jobs that swap, with memory allocated in advance or at eviction; \
            simulated with the real allocator",
        targets: packing::TARGETS,
        options: &[],
        serve_at: None,
        run: packing::run,
    },
    Bench {
        name: "restart",
        about: "pauses of programs on the pool when their agent is killed and another one is started",
        targets: restart::TARGETS,
        options: &[FABRIC],
        serve_at: None,
        run: restart::run,
    },
];

/// Runs a bench, prints its report, and writes the JSON and pictures.
///
/// # Errors
/// If there is no such bench, it does not have a given option, or it could not measure.
pub fn run(args: &BenchArgs) -> Result<ExitCode, BenchError> {
    if args.name == "list" {
        say!("{}", list());
        return Ok(ExitCode::SUCCESS);
    }
    let bench = BENCHES
        .iter()
        .find(|bench| bench.name == args.name)
        .ok_or_else(|| BenchError::NoSuchBench { name: args.name.clone() })?;
    if let Some(option) = args.options().find(|option| !bench.options.contains(option)) {
        let benches = BENCHES.iter().filter(|other| other.options.contains(&option));
        let benches = benches.map(|other| format!("`aquifer bench {}`", other.name)).collect();
        return Err(BenchError::NoSuchOption { name: bench.name, option, benches });
    }
    if let (Some(path), Some(serve_at)) = (&args.serve_at, bench.serve_at) {
        serve_at(path)?;
        return Ok(ExitCode::SUCCESS);
    }
    if let Some(play) = args.play {
        say_line!("{}", objects::play(play)?);
        return Ok(ExitCode::SUCCESS);
    }
    interrupt::install();
    interrupt::outcome(measure(bench, args))
}

fn measure(bench: &Bench, args: &BenchArgs) -> Result<ExitCode, BenchError> {
    let report = (bench.run)(args)?;
    say!("{}", report.to_text());
    if let Some(path) = &args.json {
        let text = serde_json::to_string_pretty(&report).expect("numbers and texts can be written");
        std::fs::write(path, text + "\n").map_err(BenchError::io("write", path))?;
        say_line!("report: {}", path.display());
    }
    if let Some(folder) = &args.out {
        std::fs::create_dir_all(folder).map_err(BenchError::io("create folder", folder))?;
        let path = folder.join(format!("{}.svg", report.bench));
        report.draw(&path)?;
        say_line!("picture: {}", path.display());
    }
    Ok(ExitCode::SUCCESS)
}

fn list() -> String {
    let lines = BENCHES.iter().map(|bench| format!("{:9} {}; {}\n", bench.name, bench.about, bench.targets));
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
            processes: false,
            mesh: None,
            pogocache: None,
            play: None,
            serve_at: None,
        }
    }

    #[test]
    fn every_bench_is_listed_with_its_targets() {
        let list = list();
        assert_eq!(list.lines().count(), BENCHES.len());
        let makefile = include_str!("../../../../Makefile");
        let run_by_make = makefile.lines().find_map(|line| line.strip_prefix("BENCHES := ")).unwrap();
        for bench in &BENCHES {
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
