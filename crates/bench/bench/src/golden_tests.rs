//! Golden names: the command line of the benches, and the report written by `--json`.
//! A changed golden file needs a line in CHANGELOG: users' scripts depend on these.

use std::collections::BTreeMap;

use aquifer_bench::support::report::{Column, Report, Row, Series, Table, Target};
use aquifer_bench::support::spread::Spread;
use aquifer_tests_support::golden;
use clap::CommandFactory;

use crate::Cli;

#[test]
fn golden_command_line() {
    let mut golden = golden!("command-line");
    let (mut rdma, commands) = (golden!("command-line-fabric"), Cli::command());
    for command in commands.get_subcommands() {
        let to = if command.get_name() == "fabric" { &mut rdma } else { &mut golden };
        to.command_line(command, "aquifer");
    }
    golden.check();
    if cfg!(feature = "verbs") {
        rdma.check();
    }
}

#[test]
fn golden_report() {
    let mut golden = golden!("report");
    let spread = Spread { min: 1.5, median: 2.5, max: 3.5 };
    let table = Table {
        title: "random read".into(),
        columns: vec![Column::full("p50 µs")],
        pictured: Some("p50 µs"),
        ratio: None,
        rows: vec![Row { name: "pool".into(), figures: BTreeMap::from([("p50 µs", spread)]) }],
    };
    let mut report = Report {
        bench: "faults",
        quick: true,
        processors: 1,
        kernel: "6.8".into(),
        notes: vec!["one".into()],
        tables: vec![table],
        series: Vec::new(),
        targets: vec![Target { name: "p50".into(), value: spread, bound: 4.5, at_most: true }],
    };
    golden.lines(&serde_json::to_string_pretty(&report).expect("figures can be written"));
    report.series.push(Series { title: "time".into(), name: "pool".into(), points: vec![(1.5, 2.5)] });
    golden.text("with series", &serde_json::to_string(&report).expect("figures can be written"));
    golden.check();
}
