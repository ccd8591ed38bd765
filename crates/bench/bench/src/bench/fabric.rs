//! `aquifer bench fabric`: operations over shared memory beside bare copies and atomics, and over
//! TCP beside plain sockets.

mod floor;
pub mod link;
mod measure;
mod server;
mod wire;

use std::collections::BTreeMap;

use aquifer_bench::support::bytes::{float, show_bytes};
use aquifer_bench::support::procs;
use aquifer_bench::support::report::{Column, Report, Row, Table, Target};
use aquifer_bench::support::spread::{Spread, short};

use super::{BenchArgs, BenchError};
use link::Link;
use measure::{Kind, Pair, Place, Volume};

pub use floor::ReadFloor;
pub use server::serve_at;

/// Targets, for `aquifer bench list`.
pub const TARGETS: &str = "targets: READ of 4 KiB ≤ 1.5× a cold memcpy, 64-byte READ and CAS ≤ 200 ns \
    over a bare one; tcp READ of 4 KiB ≤ 1.2× a plain round trip, 32 at once ≥ 0.8× a plain echo";

const SIZES: [u32; 3] = [64, 4096, 65_536];
const BATCHES: [usize; 3] = [1, 16, 64];

/// Measures.
///
/// # Errors
/// If the other process cannot be started, or an operation fails.
pub fn run(args: &BenchArgs) -> Result<Report, BenchError> {
    let volume = if args.quick { Volume::QUICK } else { Volume::FULL };
    let mut link = Link::start(server::REGION_BYTES)?;
    let mut report = Report::new("fabric", args.quick);
    report.notes.push(format!(
        "the memory is another process's, {}; cold: a random order over all of it, hot: one place again \
            and again",
        show_bytes(server::REGION_BYTES as u64)
    ));
    report.notes.push(
        "bare: the same copy or atomic on own shared memory of the same size, in the same order, in \
            alternation; \
         one at a time means that each waits for the data of the one before, as a polled verb does"
            .into(),
    );
    let before_us = procs::cpu_us(link.server());
    let copies = copies(&mut link, volume)?;
    let atomics = pairs(&mut link, volume, &[Kind::CompareSwap, Kind::FetchAdd])?;
    let batches = batches(&mut link, volume)?;
    let target_us = procs::cpu_us(link.server()) - before_us;
    report.notes.push(format!(
        "one thread posts and polls, so that its CPU time is the time shown; all one-sided work cost the \
            other process {} ms of CPU",
        short(float(target_us) / 1e3)
    ));
    let messages = measure::messages(&mut link, volume)?;
    let (verbs, plain) = link.tcp_addresses.expect("the serving process was started");
    let wire = wire::measure(link.server(), verbs, plain, volume)?;
    report.targets = targets(&copies, &atomics);
    report.targets.extend(wire.targets);
    let columns = ["ns", "bare ns", "÷ bare", "ns over bare"].map(Column::full).to_vec();
    let table = |title: &str, columns: &[Column], rows: Vec<Row>| Table {
        title: title.into(),
        columns: columns.to_vec(),
        pictured: (columns.len() == 4).then_some("÷ bare"),
        ratio: None,
        rows,
    };
    report.tables = vec![
        table("READ and WRITE beside memcpy", &columns, copies.iter().map(Pair::row).collect()),
        table("CAS and FAA beside a bare atomic", &columns, atomics.iter().map(Pair::row).collect()),
        table(
            "many READs for one doorbell, cold, per operation",
            &columns,
            batches.iter().map(Pair::row).collect(),
        ),
        table(
            "messages of 64 bytes, there and back",
            &[Column::full("p50 µs"), Column::full("p99 µs"), Column::full("CPU µs")],
            vec![Row { name: "both ends poll".into(), figures: messages }],
        ),
        table(
            "4 KiB over TCP on this machine, beside plain sockets that move the same bytes",
            &["µs", "1000/s", "÷ plain", "CPU µs there"].map(Column::full),
            wire.rows,
        ),
    ];
    Ok(report)
}

fn copies(link: &mut Link, volume: Volume) -> Result<Vec<Pair>, BenchError> {
    let mut all = Vec::new();
    for kind in [Kind::Read, Kind::Write] {
        for bytes in SIZES {
            for place in [Place::Hot, Place::Cold] {
                all.push(measure::pair(link, volume, kind, bytes, place, 1)?);
            }
        }
    }
    Ok(all)
}

