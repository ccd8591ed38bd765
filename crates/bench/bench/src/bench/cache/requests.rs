//! Requests for each second of a server's processor time, and the latency of batches.

use std::collections::BTreeMap;
use std::time::Duration;

use aquifer_bench::BenchError;
use aquifer_bench::support::bytes::float;
use aquifer_bench::support::random::Random;
use aquifer_bench::support::report::{Column, Row, Table, Target};
use aquifer_bench::support::spread::Spread;

use super::connection::Operation;
use super::items::{Items, Lengths, Lifetime};
use super::load::{Load, Pace};
use super::servers::{AQUIFER, MEMCACHED, Program, Programs, Server, Settings};

const CONNECTIONS: u32 = 16;
/// Option `-m`: no item is evicted.
pub const MEMORY_MIB: u32 = 1024;
const VALUE_BYTES: usize = 100;
/// The depths of batches, each with the targets of gets and of sets.
const DEPTHS: [(usize, f64, f64); 2] = [(1, 1.2, 1.2), (10, 5.2, 1.7)];
const PER_SECOND: &str = "k/CPU s";
const RATIO: &str = "÷ memcached";
const RESIDENT: &str = "MiB";
const LATENCIES: [(&str, f64); 3] = [("p50 µs", 0.5), ("p99 µs", 0.99), ("p99.9 µs", 0.999)];

/// Amount of work.
#[derive(Clone, Copy, Debug)]
pub struct Volume {
    pub keys: u32,
    pub rounds: usize,
    pub warm_up: Duration,
    pub window: Duration,
}

/// Kind of the requests of a cell.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    Get,
    Set,
}

impl Kind {
    fn name(self) -> &'static str {
        match self {
            Self::Get => "get",
            Self::Set => "set",
        }
    }

    fn of(self, key: u32) -> Operation {
        match self {
            Self::Get => Operation::Get(key),
            Self::Set => Operation::Set(key),
        }
    }
}

/// Results of one server in one cell, by rounds.
#[derive(Debug, Default)]
pub struct Measured {
    /// Processor time of a request.
    pub cpu_us: Vec<f64>,
    /// Resident memory after the round.
    resident_mib: Vec<f64>,
    latency_us: [Vec<f64>; LATENCIES.len()],
}

/// A server with all keys, and the load on it.
pub struct Loaded {
    pub server: Server,
    load: Load,
    random: Random,
}

impl Loaded {
    /// Starts a server and sets all keys.
    ///
    /// # Errors
    /// If the server cannot be used.
    pub fn start(
        programs: &Programs,
        program: &Program,
        settings: Settings,
        keys: u32,
    ) -> Result<Self, BenchError> {
        let server = programs.start(program, settings)?;
        let items = Items::new(keys, Lengths::Fixed(VALUE_BYTES), Lifetime::Unlimited);
        let mut load = Load::connect(&server, CONNECTIONS, items)?;
        load.set_all(0..keys)?;
        Ok(Self { server, load, random: Random(3) })
    }

    /// Plays one cell for one round.
    ///
    /// # Errors
    /// If a reply is wrong, or a key was not found.
    pub fn measure(
        &mut self,
        kind: Kind,
        pace: Pace,
        volume: Volume,
        measured: &mut Measured,
    ) -> Result<(), BenchError> {
        let Self { server, load, random } = self;
        let keys = u64::from(load.keys());
        let key = || u32::try_from(random.word() % keys).expect("below a u32");
        let mut operations = std::iter::repeat_with(key).map(|key| kind.of(key));
        load.play(pace, Some(volume.warm_up), &mut operations)?;
        let before_ns = server.cpu_ns();
        let played = load.play(pace, Some(volume.window), &mut operations)?;
        let cpu_ns = server.cpu_ns() - before_ns;
        let counts = played.counts;
        if counts.misses + counts.refused > 0 {
            let what = format!("{} keys were not found, {} refused", counts.misses, counts.refused);
            return Err(BenchError::Wrong { program: server.name.into(), context: kind.name().into(), what });
        }
        measured.resident_mib.push(float(server.memory_bytes()) / f64::from(1 << 20));
        measured.cpu_us.push(float(cpu_ns) / 1e3 / float(counts.requests()));
        for ((_, quantile), values) in LATENCIES.iter().zip(&mut measured.latency_us) {
            values.push(float(played.latency_ns.value_at_quantile(*quantile)) / 1e3);
        }
        Ok(())
    }
}

