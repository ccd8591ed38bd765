//! Pauses of writes: latencies of a client that sets keys of a partition, one at a time, while the
//! partition moves.

use std::ops::Range;
use std::time::{Duration, Instant};

use aquifer_bench::BenchError;
use aquifer_bench::support::bytes::float;
use aquifer_bench::support::report::{Column, Row, Table, Target};
use aquifer_bench::support::spread::Spread;

use super::super::connection::Operation;
use super::super::items::{Items, Lengths, Lifetime};
use super::super::load::Load;
use super::cluster::{CacheCluster, Moved, failed, pause};
use super::gets::{CLIENTS, Gets};
use super::partitions::Partitions;
use super::samples::{Latencies, Sample, duration_us, overlap, play_beside, since_us};
use super::status::Order;
use super::{Figures, VALUE_BYTES, Volume};

/// Length of the time around a move whose latencies are reported.
const AROUND: Duration = Duration::from_secs(1);
/// Time without a move before and after that.
const IDLE_TIME: Duration = Duration::from_millis(500);
/// Keys that are set in turn.
const KEYS: usize = 100;
/// Largest p99 in the seconds of moves.
const P99_MS_MAX: f64 = 1.0;
const LATENCIES: [(&str, usize); 3] = [("p50 ms", 50), ("p99 ms", 99), ("longest ms", 100)];
const SETS: &str = "k sets/s";
const DURATION: &str = "move ms";

/// Measurements of the rounds of one row.
#[derive(Debug, Default)]
struct Measured {
    at_rest: Vec<Sample>,
    around: Vec<Sample>,
    rest_s: f64,
    around_s: f64,
    durations_ms: Vec<f64>,
}

/// Measures without other load, and while gets run.
///
/// # Errors
/// If a reply is wrong, or the partition cannot be moved.
pub fn figure(cluster: &CacheCluster, gets: &mut Gets, volume: Volume) -> Result<Figures, BenchError> {
    let writer = Writer::new(cluster.partitions, volume);
    let (alone, items) = writer.measure(cluster, volume, new_items(&writer.keys))?;
    let (_, (beside, _)) = gets.beside(Instant::now(), || writer.measure(cluster, volume, items))?;
    let measured = [("alone".to_owned(), alone), (format!("beside {CLIENTS} clients"), beside)];
    let columns = LATENCIES.map(|(name, _)| Column::middle(name)).into_iter();
    let table = Table {
        title: "sets of one client to the partition that moves, one at a time".into(),
        columns: columns.chain([Column::middle(SETS), Column::full(DURATION)]).collect(),
        pictured: None,
        ratio: None,
        rows: measured.iter().flat_map(|(name, measured)| measured.rows(name)).collect(),
    };
    let targets = measured.iter().filter_map(|(name, measured)| measured.target(name)).collect();
    Ok(Figures { tables: vec![table], series: Vec::new(), targets })
}

/// Latencies of sets, and their rate over `time_s`.
fn row(name: &str, samples: &[Sample], time_s: f64) -> Row {
    let latencies = Latencies::of(samples.iter());
    let mut row = Row { name: name.into(), figures: Default::default() };
    for (column, percent) in LATENCIES {
        let ms = latencies.percentile_us(percent).map(|us| us / 1e3);
        row.figures.extend(ms.map(|ms| (column, Spread::one(ms))));
    }
    row.figures.insert(SETS, Spread::one(float(samples.len() as u64) / time_s / 1e3));
    row
}

/// The client that sets keys.
struct Writer {
    partition: usize,
    keys: Vec<u32>,
}

impl Writer {
    /// A client of the partition with the most frequent key of the gets. The client uses other
    /// keys.
    fn new(partitions: Partitions, volume: Volume) -> Self {
        let partition = partitions.of(0);
        let keys = partitions.keys_of(partition, volume.keys, KEYS);
        Self { partition, keys }
    }

    /// Moves the partition several times. The client connects to the owner before each move.
    fn measure(
        &self,
        cluster: &CacheCluster,
        volume: Volume,
        mut items: Items,
    ) -> Result<(Measured, Items), BenchError> {
        let mut measured = Measured::default();
        for _ in 0..volume.paused_moves {
            items = self.measure_move(cluster, items, &mut measured)?;
        }
        Ok((measured, items))
    }

