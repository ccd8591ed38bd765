//! `aquifer bench failover`: a memory node with kept memory is killed or stopped while programs
//! write to pages that have two replicas.
//!
//! The result is the longest wait of a program: each access is timed, and the longest one counts.

use std::collections::BTreeMap;
use std::time::Duration;

use aquifer::Fabric;
use aquifer_bench::support::bytes::{MIB, show_bytes};
use aquifer_bench::support::cluster::Cluster;
use aquifer_bench::support::folder;
use aquifer_bench::support::processbench::{self, Load};
use aquifer_bench::support::programs;
use aquifer_bench::support::progress;
use aquifer_bench::support::report::{Column, Report, Row, Table, Target};
use aquifer_bench::support::spread::Spread;
use rustix::process::Signal;

use super::{BenchArgs, BenchError};

/// Targets, for `aquifer bench list`.
pub const TARGETS: &str = "targets: no program waits longer than 100 ms";

const PROCESSES: [u64; 2] = [1, 16];
const NODES: u16 = 3;
const REPLICAS: u64 = 2;
/// The node that is killed or stopped.
const VICTIM: u16 = 2;
const LIMIT_BYTES: u64 = 64 * MIB;
const BYTES: u64 = 192 * MIB;
const SECONDS: u64 = 6;
/// Time from the start of the program, in which it fills its memory, to the fault of the node.
const FAULT_AFTER: Duration = Duration::from_secs(3);
const WAIT_MS_MAX: f64 = 100.0;

/// A fault of the node.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Fault {
    None,
    Killed,
    Stopped,
}

impl Fault {
    const ALL: [Self; 3] = [Self::None, Self::Killed, Self::Stopped];

    const fn describe(self) -> &'static str {
        match self {
            Self::None => "all nodes live",
            Self::Killed => "a node is killed",
            Self::Stopped => "a node is stopped",
        }
    }

    fn begin(self, cluster: &Cluster) -> Result<(), BenchError> {
        match self {
            Self::None => Ok(()),
            Self::Killed => cluster.signal_node(VICTIM, Signal::KILL),
            Self::Stopped => cluster.signal_node(VICTIM, Signal::STOP),
        }
    }

    fn end(self, cluster: &Cluster) -> Result<(), BenchError> {
        match self {
            Self::None => Ok(()),
            Self::Killed => cluster.start_missing(),
            Self::Stopped => cluster.signal_node(VICTIM, Signal::CONT),
        }
    }
}

/// Runs the bench.
///
/// # Errors
/// If something could not be measured or a page was wrong.
pub fn run(args: &BenchArgs) -> Result<Report, BenchError> {
    let rounds = if args.quick { 1 } else { 5 };
    let fabric = args.fabric.unwrap_or(Fabric::Tcp);
    let folder = folder::temporary()?;
    let programs = programs::build(folder.path())?;
    let cluster = Cluster::up_with_kept_memory(NODES, BYTES, fabric)?;
    let bar = progress::bar(rounds * PROCESSES.len() * Fault::ALL.len());
    let mut longest_ms: BTreeMap<(u64, Fault), Vec<f64>> = BTreeMap::new();
    for round in 1..=rounds {
        for processes in PROCESSES {
            for fault in Fault::ALL {
                bar.set_message(format!("round {round}: {processes} processes, {}", fault.describe()));
                let load = Load {
                    processes,
                    bytes: BYTES,
                    limit_bytes: LIMIT_BYTES,
                    seconds: SECONDS,
                    is_sequential: false,
                    replicas: REPLICAS,
                    backup: "never",
                };
                let figures = std::thread::scope(|scope| {
                    let faulty = scope.spawn(|| {
                        std::thread::sleep(FAULT_AFTER);
                        fault.begin(&cluster)
                    });
                    let figures = processbench::run(&cluster, &programs.processbench, folder.path(), load);
                    faulty.join().expect("it does not panic").and(figures)
                })?;
                fault.end(&cluster)?;
                longest_ms.entry((processes, fault)).or_default().push(figures.longest_us / 1e3);
                bar.inc(1);
            }
        }
    }
    bar.finish_and_clear();
    let mut report = Report::new("failover", args.quick);
    report.notes = vec![
        format!(
            "processes of one run write to random pages of their parts of {}, with a limit of {} for all and \
             {REPLICAS} replicas, for {SECONDS} s; after {} s one of {NODES} memory nodes is killed or \
             stopped, whose memory is kept for longer; {rounds} rounds, every page verified",
            show_bytes(BYTES),
            show_bytes(LIMIT_BYTES),
            FAULT_AFTER.as_secs()
        ),
        format!("memory nodes over {}", fabric.name()),
    ];
    fill(&mut report, &longest_ms);
    Ok(report)
}

fn fill(report: &mut Report, longest_ms: &BTreeMap<(u64, Fault), Vec<f64>>) {
    let rows = longest_ms.iter().map(|((processes, fault), values)| Row {
        name: format!("{processes} processes, {}", fault.describe()),
        figures: Spread::of(values).map(|spread| ("longest ms", spread)).into_iter().collect(),
    });
    report.tables.push(Table {
        title: "longest access of a program".into(),
        columns: vec![Column::full("longest ms")],
        pictured: Some("longest ms"),
        ratio: None,
        rows: rows.collect(),
    });
    let faulty = longest_ms.iter().filter(|((_, fault), _)| *fault != Fault::None);
    report.targets.extend(faulty.filter_map(|((processes, fault), values)| {
        let value = Spread::of(values)?;
        let name = format!("{processes} processes, {}: longest access in ms", fault.describe());
        Some(Target { name, value, bound: WAIT_MS_MAX, at_most: true })
    }));
}