/// Measures the requests of one thread. `on_round` is called after each round of a cell.
///
/// # Errors
/// If a server cannot be used, or a reply is wrong.
pub fn tables(
    programs: &Programs,
    volume: Volume,
    on_round: &dyn Fn(&str),
) -> Result<(Vec<Table>, Vec<Target>), BenchError> {
    let settings = Settings::with_memory(MEMORY_MIB);
    let start = |program| Loaded::start(programs, program, settings, volume.keys);
    let mut servers = programs.all.iter().map(start).collect::<Result<Vec<_>, _>>()?;
    let (mut tables, mut targets) = (Vec::new(), Vec::new());
    for (depth, of_gets, of_sets) in DEPTHS {
        for (kind, bound) in [(Kind::Get, of_gets), (Kind::Set, of_sets)] {
            let cell = format!("{}, pipeline {depth}", kind.name());
            let mut measured: Vec<Measured> = servers.iter().map(|_| Measured::default()).collect();
            for _ in 0..volume.rounds {
                for (server, measured) in servers.iter_mut().zip(&mut measured) {
                    server.measure(kind, Pace::of_depth(depth), volume, measured)?;
                }
                on_round(&cell);
            }
            let names = servers.iter().map(|server| server.server.name);
            let named: Vec<_> = names.zip(&measured).collect();
            targets.extend(ratio_to_memcached(&named, AQUIFER).map(|value| Target {
                name: format!("{cell}: requests for each CPU second, Aquifer ÷ memcached"),
                value,
                bound,
                at_most: false,
            }));
            tables.push(table(&cell, &named));
        }
    }
    Ok((tables, targets))
}

fn table(cell: &str, named: &[(&'static str, &Measured)]) -> Table {
    let row = |&(name, measured): &(&'static str, &Measured)| {
        let per_second: Vec<f64> = measured.cpu_us.iter().map(|us| 1e3 / us).collect();
        let mut figures: BTreeMap<&'static str, Spread> = BTreeMap::new();
        figures.extend(Spread::of(&per_second).map(|spread| (PER_SECOND, spread)));
        figures.extend(ratio_to_memcached(named, name).map(|spread| (RATIO, spread)));
        figures.extend(Spread::of(&measured.resident_mib).map(|spread| (RESIDENT, spread)));
        for ((latency, _), values) in LATENCIES.iter().zip(&measured.latency_us) {
            figures.extend(Spread::of(values).map(|spread| (*latency, spread)));
        }
        Row { name: name.into(), figures }
    };
    let latencies = LATENCIES.map(|(name, _)| Column::middle(name));
    Table {
        title: format!("{cell}: thousand requests for each second of the server's processor"),
        columns: [PER_SECOND, RATIO]
            .map(Column::full)
            .into_iter()
            .chain(latencies)
            .chain([Column::full(RESIDENT)])
            .collect(),
        pictured: Some(PER_SECOND),
        ratio: Some(RATIO),
        rows: named.iter().map(row).collect(),
    }
}

/// Requests for each CPU second of `name` ÷ those of memcached.
fn ratio_to_memcached(named: &[(&'static str, &Measured)], name: &str) -> Option<Spread> {
    let find = |name: &str| named.iter().find(|(other, _)| *other == name).map(|(_, found)| &found.cpu_us);
    Spread::of_ratios(find(MEMCACHED)?, find(name)?)
}
