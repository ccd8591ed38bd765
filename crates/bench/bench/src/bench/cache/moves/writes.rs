//! Moves under full write load: a client with a pipeline of sets to a partition that is moved back
//! and forth. No acknowledged set may be lost.

use std::time::{Duration, Instant};

use aquifer_bench::BenchError;
use aquifer_bench::support::bytes::float;
use aquifer_bench::support::report::{Column, Row, Table, Target};
use aquifer_bench::support::spread::Spread;

use super::super::connection::Operation;
use super::super::load::{Load, Pace};
use super::cluster::{CacheCluster, Moved, failed, pause};
use super::pauses::{connect_to_owner, new_items};
use super::samples::{Sample, check, play_beside, since_us};
use super::status::Order;
use super::{Figures, Volume};

/// Sets in flight.
const DEPTH: usize = 50;
/// Number of keys, which are set in turn. It exceeds `DEPTH`, so that a key is set again only after
/// its last set was acknowledged, and only one value is right in the end.
const KEYS: usize = 1000;
const MOVES: usize = 10;
/// Time before the first move, and between moves.
const IDLE_TIME: Duration = Duration::from_millis(300);
/// Least rate of sets while the partition moves, in thousand a second.
const RATE_MIN: f64 = 200.0;
const CLIENTS_OF_READS: u32 = 4;
const COLUMNS: [&str; 7] = [
    "moved",
    "declined",
    "move ms p50",
    "move ms max",
    "k sets/s at rest",
    "k sets/s, moves",
    "keys read back",
];

/// The client's sets, and the moves.
struct Written {
    samples: Vec<Sample>,
    began: Instant,
    moves: Vec<Moved>,
    /// Reasons of declined moves.
    declined: Vec<String>,
}

/// Measures, and reads all keys.
///
/// # Errors
/// If a set was lost, a reply is wrong, or nothing could be moved.
pub fn figure(cluster: &CacheCluster, volume: Volume) -> Result<Figures, BenchError> {
    let partition = cluster.partitions.of(0);
    let keys = cluster.partitions.keys_of(partition, volume.keys, KEYS);
    let mut load = connect_to_owner(cluster, partition, new_items(&keys))?;
    let written = write(cluster, partition, &mut load, &keys)?;
    let read_back = read_back(cluster, load, &keys)?;
    let (at_rest, in_moves) = written.rates().ok_or_else(|| failed(&written.reasons()))?;
    let table = table(&written, [at_rest, in_moves], read_back);
    Ok(Figures { tables: vec![table], series: Vec::new(), targets: targets(&written, in_moves) })
}

/// The table, with the rates before and during the moves.
fn table(written: &Written, rates: [f64; 2], read_back: u64) -> Table {
    let durations: Vec<f64> = written.moves.iter().map(|moved| moved.duration_ms).collect();
    let duration = Spread::of(&durations);
    let figures = [
        Some(float(written.moves.len() as u64)),
        Some(float(written.declined.len() as u64)),
        duration.map(|spread| spread.median),
        duration.map(|spread| spread.max),
        Some(rates[0] / 1e3),
        Some(rates[1] / 1e3),
        Some(float(read_back)),
    ];
    let figures = COLUMNS.into_iter().zip(figures);
    let figures = figures.filter_map(|(name, value)| Some((name, Spread::one(value?)))).collect();
    Table {
        title: format!("a partition that moves back and forth under sets in a pipeline of {DEPTH}"),
        columns: COLUMNS.map(Column::middle).to_vec(),
        pictured: None,
        ratio: None,
        rows: vec![Row { name: format!("{MOVES} moves"), figures }],
    }
}

fn targets(written: &Written, in_moves: f64) -> Vec<Target> {
    let succeeded = float(written.moves.len() as u64);
    [
        ("moves under full write load that succeeded", succeeded, float(MOVES as u64)),
        ("thousand sets/s to the partition while it moves", in_moves / 1e3, RATE_MIN),
    ]
    .map(|(name, value, bound)| Target {
        name: name.into(),
        value: Spread::one(value),
        bound,
        at_most: false,
    })
    .into()
}

/// Sets keys while the partition moves between two servers.
fn write(
    cluster: &CacheCluster,
    partition: usize,
    load: &mut Load,
    keys: &[u32],
) -> Result<Written, BenchError> {
    let mut operations = keys.iter().copied().cycle().map(Operation::Set);
    let began = Instant::now();
    let (samples, (moves, declined)) = play_beside(load, DEPTH, began, &mut operations, || {
        let (mut moves, mut declined) = (Vec::new(), Vec::new());
        for _ in 0..MOVES {
            pause(IDLE_TIME)?;
            let from = cluster.wait_for_owner(partition)?;
            match cluster.try_move(Order { partition, from, to: other(from, &cluster.numbers) })? {
                Ok(moved) => moves.push(moved),
                Err(why) => declined.push(why),
            }
        }
        pause(IDLE_TIME)?;
        Ok((moves, declined))
    })?;
    Ok(Written { samples, began, moves, declined })
}

/// The first of the first two servers that is not `from`. The balancer may have moved the partition
/// to a third one.
fn other(from: u16, numbers: &[u16]) -> u16 {
    if from == numbers[0] { numbers[1] } else { numbers[0] }
}

/// Reads all keys through all servers. Returns their number.
fn read_back(cluster: &CacheCluster, load: Load, keys: &[u32]) -> Result<u64, BenchError> {
    let mut load = Load::connect_all(&cluster.servers, CLIENTS_OF_READS, load.into_items())?;
    let mut operations = keys.iter().copied().map(Operation::Get);
    let counts = load.play(Pace::of_depth(DEPTH), None, &mut operations)?.counts;
    check(counts)?;
    Ok(counts.hits)
}

impl Written {
    /// Sets a second before the first move, and from then on until the last move has ended; `None`
    /// if there was no move.
    fn rates(&self) -> Option<(f64, f64)> {
        let first = since_us(self.began, self.moves.first()?.began);
        let last = since_us(self.began, self.moves.last()?.ended);
        let rate = |from: u32, to: u32| {
            let is_in = |sample: &&Sample| (from..to).contains(&sample.ended_us);
            let batches = self.samples.iter().filter(is_in).count();
            float((batches * DEPTH) as u64) * 1e6 / f64::from(to - from)
        };
        Some((rate(0, first), rate(first, last)))
    }

    fn reasons(&self) -> String {
        format!("no move succeeded under full write load: {}", self.declined.join("; "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_partition_moves_between_the_first_two_servers() {
        assert_eq!([5, 6, 9].map(|from| other(from, &[5, 6, 9])), [6, 5, 5]);
    }

    #[test]
    fn rates_are_at_rest_and_from_the_first_move_to_the_last() {
        let began = Instant::now();
        let at = |ms| began + Duration::from_millis(ms);
        let moved = |from_ms, to_ms| Moved {
            order: Order { partition: 7, from: 1, to: 2 },
            began: at(from_ms),
            ended: at(to_ms),
            duration_ms: 1.0,
        };
        let sample = |ended_us| Sample { server: 0, ended_us, latency_ns: 1 };
        let samples = [10_000, 110_000, 120_000, 250_000].map(sample).to_vec();
        let moves = vec![moved(100, 110), moved(190, 200)];
        let written = Written { samples, began, moves, declined: Vec::new() };
        assert_eq!(written.rates(), Some((500.0, 1000.0)));
        assert_eq!(Written { moves: Vec::new(), ..written }.rates(), None);
    }
}
