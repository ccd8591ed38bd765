//! `aquifer bench faults --processes`: the processes of one run, together over its limit.

use std::collections::BTreeMap;

use aquifer::Fabric;
use aquifer_bench::support::bytes::{MIB, float, show_bytes};
use aquifer_bench::support::cluster::{self, Cluster};
use aquifer_bench::support::folder;
use aquifer_bench::support::processbench::{self, Figures, Load};
use aquifer_bench::support::programs;
use aquifer_bench::support::progress;
use aquifer_bench::support::report::{Column, Report, Row, Table, Target};
use aquifer_bench::support::spread::Spread;

use crate::bench::{BenchArgs, BenchError};

/// Numbers of processes. The others are compared with the first.
const PROCESSES: [u64; 4] = [1, 8, 32, 80];
const LIMIT_BYTES: u64 = 64 * MIB;
/// The memory of all processes together.
const BYTES: u64 = 192 * MIB;
/// Longest wait for each process that may wait at the same time.
const WAIT_MS_MAX: f64 = 100.0;

/// Results with one number of processes, by round.
#[derive(Debug, Default)]
struct Rounds {
    faults_per_s: Vec<f64>,
    touches_per_s: Vec<f64>,
    p50_us: Vec<f64>,
    p999_us: Vec<f64>,
    longest_ms: Vec<f64>,
}

impl Rounds {
    fn add(&mut self, figures: &Figures) {
        self.faults_per_s.push(float(figures.faults.count) / figures.seconds);
        self.touches_per_s.push(float(figures.touches) / figures.seconds);
        self.p50_us.push(figures.faults.p50_us);
        self.p999_us.push(figures.faults.p999_us);
        self.longest_ms.push(figures.longest_us / 1e3);
    }

    fn row(&self, processes: u64) -> Row {
        let figures = [
            ("faults/s", &self.faults_per_s),
            ("touches/s", &self.touches_per_s),
            ("p50 µs", &self.p50_us),
            ("p999 µs", &self.p999_us),
            ("longest ms", &self.longest_ms),
        ];
        let figures: BTreeMap<_, _> =
            figures.iter().filter_map(|(name, values)| Some((*name, Spread::of(values)?))).collect();
        Row { name: format!("{processes} processes"), figures }
    }
}

/// Runs the bench.
///
/// # Errors
/// If something could not be measured or a page was wrong.
pub fn run(args: &BenchArgs) -> Result<Report, BenchError> {
    let (rounds, seconds) = if args.quick { (1, 2) } else { (5, 10) };
    let fabric = args.fabric.unwrap_or(Fabric::Shm);
    let folder = folder::temporary()?;
    let programs = programs::build(folder.path())?;
    let cluster = Cluster::up(BYTES * 3, fabric, None)?;
    let bar = progress::bar(rounds * PROCESSES.len());
    let mut all: BTreeMap<u64, Rounds> = BTreeMap::new();
    for round in 1..=rounds {
        for processes in PROCESSES {
            bar.set_message(format!("round {round}: {processes} processes"));
            let figures = {
                let load = Load {
                    processes,
                    bytes: BYTES,
                    limit_bytes: LIMIT_BYTES,
                    seconds,
                    is_sequential: false,
                    replicas: 1,
                    backup: "never",
                };
                processbench::run(&cluster, &programs.processbench, folder.path(), load)?
            };
            all.entry(processes).or_default().add(&figures);
            bar.inc(1);
        }
    }
    bar.finish_and_clear();
    let mut report = Report::new("faults-processes", args.quick);
    report.notes = vec![
        format!(
            "processes of one run write to random pages of their parts of {}, with a limit of {} for all; {} \
             rounds of {seconds} s in alternation, every page verified",
            show_bytes(BYTES),
            show_bytes(LIMIT_BYTES),
            rounds
        ),
        format!("memory nodes of the pool: {}, over {}", cluster::nodes(), fabric.name()),
        "faults are touches that took over 1 µs".into(),
    ];
    fill(&mut report, &all);
    Ok(report)
}

fn fill(report: &mut Report, all: &BTreeMap<u64, Rounds>) {
    report.tables.push(Table {
        title: "processes of one run, over its limit".into(),
        columns: ["faults/s", "touches/s", "p50 µs", "p999 µs", "longest ms"].map(Column::full).to_vec(),
        pictured: Some("faults/s"),
        ratio: None,
        rows: all.iter().map(|(processes, rounds)| rounds.row(*processes)).collect(),
    });
    let one = &all[&PROCESSES[0]].faults_per_s;
    for (processes, rounds) in all.iter().skip(1) {
        let rate = Spread::of_ratios(&rounds.faults_per_s, one);
        let wait = Spread::of(&rounds.longest_ms);
        let name = |what| format!("{processes} processes: {what}");
        report.targets.extend(
            [
                rate.map(|value| Target {
                    name: name("faults/s ÷ those of one process"),
                    value,
                    bound: 1.0,
                    at_most: false,
                }),
                wait.map(|value| Target {
                    name: name("longest wait in ms"),
                    value,
                    bound: WAIT_MS_MAX * float(*processes),
                    at_most: true,
                }),
            ]
            .into_iter()
            .flatten(),
        );
    }
}
