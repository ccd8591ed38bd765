//! Many runs at once, whose pages are in the page cache of one host.

use std::path::Path;

use aquifer::Fabric;
use aquifer_bench::support::bytes::{MIB, float, show_bytes};
use aquifer_bench::support::child::{self, Streams, Watched};
use aquifer_bench::support::cluster::Cluster;
use aquifer_bench::support::folder;
use aquifer_bench::support::programs::{self, Figures, Programs};
use aquifer_bench::support::progress;
use aquifer_bench::support::report::{Column, Report, Row, Table, Target};
use aquifer_bench::support::spread::Spread;

use crate::bench::BenchError;

/// Numbers of runs. The others are compared with the first.
const RUNS: [u64; 6] = [1, 2, 4, 8, 16, 32];
const LIMIT_BYTES: u64 = 8 * MIB;
/// Memory of each run.
const BYTES: u64 = 24 * MIB;

/// Measures how many pages a second all runs together read at random.
///
/// # Errors
/// If something cannot be measured, or a page is wrong.
pub fn measure(report: &mut Report, quick: bool) -> Result<(), BenchError> {
    let rounds = if quick { 1 } else { 3 };
    let folder = folder::temporary()?;
    let programs = programs::build(folder.path())?;
    let largest = RUNS[RUNS.len() - 1];
    let cluster = Cluster::up_with_cache(2 * largest * BYTES, Fabric::Tcp, None)?;
    let mut pages_per_s: Vec<Vec<f64>> = RUNS.iter().map(|_| Vec::new()).collect();
    let mut p99_us = pages_per_s.clone();
    let bar = progress::bar(rounds * RUNS.len());
    for round in 1..=rounds {
        for (at, &runs) in RUNS.iter().enumerate() {
            bar.set_message(format!("round {round}: {runs} runs"));
            // About as many pages in each configuration.
            let found = play(&cluster, &programs, folder.path(), runs, largest / runs)?;
            pages_per_s[at].push(found.iter().map(|found| float(found.ops) / found.seconds).sum());
            p99_us[at].push(found.iter().map(|found| found.faults.p99_us).fold(0.0, f64::max));
            bar.inc(1);
        }
    }
    bar.finish_and_clear();
    let rows = RUNS.iter().zip(&pages_per_s).zip(&p99_us).map(|((runs, pages), p99)| {
        let figures = [("pages/s", Spread::of(pages)), ("largest p99 µs", Spread::of(p99))];
        let figures = figures.into_iter().filter_map(|(name, spread)| Some((name, spread?))).collect();
        Row { name: format!("{runs} runs"), figures }
    });
    report.tables.push(Table {
        title: format!(
            "runs of {} with a limit of {} that read pages at random, over tcp with a page cache",
            show_bytes(BYTES),
            show_bytes(LIMIT_BYTES)
        ),
        columns: vec![Column::full("pages/s"), Column::full("largest p99 µs")],
        pictured: Some("pages/s"),
        ratio: None,
        rows: rows.collect(),
    });
    let many = Spread::of_ratios(&pages_per_s[RUNS.len() - 1], &pages_per_s[0]);
    report.targets.extend(many.map(|value| Target {
        name: format!("pages/s of {largest} runs together ÷ of one"),
        value,
        bound: 0.8,
        at_most: false,
    }));
    Ok(())
}

/// Runs the program several times at once.
fn play(
    cluster: &Cluster,
    programs: &Programs,
    folder: &Path,
    runs: u64,
    passes: u64,
) -> Result<Vec<Figures>, BenchError> {
    let one = |number: u64| -> Result<Figures, BenchError> {
        let output = folder.join(format!("output-{number}"));
        let stats = folder.join(format!("stats-{number}.json"));
        let mut command = cluster.pooled_command(LIMIT_BYTES, &stats, &programs.faultbench)?;
        command.args(["--bytes", &BYTES.to_string(), "--pattern", "random", "--op", "read", "--warm"]);
        command.args(["--passes", &passes.to_string()]);
        let streams = Streams { input: None, output: &output };
        let outcome = child::run(command, &streams, Watched::Started, |_| {})?;
        let text = std::fs::read_to_string(&output).map_err(BenchError::io("read", &output))?;
        match serde_json::from_str::<Figures>(&text) {
            Ok(figures) if outcome.status.success() && figures.errors == 0 => Ok(figures),
            _ => Err(BenchError::Figures {
                program: "faultbench".into(),
                context: format!("one of {runs} runs"),
                text: text + &outcome.message,
            }),
        }
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..runs).map(|number| scope.spawn(move || one(number))).collect();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
            .collect()
    })
}
