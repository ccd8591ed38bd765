//! `aquifer bench restart`: the agent of running programs is killed, and `aquifer up` starts
//! another.
//!
//! The result is the longest wait of a program: each access is timed, and the longest one counts.

use std::collections::BTreeMap;
use std::time::Duration;

use aquifer::Fabric;
use aquifer_bench::support::bytes::{MIB, show_bytes};
use aquifer_bench::support::cluster::{self, Cluster};
use aquifer_bench::support::folder;
use aquifer_bench::support::processbench::{self, Load};
use aquifer_bench::support::programs;
use aquifer_bench::support::progress;
use aquifer_bench::support::report::{Column, Report, Row, Table, Target};
use aquifer_bench::support::spread::Spread;

use super::{BenchArgs, BenchError};

/// Targets, for `aquifer bench list`.
pub const TARGETS: &str = "targets: no program waits longer than 1 s";

const PROCESSES: [u64; 3] = [1, 16, 64];
const LIMIT_BYTES: u64 = 64 * MIB;
const BYTES: u64 = 192 * MIB;
const SECONDS: u64 = 6;
/// Time from the start of the program, in which it fills its memory, to the kill of the agent.
const KILL_AFTER: Duration = Duration::from_secs(3);
const WAIT_MS_MAX: f64 = 1000.0;

/// Longest accesses in ms, by round.
#[derive(Debug, Default)]
struct Rounds {
    killed: Vec<f64>,
    plain: Vec<f64>,
}

/// Runs the bench.
///
/// # Errors
/// If something could not be measured or a page was wrong.
pub fn run(args: &BenchArgs) -> Result<Report, BenchError> {
    let rounds = if args.quick { 1 } else { 5 };
    let fabric = args.fabric.unwrap_or(Fabric::Shm);
    let folder = folder::temporary()?;
    let programs = programs::build(folder.path())?;
    let cluster = Cluster::up(BYTES * 3, fabric, None)?;
    let bar = progress::bar(rounds * PROCESSES.len());
    let mut all: BTreeMap<u64, Rounds> = BTreeMap::new();
    for round in 1..=rounds {
        for processes in PROCESSES {
            bar.set_message(format!("round {round}: {processes} processes"));
            let load = Load {
                processes,
                bytes: BYTES,
                limit_bytes: LIMIT_BYTES,
                seconds: SECONDS,
                is_sequential: false,
                replicas: 1,
                backup: "never",
            };
            let measure = || processbench::run(&cluster, &programs.processbench, folder.path(), load);
            let plain = measure()?;
            let killed = std::thread::scope(|scope| {
                let restart = scope.spawn(|| {
                    std::thread::sleep(KILL_AFTER);
                    cluster.restart_agent()
                });
                let figures = measure();
                restart.join().expect("it does not panic").and(figures)
            })?;
            let rounds = all.entry(processes).or_default();
            rounds.plain.push(plain.longest_us / 1e3);
            rounds.killed.push(killed.longest_us / 1e3);
            bar.inc(1);
        }
    }
    bar.finish_and_clear();
    let mut report = Report::new("restart", args.quick);
    report.notes = vec![
        format!(
            "processes of one run write to random pages of their parts of {}, with a limit of {} for all, \
             for {SECONDS} s; after {} s the agent is killed and aquifer up starts another; {rounds} rounds, \
             every page verified",
            show_bytes(BYTES),
            show_bytes(LIMIT_BYTES),
            KILL_AFTER.as_secs()
        ),
        format!("memory nodes of the pool: {}, over {}", cluster::nodes(), fabric.name()),
    ];
    fill(&mut report, &all);
    Ok(report)
}

fn fill(report: &mut Report, all: &BTreeMap<u64, Rounds>) {
    let row = |name: String, values: &[f64]| Row {
        name,
        figures: Spread::of(values).map(|spread| ("longest ms", spread)).into_iter().collect(),
    };
    let rows = all.iter().flat_map(|(processes, rounds)| {
        [
            row(format!("{processes} processes, agent killed"), &rounds.killed),
            row(format!("{processes} processes, agent lives"), &rounds.plain),
        ]
    });
    report.tables.push(Table {
        title: "longest access of a program".into(),
        columns: vec![Column::full("longest ms")],
        pictured: Some("longest ms"),
        ratio: None,
        rows: rows.collect(),
    });
    report.targets.extend(all.iter().filter_map(|(processes, rounds)| {
        let value = Spread::of(&rounds.killed)?;
        let name = format!("{processes} processes: longest access in ms");
        Some(Target { name, value, bound: WAIT_MS_MAX, at_most: true })
    }));
}
