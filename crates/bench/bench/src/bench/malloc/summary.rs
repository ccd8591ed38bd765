//! Tables and targets of the samples.

use std::collections::BTreeMap;

use aquifer_bench::support::report::{Column, Report, Row, Table, Target};
use aquifer_bench::support::spread::Spread;

use super::contenders::MallocContender;
use super::{Benchmark, Sample, Samples};

/// Percentage at which the targets compare with the peer.
const JUDGED_PERCENT: u64 = 25;
const SPEED: &str = "thousand ops/s";

struct View<'a> {
    rounds: usize,
    at: usize,
    percent: u64,
    samples: &'a Samples,
}

impl View<'_> {
    fn sample(&self, contender: MallocContender, round: usize) -> Option<&Sample> {
        let is_plain = matches!(contender, MallocContender::Glibc | MallocContender::Plain);
        let percent = if is_plain { 100 } else { self.percent };
        self.samples.get(&(self.at, percent, contender))?.get(round)?.as_ref()
    }

    fn figure(&self, contender: MallocContender, name: &str, round: usize) -> Option<f64> {
        self.sample(contender, round)?.get(name).copied()
    }

    fn spread(&self, pick: impl Fn(usize) -> Option<f64>) -> Option<Spread> {
        Spread::of(&(0..self.rounds).filter_map(pick).collect::<Vec<_>>())
    }

    /// Speed of a contender ÷ that of another, in the same round.
    fn ahead_of(&self, contender: MallocContender, other: MallocContender) -> Option<Spread> {
        self.spread(|round| Some(self.figure(contender, SPEED, round)? / self.figure(other, SPEED, round)?))
    }

    fn row(&self, contender: MallocContender) -> Row {
        let names =
            (0..self.rounds).filter_map(|round| self.sample(contender, round)).flat_map(BTreeMap::keys);
        let mut figures: BTreeMap<&'static str, Spread> = names
            .filter_map(|&name| Some((name, self.spread(|round| self.figure(contender, name, round))?)))
            .collect();
        for (name, other) in [("÷ glibc", MallocContender::Glibc), ("÷ swap file", MallocContender::SwapFile)]
        {
            if contender != other {
                figures.extend(self.ahead_of(contender, other).map(|spread| (name, spread)));
            }
        }
        Row { name: contender.name().into(), figures }
    }

    fn targets(&self, name: &str) -> Vec<Target> {
        let mut targets = Vec::new();
        let mut target = |what: &str, value: Option<Spread>, bound: f64, at_most: bool| {
            let name = format!("{name}, {} % fit: {what}", self.percent);
            targets.extend(value.map(|value| Target { name, value, bound, at_most }));
        };
        if self.percent == JUDGED_PERCENT {
            target(
                "library with limit ÷ swap file",
                self.ahead_of(MallocContender::Library, MallocContender::SwapFile),
                1.0,
                false,
            );
            target(
                "library with limit ÷ glibc under aquifer run",
                self.ahead_of(MallocContender::Library, MallocContender::Run),
                0.9,
                false,
            );
        }
        let over = |round| {
            let figure = |name| self.figure(MallocContender::Library, name, round);
            Some(figure("resident MiB")? - 1.1 * figure("limit MiB")?)
        };
        target("resident MiB over limit + 10 %", self.spread(over), 16.0, true);
        targets
    }
}

/// Adds a table and targets.
pub fn fill(
    report: &mut Report,
    rounds: usize,
    (at, benchmark): (usize, &Benchmark),
    percent: u64,
    limited: &[MallocContender],
    samples: &Samples,
) {
    let view = View { rounds, at, percent, samples };
    let contenders = limited.iter().chain(&[MallocContender::Plain, MallocContender::Glibc]);
    report.tables.push(Table {
        title: format!("{}, {percent} % fit", benchmark.name),
        columns: vec![
            Column::full(SPEED),
            Column::middle("whole s"),
            Column::middle("CPU s"),
            Column::middle("resident MiB"),
            Column::middle("in want"),
            Column::full("÷ glibc"),
            Column::full("÷ swap file"),
        ],
        pictured: Some(SPEED),
        ratio: Some("÷ swap file"),
        rows: contenders.map(|&contender| view.row(contender)).collect(),
    });
    report.targets.extend(view.targets(benchmark.name));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::malloc::BENCHMARKS;

    fn samples() -> Samples {
        let sample = |speed, resident| {
            Some(Sample::from([(SPEED, speed), ("resident MiB", resident), ("limit MiB", 20.0)]))
        };
        Samples::from([
            ((0, 100, MallocContender::Glibc), vec![sample(100.0, 80.0), sample(200.0, 80.0)]),
            ((0, 100, MallocContender::Plain), vec![sample(110.0, 80.0), sample(210.0, 80.0)]),
            ((0, 25, MallocContender::Library), vec![sample(20.0, 25.0), sample(40.0, 30.0)]),
            ((0, 25, MallocContender::Run), vec![sample(10.0, 25.0), sample(20.0, 25.0)]),
            // In one round the kernel killed the program.
            ((0, 25, MallocContender::SwapFile), vec![None, sample(20.0, 20.0)]),
        ])
    }

    #[test]
    fn ratios_are_of_the_same_round_and_killed_runs_are_left_out() {
        let mut report = Report::new("malloc", true);
        let limited = [MallocContender::Library, MallocContender::Run, MallocContender::SwapFile];
        fill(&mut report, 2, (0, &BENCHMARKS[0]), 25, &limited, &samples());
        let table = &report.tables[0];
        let row = |name: &str| table.rows.iter().find(|row| row.name == name).unwrap();
        assert_eq!(table.rows.len(), 5);
        assert_eq!(
            row(MallocContender::Library.name()).figures["÷ swap file"],
            Spread { min: 2.0, median: 2.0, max: 2.0 }
        );
        assert_eq!(
            row(MallocContender::Library.name()).figures["÷ glibc"],
            Spread { min: 0.2, median: 0.2, max: 0.2 }
        );
        assert!(!row(MallocContender::SwapFile.name()).figures.contains_key("÷ swap file"));
        let met: Vec<bool> = report.targets.iter().map(super::Target::is_met).collect();
        assert_eq!(met, [true, true, true]);
        assert_eq!(report.targets[2].value.max, 8.0, "30 MiB, and 22 are allowed");
    }
}