    /// Adds the measurements of one move, and returns the items.
    fn measure_move(
        &self,
        cluster: &CacheCluster,
        items: Items,
        measured: &mut Measured,
    ) -> Result<Items, BenchError> {
        let partition = self.partition;
        let mut load = connect_to_owner(cluster, partition, items)?;
        let mut operations = self.keys.iter().copied().cycle().map(Operation::Set);
        let began = Instant::now();
        let (samples, moved) = play_beside(&mut load, 1, began, &mut operations, || {
            pause(IDLE_TIME + AROUND / 2)?;
            let moved = cluster.make_move(&|status| {
                let from = status.owner(partition)?;
                Some(Order { partition, from, to: status.least_loaded(from)? })
            })?;
            pause(AROUND / 2 + IDLE_TIME)?;
            Ok(moved)
        })?;
        measured.add(&samples, began, &moved);
        Ok(load.into_items())
    }
}

impl Measured {
    fn add(&mut self, samples: &[Sample], began: Instant, moved: &Moved) {
        let around = around(&(since_us(began, moved.began)..since_us(began, moved.ended)));
        let is_around = |sample: &&Sample| overlap(&time_of(sample), &around);
        self.around.extend(samples.iter().filter(is_around));
        self.at_rest.extend(samples.iter().filter(|sample| sample.ended_us < around.start));
        self.rest_s += f64::from(around.start) / 1e6;
        self.around_s += f64::from(around.end - around.start) / 1e6;
        self.durations_ms.push(moved.duration_ms);
    }

    fn rows(&self, name: &str) -> [Row; 2] {
        let mut around = row(&format!("{name}, seconds of moves"), &self.around, self.around_s);
        around.figures.extend(Spread::of(&self.durations_ms).map(|spread| (DURATION, spread)));
        [row(&format!("{name}, at rest"), &self.at_rest, self.rest_s), around]
    }

    fn target(&self, name: &str) -> Option<Target> {
        let p99_us = Latencies::of(self.around.iter()).percentile_us(99)?;
        Some(Target {
            name: format!("p99 of a set in the seconds of moves, ms, {name}"),
            value: Spread::one(p99_us / 1e3),
            bound: P99_MS_MAX,
            at_most: true,
        })
    }
}

/// Time in which a request was in flight, in µs.
fn time_of(sample: &Sample) -> Range<u32> {
    sample.ended_us.saturating_sub(sample.latency_ns.div_ceil(1000))..sample.ended_us
}

/// A second around a move, or the time of the move if it is longer.
fn around(time: &Range<u32>) -> Range<u32> {
    let more = duration_us(AROUND).saturating_sub(time.end - time.start) / 2;
    time.start.saturating_sub(more)..time.end + more
}

/// Items with all of these keys.
pub fn new_items(keys: &[u32]) -> Items {
    let count = keys.iter().max().map_or(0, |last| last + 1);
    Items::new(count, Lengths::Fixed(VALUE_BYTES), Lifetime::Unlimited)
}

/// Connects one client to the server that has a partition.
///
/// # Errors
/// If no server has it, or if the server accepts no connections.
pub fn connect_to_owner(cluster: &CacheCluster, partition: usize, items: Items) -> Result<Load, BenchError> {
    let owner = cluster.wait_for_owner(partition)?;
    let at = cluster.numbers.iter().position(|number| *number == owner);
    let at = at.ok_or_else(|| failed(&format!("there is no server {owner}")))?;
    Load::connect(&cluster.servers[at], 1, items)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_second_is_around_a_short_move() {
        assert_eq!(around(&(2_000_000..2_100_000)), 1_550_000..2_550_000);
        assert_eq!(around(&(100..200)), 0..500_150);
        assert_eq!(around(&(5_000_000..7_000_000)), 5_000_000..7_000_000);
    }

    #[test]
    fn a_sample_that_is_in_flight_across_a_border_is_in_the_second() {
        let sample = Sample { server: 0, ended_us: 1000, latency_ns: 200_000 };
        assert_eq!(time_of(&sample), 800..1000);
        assert!(overlap(&time_of(&sample), &(900..950)));
    }
}
