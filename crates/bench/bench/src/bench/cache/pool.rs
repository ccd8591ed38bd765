//! Items of three times the memory of a server, and a database for missed keys: with a pool for the
//! items that do not fit, and without.
//!
//! Servers, the pool's node and agent, and the load share all processors.

use std::ffi::OsString;
use std::time::Duration;

use aquifer::Fabric;
use aquifer::state::StateDir;
use aquifer_bench::BenchError;
use aquifer_bench::support::bytes::float;
use aquifer_bench::support::cluster::Cluster;
use aquifer_bench::support::report::{Column, Row, Table, Target};
use aquifer_bench::support::spread::Spread;
use hdrhistogram::Histogram;

use super::connection::{Counts, Operation};
use super::hits::scattered;
use super::items::{Items, KEY_BYTES, Lengths, Lifetime};
use super::load::{Answered, Load, Pace};
use super::processors::Place;
use super::servers::{AQUIFER, MEMCACHED, Program, Programs, Server, Settings};
use super::zipf::Zipf;

const CONNECTIONS: u32 = 16;
const SKEW: f64 = 0.99;
/// Time that the simulated database takes for a key.
const DATABASE: Duration = Duration::from_millis(1);
/// Bytes of keys and values ÷ memory of the server.
const DATA_PARTS: u64 = 3;
/// Memory of the pool ÷ memory of the server.
const POOL_PARTS: u64 = 4;
/// Mean length of mixed values.
const MIXED_BYTES: usize = 2025;
/// Upper bound of recorded times; longer ones are recorded as this one.
const TIME_NS_MAX: u64 = 10_000_000_000;
const HIT_P99_US_MAX: f64 = 1000.0;

const RATE: &str = "k keys/s";
const RATIO: &str = "÷ memcached";
const HITS: &str = "hits %";
const POOL_HITS: &str = "of the pool %";
const MEAN: &str = "mean µs";
const HIT_MIDDLE: &str = "hit p50 µs";
const HIT_P99: &str = "hit p99 µs";
const COLUMNS: [&str; 7] = [RATE, RATIO, HITS, POOL_HITS, MEAN, HIT_MIDDLE, HIT_P99];

/// Amount of work.
#[derive(Clone, Copy, Debug)]
pub struct Volume {
    /// Option `-m` of the servers.
    pub memory_mib: u32,
    pub rounds: usize,
    /// Length of the warm-up, and of the measurement.
    pub window: Duration,
}

/// The number of calls of `on_server`.
pub const fn count(volume: Volume) -> usize {
    CELLS.len() * volume.rounds * 4
}

/// Lengths of the values of a cell, and their mean.
const CELLS: [(Lengths, usize); 2] = [(Lengths::Fixed(100), 100), (Lengths::Mixed, MIXED_BYTES)];

/// Where a server writes items that do not fit into its memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum OverflowTarget {
    Pool(Fabric),
    Nothing,
}

/// A server with or without a pool.
#[derive(Debug)]
struct ServerSetup<'a> {
    name: String,
    program: &'a Program,
    overflow: OverflowTarget,
}

/// Results of one setup in one cell, by rounds.
type Measured = Vec<[f64; COLUMNS.len()]>;

/// Measures all cells. `on_server` is called before each server in each round.
///
/// # Errors
/// If a server or the pool cannot be used, or a reply is wrong.
pub fn tables(
    programs: &Programs,
    volume: Volume,
    on_server: &dyn Fn(&str),
) -> Result<(Vec<Table>, Vec<Target>), BenchError> {
    let setups = setups(programs);
    let (mut tables, mut targets) = (Vec::new(), Vec::new());
    for (lengths, mean_bytes) in CELLS {
        let values = if lengths == Lengths::Mixed { "50–4000 B".into() } else { format!("{mean_bytes} B") };
        let mut measured: Vec<Measured> = setups.iter().map(|_| Measured::new()).collect();
        for _ in 0..volume.rounds {
            for (setup, measured) in setups.iter().zip(&mut measured) {
                on_server(&format!("pool, {values}: {}", setup.name));
                measured.push(setup.measure(programs, volume, lengths, mean_bytes)?);
            }
        }
        let rows = rows(&setups, &measured);
        targets.extend(rows.iter().filter(|row| row.name.contains(Fabric::Tcp.name())).filter_map(|row| {
            let name = format!("pool over tcp, {values}: p99 of hits, µs");
            Some(Target { name, value: *row.figures.get(HIT_P99)?, bound: HIT_P99_US_MAX, at_most: true })
        }));
        tables.push(Table {
            title: format!("{DATA_PARTS} × as much data as memory, {values}, and a database of 1 ms"),
            columns: COLUMNS.map(Column::full).to_vec(),
            pictured: Some(RATE),
            ratio: Some(RATIO),
            rows,
        });
    }
    Ok((tables, targets))
}

/// A note on the measurement.
pub fn note(volume: Volume) -> String {
    format!(
        "pool: servers with -m {}, keys and values of {DATA_PARTS} × as many bytes, a pool of \
         {POOL_PARTS} × as many; {CONNECTIONS} connections get keys by Zipf's law ({SKEW}), one at a \
         time. A key that the cache does not have comes from a database after 1 ms, and is set. The \
         time of a key is that from its get to its value; servers, agent, node and load share all \
         processors",
        volume.memory_mib
    )
}

