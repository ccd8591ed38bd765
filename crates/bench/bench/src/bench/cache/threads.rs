//! Processor time of a set by a server with one thread, and with two.
//!
//! Servers and load share all processors, so that two threads can run at the same time.

use aquifer_bench::BenchError;
use aquifer_bench::support::report::{Column, Row, Table, Target};
use aquifer_bench::support::spread::Spread;

use super::load::Pace;
use super::processors::Place;
use super::requests::{Kind, Loaded, MEMORY_MIB, Measured, Volume};
use super::servers::{AQUIFER, Programs, Settings};

/// The depths of batches.
pub const DEPTHS: [usize; 2] = [1, 10];
const COLUMNS: [&str; 3] = ["-t 1, µs", "-t 2, µs", "-t 2 ÷ -t 1"];

/// Measures. `on_round` is called after each round of a cell.
///
/// # Errors
/// If a server cannot be used, or a reply is wrong.
pub fn table(
    programs: &Programs,
    volume: Volume,
    on_round: &dyn Fn(&str),
) -> Result<(Table, Vec<Target>), BenchError> {
    let (mut rows, mut targets) = (Vec::new(), Vec::new());
    for depth in DEPTHS {
        let pace = Pace { sleeps: true, ..Pace::of_depth(depth) };
        let mut servers = Vec::new();
        for program in programs.compatible() {
            for threads in [1, 2] {
                let settings = Settings { threads, place: Place::All, ..Settings::with_memory(MEMORY_MIB) };
                servers.push(Loaded::start(programs, program, settings, volume.keys)?);
            }
        }
        let mut measured: Vec<Measured> = servers.iter().map(|_| Measured::default()).collect();
        for _ in 0..volume.rounds {
            for (server, measured) in servers.iter_mut().zip(&mut measured) {
                server.measure(Kind::Set, pace, volume, measured)?;
            }
            on_round("sets by two threads");
        }
        for (pair, measured) in servers.chunks(2).zip(measured.chunks(2)) {
            let name = pair[0].server.name;
            let [one, two] = [0, 1].map(|at: usize| &measured[at].cpu_us);
            let spreads = [Spread::of(one), Spread::of(two), Spread::of_ratios(two, one)];
            targets.extend(spreads[2].filter(|_| name == AQUIFER).map(|value| Target {
                name: format!("processor time of a set, pipeline {depth}: Aquifer -t 2 ÷ -t 1"),
                value,
                bound: 1.05,
                at_most: true,
            }));
            let figures = COLUMNS.into_iter().zip(spreads);
            let figures = figures.filter_map(|(column, spread)| Some((column, spread?))).collect();
            rows.push(Row { name: format!("{name}, pipeline {depth}"), figures });
        }
    }
    let table = Table {
        title: "processor time of a set by threads".into(),
        columns: COLUMNS.map(Column::full).to_vec(),
        pictured: Some(COLUMNS[2]),
        ratio: None,
        rows,
    };
    Ok((table, targets))
}
