//! redis with page caches of several sizes, and with working sets of several sizes (Valet, Figures
//! 21 and 22).

use std::collections::BTreeMap;
use std::process::Command;

use aquifer::Fabric;
use aquifer_bench::support::bytes::{MIB, float, show_bytes};
use aquifer_bench::support::child::Watched;
use aquifer_bench::support::cluster::{Cluster, read_statistics};
use aquifer_bench::support::folder;
use aquifer_bench::support::progress;
use aquifer_bench::support::random::Access;
use aquifer_bench::support::report::{Column, Report, Row, Table, Target};
use aquifer_bench::support::spread::Spread;
use tempfile::TempDir;

use crate::bench::BenchError;
use crate::bench::apps::App;
use crate::bench::apps::redis::Redis;

/// Bytes that redis allocates for a key and its value.
const KEY_BYTES: u64 = 1150;
/// The limit in percent of redis' memory, where the cache has several sizes.
const LIMIT_PERCENT: u64 = 25;
/// Sizes of the cache, in percent of what does not fit in the limit.
const CACHE_PERCENTS: [u64; 5] = [0, 25, 50, 75, 100];
/// Sizes of the working set, in multiples of the limit.
const MULTIPLES: [u64; 5] = [1, 2, 4, 8, 16];
/// Size of the cache in multiples of the limit, where the working set has several sizes.
const CACHE_MULTIPLE: u64 = 2;

/// Figures of one configuration, by round.
#[derive(Debug, Default)]
struct Rounds {
    requests_per_s: Vec<f64>,
    p99_us: Vec<f64>,
    hits: Vec<f64>,
}

impl Rounds {
    fn row(&self, name: String) -> Row {
        let figures = [
            ("requests/s", &self.requests_per_s),
            ("p99 µs", &self.p99_us),
            ("pages from the cache ÷ all", &self.hits),
        ];
        let figures: BTreeMap<_, _> =
            figures.iter().filter_map(|(name, values)| Some((*name, Spread::of(values)?))).collect();
        Row { name, figures }
    }
}

fn table(title: String, rows: Vec<Row>) -> Table {
    Table {
        title,
        columns: vec![
            Column::full("requests/s"),
            Column::full("p99 µs"),
            Column::middle("pages from the cache ÷ all"),
        ],
        pictured: Some("requests/s"),
        ratio: None,
        rows,
    }
}

/// Runs redis on a cluster with a limit, and adds its figures.
fn play(
    redis: &Redis,
    cluster: &Cluster,
    limit_bytes: u64,
    folder: &TempDir,
    rounds: &mut Rounds,
) -> Result<(), BenchError> {
    let stats = folder.path().join("stats.json");
    let command = cluster.pooled_command(limit_bytes, &stats, redis.program())?;
    let (_, played) = redis.play(command, Watched::Started, &folder.path().join("output"))?;
    let played = played?;
    let stats = read_statistics(&stats)?;
    let count = played.latencies_us.len();
    rounds.requests_per_s.push(float(count as u64) / played.seconds);
    rounds.p99_us.extend(played.latencies_us.get(count * 99 / 100));
    let elsewhere = (stats.cache_hits + stats.remote_reads).max(1);
    rounds.hits.push(float(stats.cache_hits) / float(elsewhere));
    Ok(())
}

/// A redis, which must be installed, with keys of about this size together.
fn redis(access: Access, bytes: u64, requests: usize, folder: &TempDir) -> Option<Redis> {
    let keys = usize::try_from(bytes / KEY_BYTES).unwrap_or(usize::MAX);
    Redis::find(access, keys, requests, folder.path())
}