/// The servers that are measured in each cell.
fn setups(programs: &Programs) -> Vec<ServerSetup<'_>> {
    let mut setups = Vec::new();
    for program in programs.compatible() {
        if program.name == AQUIFER {
            setups.extend([Fabric::Shm, Fabric::Tcp].map(|fabric| ServerSetup {
                name: format!("{AQUIFER}, pool over {}", fabric.name()),
                program,
                overflow: OverflowTarget::Pool(fabric),
            }));
        }
        setups.push(ServerSetup { name: program.name.into(), program, overflow: OverflowTarget::Nothing });
    }
    setups
}

impl ServerSetup<'_> {
    /// Sets all keys, plays for a window, and measures in the next one.
    fn measure(
        &self,
        programs: &Programs,
        volume: Volume,
        lengths: Lengths,
        mean_bytes: usize,
    ) -> Result<[f64; COLUMNS.len()], BenchError> {
        let memory_bytes = u64::from(volume.memory_mib) << 20;
        let keys = DATA_PARTS * memory_bytes / (KEY_BYTES + mean_bytes) as u64;
        let keys = u32::try_from(keys).expect("a few million");
        let (server, _cluster) = self.start(programs, volume)?;
        let mut load = Load::connect(&server, CONNECTIONS, Items::new(keys, lengths, Lifetime::Unlimited))?;
        // memcached refuses some sets if lengths are mixed.
        let set = load.play(Pace::of_depth(32), None, &mut scattered(keys).map(Operation::Set))?;
        if self.program.name == AQUIFER && set.counts.refused > 0 {
            return Err(server.error(format!("{} sets were refused", set.counts.refused)));
        }
        let mut zipf = Zipf::new(keys, SKEW, 9);
        let mut gets = std::iter::repeat_with(|| Operation::Get(zipf.rank()));
        let pace = Pace { sets_missed: true, database: DATABASE, sleeps: true, ..Pace::of_depth(1) };
        load.play(pace, Some(volume.window), &mut gets)?;
        let pool_hits = || Ok::<_, BenchError>(server.statistics()?.get("pool_hits").copied().unwrap_or(0));
        let before = pool_hits()?;
        let mut times = Times::new();
        let (counts, elapsed) =
            load.play_observed(pace, Some(volume.window), &mut gets, &mut |answered| times.note(answered))?;
        let of_pool = pool_hits()? - before;
        if self.overflow != OverflowTarget::Nothing && of_pool == 0 {
            return Err(server.error("no item came from the pool".into()));
        }
        let gets = float(counts.hits + counts.misses);
        let us = |ns: f64| ns / 1e3;
        let quantile = |quantile| us(float(times.hits_ns.value_at_quantile(quantile)));
        let percent = |part: u64| 100.0 * float(part) / gets;
        let rate = gets / elapsed.as_secs_f64() / 1e3;
        let mean = us(times.keys_ns.mean());
        Ok([rate, f64::NAN, percent(counts.hits), percent(of_pool), mean, quantile(0.5), quantile(0.99)])
    }

    fn start(&self, programs: &Programs, volume: Volume) -> Result<(Server, Option<Cluster>), BenchError> {
        let settings = Settings { place: Place::All, ..Settings::with_memory(volume.memory_mib) };
        let OverflowTarget::Pool(fabric) = self.overflow else {
            return Ok((programs.start(self.program, settings)?, None));
        };
        let pool_bytes = POOL_PARTS * (u64::from(volume.memory_mib) << 20);
        // Twice the memory, because items that are being moved need memory, too.
        let cluster = Cluster::up(2 * pool_bytes, fabric, None)?;
        let state = StateDir::locate(Some(cluster.state()));
        let agent = state.map_err(|error| BenchError::Cluster {
            what: "up",
            status: "no state folder".into(),
            message: error.to_string(),
        })?;
        let options = ["--pool".into(), pool_bytes.to_string().into(), "--agent".into()];
        let options: Vec<OsString> = options.into_iter().chain([agent.agent_socket().into()]).collect();
        Ok((programs.start_with(self.program, settings, &options)?, Some(cluster)))
    }
}

/// Times for which the client waits for keys.
struct Times {
    hits_ns: Histogram<u64>,
    /// Times of all keys. That of a missed key includes the database.
    keys_ns: Histogram<u64>,
}

impl Times {
    fn new() -> Self {
        let new = || Histogram::new_with_max(TIME_NS_MAX, 3).expect("the bounds are possible");
        Self { hits_ns: new(), keys_ns: new() }
    }

    fn note(&mut self, answered: Answered) {
        let Answered { sent, ended, counts, .. } = answered;
        let time = ended.saturating_duration_since(sent);
        let ns = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        match counts {
            Counts { hits: 1, .. } => {
                self.hits_ns.saturating_record(ns(time));
                self.keys_ns.saturating_record(ns(time));
            }
            Counts { misses: 1, .. } => self.keys_ns.saturating_record(ns(time + DATABASE)),
            // A set of a key that was missed: its time was recorded with the miss.
            _ => {}
        }
    }
}

fn rows(setups: &[ServerSetup<'_>], all: &[Measured]) -> Vec<Row> {
    let column = |measured: &Measured, at: usize| measured.iter().map(|round| round[at]).collect::<Vec<_>>();
    let peer = setups.iter().position(|setup| setup.program.name == MEMCACHED);
    let row = |(setup, measured): (&ServerSetup<'_>, &Measured)| {
        let figures = COLUMNS.into_iter().enumerate().filter_map(|(at, name)| {
            let spread = match (name, peer) {
                (RATIO, peer) => Spread::of_ratios(&column(measured, 0), &column(&all[peer?], 0)),
                _ => Spread::of(&column(measured, at)),
            };
            Some((name, spread?))
        });
        Row { name: setup.name.clone(), figures: figures.collect() }
    };
    setups.iter().zip(all).map(row).collect()
}
