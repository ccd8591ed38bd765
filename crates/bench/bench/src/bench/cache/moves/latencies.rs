//! Figure 5 of RaMP: latencies of gets by server over time, while two hot partitions move.

use std::ops::Range;
use std::time::{Duration, Instant};

use aquifer_bench::BenchError;
use aquifer_bench::support::bytes::float;
use aquifer_bench::support::report::{Column, Row, Series, Table, Target};
use aquifer_bench::support::spread::Spread;

use super::cluster::{CacheCluster, Moved, failed, pause};
use super::gets::{CLIENTS, Gets};
use super::samples::{Latencies, Sample, Windows, since_us};
use super::timeline::{Stage, Timeline, WINDOW};
use super::{Figures, Volume};

const STATUS_POLL_INTERVAL: Duration = Duration::from_millis(250);
const MOVES: usize = 2;
/// Columns: mean and 95th percentile by stage.
const LATENCIES: [(&str, &str, Stage); 3] = [
    ("mean µs before", "p95 µs before", Stage::Before),
    ("mean µs in moves", "p95 µs in moves", Stage::InMoves),
    ("mean µs after", "p95 µs after", Stage::After),
];
const RATIO_MIN: f64 = 0.9;
const MEAN_TITLE: &str = "mean of gets in µs, by s";
const P95_TITLE: &str = "p95 of gets in µs, by s";
const THROUGHPUT_TITLE: &str = "throughput in thousand gets/s, by s";

/// Waits until the partitions are balanced, then measures.
///
/// # Errors
/// If a reply is wrong, or a partition cannot be moved.
pub fn figure(cluster: &CacheCluster, gets: &mut Gets, volume: Volume) -> Result<Figures, BenchError> {
    gets.beside(Instant::now(), || wait_until_balanced(cluster, volume))?;
    let timeline = measure(cluster, gets, volume)?;
    let (throughput, target) = throughput_table(&timeline)?;
    Ok(Figures {
        tables: vec![latency_table(cluster, &timeline), throughput],
        series: series(cluster, &timeline),
        targets: vec![target],
    })
}

/// Waits until the balancer has moved no partition for some time.
fn wait_until_balanced(cluster: &CacheCluster, volume: Volume) -> Result<(), BenchError> {
    let (began, mut changed) = (Instant::now(), Instant::now());
    let mut moves = cluster.status()?.moves();
    while changed.elapsed() < volume.balanced_for && began.elapsed() < volume.balance_timeout {
        pause(STATUS_POLL_INTERVAL)?;
        let current = cluster.status()?.moves();
        if current != moves {
            (moves, changed) = (current, Instant::now());
        }
    }
    Ok(())
}

fn measure(cluster: &CacheCluster, gets: &mut Gets, volume: Volume) -> Result<Timeline, BenchError> {
    let before = cluster.status()?.moves();
    let began = Instant::now();
    let (samples, moves) = gets.beside(began, || {
        let mut moves: Vec<Moved> = Vec::new();
        for _ in 0..MOVES {
            pause(volume.stage)?;
            let moved: Vec<usize> = moves.iter().map(|moved| moved.order.partition).collect();
            moves.push(cluster.make_move(&|status| status.hottest(&moved))?);
        }
        pause(volume.stage)?;
        Ok(moves)
    })?;
    let times = moves.iter().map(|moved| since_us(began, moved.began)..since_us(began, moved.ended));
    let times = times.collect();
    let other_moves = (cluster.status()?.moves() - before).saturating_sub(MOVES as u64);
    Ok(Timeline { samples, moves, times, other_moves })
}

fn latency_table(cluster: &CacheCluster, timeline: &Timeline) -> Table {
    let row = |(server, number): (usize, &u16)| {
        let mut row = Row { name: format!("server {number}"), figures: Default::default() };
        for (mean, p95, stage) in LATENCIES {
            let latencies = timeline.latencies(server, stage);
            row.figures.extend(latencies.mean_us().map(|us| (mean, Spread::one(us))));
            row.figures.extend(latencies.percentile_us(95).map(|us| (p95, Spread::one(us))));
        }
        row
    };
    let columns = LATENCIES.into_iter().flat_map(|(mean, p95, _)| [mean, p95]);
    Table {
        title: format!("figure 5: gets of {CLIENTS} clients by the server that they are connected to"),
        columns: columns.map(Column::middle).collect(),
        pictured: None,
        ratio: None,
        rows: cluster.numbers.iter().enumerate().map(row).collect(),
    }
}

