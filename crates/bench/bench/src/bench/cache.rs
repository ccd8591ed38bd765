//! `aquifer bench cache`: `aquifer cache` beside memcached.
//!
//! Each server runs on one processor and the load on another one, unless a part says otherwise. The
//! load checks each reply.

mod connection;
mod hits;
mod items;
mod load;
mod memory;
mod moves;
mod pool;
mod processors;
mod replies;
mod requests;
mod servers;
mod threads;
mod zipf;

use std::time::Duration;

use aquifer_bench::support::progress;
use aquifer_bench::support::report::Report;

use super::{BenchArgs, BenchError};
use processors::{Place, Processors};
use servers::{MEMCACHED, Programs};

/// Targets, for `aquifer bench list`.
pub const TARGETS: &str = "targets: ≥ 1.2× memcached's gets and sets for each CPU second, with a pipeline of \
    10 ≥ 5.2× and ≥ 1.7×; ≤ 26 bytes over key and value, ≤ 20 without cas; a hit ratio ≥ memcached's − 0.2 \
    points; while partitions move, ≥ 0.9 of the throughput, p99 of sets ≤ 1 ms, and all moves succeed under \
    ≥ 200,000 sets/s; hits with a pool over tcp: p99 ≤ 1 ms";

const CONGESTION_CONTROL: &str = "/proc/sys/net/ipv4/tcp_congestion_control";
/// Parts of the bench, for `--only`.
const PARTS: [&str; 6] = ["requests", "threads", "memory", "hits", "moves", "pool"];

/// Amount of work.
#[derive(Clone, Copy, Debug)]
struct Volume {
    requests: requests::Volume,
    memory_keys: u32,
    hits: hits::Volume,
    moves: moves::Volume,
    pool: pool::Volume,
}

const FULL: Volume = Volume {
    requests: requests::Volume {
        keys: 200_000,
        rounds: 11,
        warm_up: Duration::from_millis(200),
        window: Duration::from_secs(1),
    },
    memory_keys: 1_000_000,
    hits: hits::Volume { memory_mib: 64, operations: 2_000_000 },
    moves: moves::Volume {
        keys: 400_000,
        memory_mib: 256,
        balanced_for: Duration::from_secs(3),
        balance_timeout: Duration::from_secs(30),
        stage: Duration::from_secs(3),
        paused_moves: 10,
    },
    pool: pool::Volume { memory_mib: 64, rounds: 3, window: Duration::from_secs(3) },
};

const QUICK: Volume = Volume {
    requests: requests::Volume {
        keys: 20_000,
        rounds: 1,
        warm_up: Duration::from_millis(50),
        window: Duration::from_millis(200),
    },
    memory_keys: 100_000,
    hits: hits::Volume { memory_mib: 16, operations: 20_000 },
    moves: moves::Volume {
        keys: 20_000,
        memory_mib: 64,
        balanced_for: Duration::from_secs(1),
        balance_timeout: Duration::from_secs(5),
        stage: Duration::from_secs(1),
        paused_moves: 2,
    },
    pool: pool::Volume { memory_mib: 16, rounds: 1, window: Duration::from_millis(300) },
};

/// Runs the bench.
///
/// # Errors
/// If it is interrupted, a server cannot be used, a reply is wrong, or `--only` names no part.
pub fn run(args: &BenchArgs) -> Result<Report, BenchError> {
    let volume = if args.quick { QUICK } else { FULL };
    if let Some(only) = args.only.as_ref().filter(|only| !PARTS.contains(&only.as_str())) {
        return Err(BenchError::NoSuchFigure { only: only.clone(), known: PARTS.join(", ") });
    }
    let processors = Processors::find()?;
    let programs = Programs::find(processors, args.pogocache.as_deref())?;
    // Before this thread is pinned: the report has the number of processors.
    let mut report = Report::new("cache", args.quick);
    processors.pin_load()?;
    report.notes = notes(&programs, processors, volume);
    let is_chosen = |part: &str| args.only.as_ref().is_none_or(|only| only == part);
    let bar = progress::bar(
        6 * volume.requests.rounds + 4 + hits::count() + moves::STEPS + pool::count(volume.pool),
    );
    let show = |what: &str| {
        bar.set_message(what.to_owned());
        bar.inc(1);
    };
    if is_chosen(PARTS[0]) {
        let (tables, targets) = requests::tables(&programs, volume.requests, &show)?;
        report.tables.extend(tables);
        report.targets.extend(targets);
    }
    for (part, measure) in [
        (PARTS[1], &(|| threads::table(&programs, volume.requests, &show)) as &dyn Fn() -> _),
        (PARTS[2], &|| memory::table(&programs, volume.memory_keys, &show)),
        (PARTS[3], &|| hits::table(&programs, volume.hits, &show)),
    ] {
        if is_chosen(part) {
            let (table, targets) = measure()?;
            report.tables.push(table);
            report.targets.extend(targets);
        }
    }
    if is_chosen(PARTS[4]) {
        let measure = || moves::figures(&programs, volume.moves, &show);
        let figures = processors.start_on(Place::All, measure)?;
        report.tables.extend(figures.tables);
        report.targets.extend(figures.targets);
        // A picture has lines or bars; with all parts it has the bars of the others.
        report.series.extend(figures.series.into_iter().filter(|_| args.only.is_some()));
    }
    if is_chosen(PARTS[5]) {
        let (tables, targets) =
            processors.start_on(Place::All, || pool::tables(&programs, volume.pool, &show))?;
        report.tables.extend(tables);
        report.targets.extend(targets);
    }
    bar.finish_and_clear();
    Ok(report)
}

fn notes(programs: &Programs, processors: Processors, volume: Volume) -> Vec<String> {
    let hits = volume.hits;
    let mut notes = vec![
        format!(
            "requests: {} keys of 20 bytes with values of 100, keys equally frequent; 16 connections, each \
             sends a batch (pipeline) when it has the replies to the last one; latency is that of a batch",
            volume.requests.keys
        ),
        "processor time is that of all threads of a server, in user and kernel mode. The load polls and does \
         not sleep, so that no server has to wake it"
            .into(),
        "threads: servers and load share all processors".into(),
        "memory: resident anonymous and shared memory, without programs and libraries".into(),
        format!(
            "hits: keys with about four times as many bytes as -m {}, each set once in a random order; then \
             gets in batches of 10, each missed key is set, half of the operations unmeasured. With expiry, \
             40,000 operations a second, and -m {} for short values; a server that is slower is not compared",
            hits.memory_mib,
            (hits.memory_mib / 4).max(16)
        ),
        moves::note(volume.moves),
        pool::note(volume.pool),
    ];
    if !programs.has_memcached() {
        notes.push(format!("{MEMCACHED} is not installed, and left out"));
    }
    if std::fs::read_to_string(CONGESTION_CONTROL).is_ok_and(|name| name.starts_with("bbr")) {
        notes.push("the host's congestion control is bbr, which paces the replies of servers".into());
    }
    if !processors.are_separate() {
        notes.push("servers and load share the only processor".into());
    }
    notes
}