/// Measures redis with a quarter of its memory, by the size of the page cache.
///
/// # Errors
/// If something cannot be measured.
pub fn measure_sizes(report: &mut Report, quick: bool) -> Result<(), BenchError> {
    let (rounds, bytes, requests) = if quick { (1, 32 * MIB, 20_000) } else { (3, 112 * MIB, 60_000) };
    let folder = folder::temporary()?;
    for access in [Access::Uniform, Access::Zipf] {
        let Some(redis) = redis(access, bytes, requests, &folder) else {
            report.notes.push("not measured: redis-server is not installed".into());
            return Ok(());
        };
        let plain = redis.play(Command::new(redis.program()), Watched::All, &folder.path().join("output"))?;
        let peak_bytes = plain.0.resident_peak_bytes;
        let limit_bytes = peak_bytes * LIMIT_PERCENT / 100;
        let mut found: Vec<Rounds> = CACHE_PERCENTS.iter().map(|_| Rounds::default()).collect();
        let bar = progress::bar(rounds * CACHE_PERCENTS.len());
        for round in 1..=rounds {
            for (percent, found) in CACHE_PERCENTS.iter().zip(&mut found) {
                bar.set_message(format!("round {round}: {}, {percent} % in the cache", redis.name()));
                let cache_bytes = (peak_bytes - limit_bytes) * percent / 100;
                let cluster = Cluster::up_with_limited_cache(peak_bytes * 3, Fabric::Tcp, cache_bytes)?;
                play(&redis, &cluster, limit_bytes, &folder, found)?;
                bar.inc(1);
            }
        }
        bar.finish_and_clear();
        let (none, all) = (&found[0].requests_per_s, &found[CACHE_PERCENTS.len() - 1].requests_per_s);
        report.targets.extend(Spread::of_ratios(all, none).map(|value| Target {
            name: format!("{}: requests/s with all in the cache ÷ with nothing", redis.name()),
            value,
            bound: 1.5,
            at_most: false,
        }));
        let names = CACHE_PERCENTS.map(|percent| format!("cache of {percent} % of what does not fit"));
        let rows = names.into_iter().zip(&found).map(|(name, found)| found.row(name)).collect();
        let title = format!("{}, {LIMIT_PERCENT} % fit in the limit, over tcp", redis.name());
        report.tables.push(table(title, rows));
    }
    Ok(())
}

/// Measures redis with working sets of several sizes, at one limit and size of the page cache.
///
/// # Errors
/// If something cannot be measured.
pub fn measure_working_sets(report: &mut Report, quick: bool) -> Result<(), BenchError> {
    let (rounds, limit_bytes, requests) = if quick { (1, 12 * MIB, 20_000) } else { (3, 24 * MIB, 40_000) };
    let folder = folder::temporary()?;
    let cache_bytes = CACHE_MULTIPLE * limit_bytes;
    let largest = MULTIPLES[MULTIPLES.len() - 1] * limit_bytes;
    let bar = progress::bar(rounds * MULTIPLES.len());
    let mut found: Vec<Rounds> = MULTIPLES.iter().map(|_| Rounds::default()).collect();
    for round in 1..=rounds {
        for (multiple, found) in MULTIPLES.iter().zip(&mut found) {
            let Some(redis) = redis(Access::Zipf, multiple * limit_bytes, requests, &folder) else {
                report.notes.push("not measured: redis-server is not installed".into());
                return Ok(());
            };
            bar.set_message(format!("round {round}: {multiple} × the limit"));
            let cluster = Cluster::up_with_limited_cache(largest * 2, Fabric::Tcp, cache_bytes)?;
            play(&redis, &cluster, limit_bytes, &folder, found)?;
            bar.inc(1);
        }
    }
    bar.finish_and_clear();
    let names = MULTIPLES.map(|multiple| format!("working set of {multiple} × the limit"));
    let rows = names.into_iter().zip(&found).map(|(name, found)| found.row(name)).collect();
    let (limit, cache) = (show_bytes(limit_bytes), show_bytes(cache_bytes));
    report.tables.push(table(format!("redis, Zipf 0.99, limit {limit}, page cache {cache}, over tcp"), rows));
    Ok(())
}