fn pairs(link: &mut Link, volume: Volume, kinds: &[Kind]) -> Result<Vec<Pair>, BenchError> {
    let mut all = Vec::new();
    for &kind in kinds {
        for place in [Place::Hot, Place::Cold] {
            all.push(measure::pair(link, volume, kind, 8, place, 1)?);
        }
    }
    Ok(all)
}

fn batches(link: &mut Link, volume: Volume) -> Result<Vec<Pair>, BenchError> {
    let mut all = Vec::new();
    for bytes in [64, 4096] {
        for batch in BATCHES {
            all.push(measure::pair(link, volume, Kind::Read, bytes, Place::Cold, batch)?);
        }
    }
    Ok(all)
}

fn targets(copies: &[Pair], atomics: &[Pair]) -> Vec<Target> {
    let mut targets = Vec::new();
    for pair in copies.iter().chain(atomics) {
        let name = pair.name();
        let small = pair.kind == Kind::CompareSwap || (pair.kind == Kind::Read && pair.bytes == 64);
        if small && let Some(value) = pair.over_bare_ns() {
            targets.push(Target {
                name: format!("{name}: ns over bare"),
                value,
                bound: 200.0,
                at_most: true,
            });
        }
        let page = pair.kind == Kind::Read && pair.bytes == 4096 && pair.place == Place::Cold;
        if page && let Some(value) = Spread::of_ratios(&pair.verb_ns, &pair.bare_ns) {
            targets.push(Target { name: format!("{name} ÷ memcpy"), value, bound: 1.5, at_most: true });
        }
    }
    targets
}

impl Pair {
    fn name(&self) -> String {
        let verb = match self.kind {
            Kind::Read => "READ",
            Kind::Write => "WRITE",
            Kind::CompareSwap => "CAS",
            Kind::FetchAdd => "FAA",
        };
        let place = if self.place == Place::Hot { "hot" } else { "cold" };
        let size = match self.bytes {
            8 => String::new(),
            bytes if bytes < 1024 => format!(" {bytes} B"),
            bytes => format!(" {} KiB", bytes / 1024),
        };
        let batch = if self.batch > 1 { format!(", {} at once", self.batch) } else { String::new() };
        format!("{verb}{size} {place}{batch}")
    }

    fn over_bare_ns(&self) -> Option<Spread> {
        let over: Vec<f64> = self.verb_ns.iter().zip(&self.bare_ns).map(|(verb, bare)| verb - bare).collect();
        Spread::of(&over)
    }

    fn row(&self) -> Row {
        let figures = [
            ("ns", Spread::of(&self.verb_ns)),
            ("bare ns", Spread::of(&self.bare_ns)),
            ("÷ bare", Spread::of_ratios(&self.verb_ns, &self.bare_ns)),
            ("ns over bare", self.over_bare_ns()),
        ];
        let figures: BTreeMap<_, _> =
            figures.into_iter().filter_map(|(name, spread)| Some((name, spread?))).collect();
        Row { name: self.name(), figures }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pair(kind: Kind, bytes: u32, place: Place, verb_ns: f64) -> Pair {
        Pair { kind, bytes, place, batch: 1, verb_ns: vec![verb_ns], bare_ns: vec![100.0] }
    }

    #[test]
    fn each_target_judges_its_own_operation() {
        let copies = [
            pair(Kind::Read, 64, Place::Hot, 301.0),
            pair(Kind::Read, 4096, Place::Cold, 150.0),
            pair(Kind::Read, 4096, Place::Hot, 900.0),
            pair(Kind::Write, 64, Place::Hot, 900.0),
        ];
        let targets = targets(&copies, &[pair(Kind::CompareSwap, 8, Place::Cold, 300.0)]);
        let judged: Vec<_> = targets.iter().map(|target| (target.name.as_str(), target.is_met())).collect();
        assert_eq!(
            judged,
            [
                ("READ 64 B hot: ns over bare", false),
                ("READ 4 KiB cold ÷ memcpy", true),
                ("CAS cold: ns over bare", true)
            ]
        );
    }

    #[test]
    fn names_have_size_place_and_batch() {
        let batch = Pair { batch: 16, ..pair(Kind::Read, 65_536, Place::Cold, 1.0) };
        assert_eq!(batch.name(), "READ 64 KiB cold, 16 at once");
        assert_eq!(pair(Kind::FetchAdd, 8, Place::Hot, 1.0).name(), "FAA hot");
    }
}