fn throughput_table(timeline: &Timeline) -> Result<(Table, Target), BenchError> {
    let throughput = timeline.throughput();
    let before = throughput.before;
    let in_moves = |unit: f64| -> Vec<f64> { throughput.in_moves.iter().map(|rate| rate / unit).collect() };
    // One ratio for each move.
    let ratio = Spread::of(&in_moves(before));
    let ratio = ratio.ok_or_else(|| failed(&"no get was answered before the moves, or during them"))?;
    let durations: Vec<f64> = timeline.moves.iter().map(|moved| moved.duration_ms).collect();
    let figures = [
        ("k/s before", Some(Spread::one(before / 1e3))),
        ("k/s in moves", Spread::of(&in_moves(1e3))),
        ("÷ before", Some(ratio)),
        ("dip %", Some(Spread::one(throughput.dip.depth_percent))),
        ("dip ms", Some(Spread::one(throughput.dip.width_ms))),
        ("dip % · ms", Some(Spread::one(throughput.dip.area_percent_ms))),
        ("move ms", Spread::of(&durations)),
        ("other moves", Some(Spread::one(float(timeline.other_moves)))),
    ];
    let columns = figures.map(|(name, _)| Column::full(name)).to_vec();
    let figures = figures.into_iter().filter_map(|(name, figure)| Some((name, figure?))).collect();
    let table = Table {
        title: format!(
            "figure 5: throughput of all clients, and its dip, by windows of {} ms",
            WINDOW.as_millis()
        ),
        columns,
        pictured: None,
        ratio: None,
        rows: vec![Row { name: format!("{MOVES} moves"), figures }],
    };
    let name = "throughput while partitions move ÷ before".into();
    Ok((table, Target { name, value: ratio, bound: RATIO_MIN, at_most: false }))
}

/// The lines of all charts.
fn series(cluster: &CacheCluster, timeline: &Timeline) -> Vec<Series> {
    let windows = timeline.windows();
    let means = server_lines(cluster, &windows, MEAN_TITLE, Latencies::mean_us);
    let p95s = server_lines(cluster, &windows, P95_TITLE, |latencies| latencies.percentile_us(95));
    let rates = windows.iter().map(|(time, samples)| (middle_s(&time), windows.rate(samples) / 1e3));
    let name = "all servers".into();
    let throughput = vec![Series { title: THROUGHPUT_TITLE.into(), name, points: rates.collect() }];
    let charts = [means, p95s, throughput].map(|mut chart| {
        chart.push(move_lines(timeline, &chart));
        chart
    });
    charts.into_iter().flatten().collect()
}

/// A line of each server, with a point for each window in which it answered.
fn server_lines(
    cluster: &CacheCluster,
    windows: &Windows<'_>,
    title: &str,
    value: impl Fn(&Latencies) -> Option<f64>,
) -> Vec<Series> {
    let line = |(server, number): (usize, &u16)| {
        let point = |(time, samples): (Range<u32>, &[Sample])| {
            let of_server = samples.iter().filter(|sample| sample.server == server);
            Some((middle_s(&time), value(&Latencies::of(of_server))?))
        };
        let points = windows.iter().filter_map(point).collect();
        Series { title: title.into(), name: format!("server {number}"), points }
    };
    cluster.numbers.iter().enumerate().map(line).collect()
}

/// Vertical lines at the moves, as high as the other lines of the chart.
fn move_lines(timeline: &Timeline, others: &[Series]) -> Series {
    let values = others.iter().flat_map(|other| &other.points).map(|(_, value)| *value);
    let top = values.fold(0.0, f64::max);
    let line = |time: &Range<u32>| {
        let at = middle_s(time);
        [(at, 0.0), (at, top), (at, 0.0)]
    };
    let points = timeline.times.iter().flat_map(line).collect();
    Series { title: others[0].title.clone(), name: "moves".into(), points }
}

/// The middle of a time in µs, in s.
fn middle_s(time: &Range<u32>) -> f64 {
    f64::midpoint(f64::from(time.start), f64::from(time.end)) / 1e6
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moves_are_vertical_lines() {
        let times = vec![1000..3000, 4000..5000];
        let timeline = Timeline { samples: Vec::new(), moves: Vec::new(), times, other_moves: 0 };
        let other = Series { title: "t".into(), name: "n".into(), points: vec![(0.0, 7.0), (1.0, 9.0)] };
        let lines = move_lines(&timeline, &[other]);
        assert_eq!(lines.points[..3], [(0.002, 0.0), (0.002, 9.0), (0.002, 0.0)]);
        assert_eq!((lines.points.len(), lines.title.as_str()), (6, "t"));
    }
}
