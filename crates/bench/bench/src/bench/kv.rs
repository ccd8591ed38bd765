//! `aquifer bench kv`: a key-value store in remote memory beside redis and memcached.
//!
//! All servers run on this machine, with two processors or more. One client uses each in turn. Its
//! gets are checked.

mod blocks;
pub(super) mod cached;
mod servers;
mod stores;
mod tls;
mod ycsb;

use std::time::Instant;

use aquifer_bench::support::bytes::float;
use aquifer_bench::support::random::Random;
use aquifer_bench::support::report::{Column, Report, Row, Table, Target};
use aquifer_bench::support::spread::Spread;
use aquifer_bench::support::{interrupt, progress};

use super::{BenchArgs, BenchError};
use servers::Servers;
use stores::{ComparedStore, value};

/// Targets, for `aquifer bench list`.
pub const TARGETS: &str = "targets: gets of 4 KiB with a latency ≤ 1× that of memcached over TCP and ≤ 0.1× \
    in shared memory, ≥ 4× the gets for each second of the server's processor with 32 at once";

/// Gets that are in flight at once.
pub(super) const DEPTH: usize = 32;
const ROUNDS: usize = 5;
const SIZES: [usize; 3] = [100, 1000, 4096];

/// Amount of work.
#[derive(Clone, Copy)]
struct Volume {
    keys: usize,
    gets: usize,
    operations: usize,
}

/// Runs the bench.
///
/// # Errors
/// If it is interrupted, a server cannot be used, or a value is wrong.
pub fn run(args: &BenchArgs) -> Result<Report, BenchError> {
    let volume = if args.quick {
        Volume { keys: 2000, gets: 2000, operations: 5000 }
    } else {
        Volume { keys: 20_000, gets: 20_000, operations: 50_000 }
    };
    let servers = Servers::start()?;
    let mut report = Report::new("kv", args.quick);
    report.notes = notes(&servers, volume);
    let bar = progress::bar(SIZES.len() * ROUNDS + ycsb::WORKLOADS.len());
    for size in SIZES {
        let mut stores = servers.stores()?;
        let (table, targets) = gets(&mut stores, size, volume, &bar)?;
        report.tables.push(table);
        report.targets.extend(targets);
    }
    report.tables.push(ycsb::table(&servers, volume.keys, volume.operations, &bar)?);
    report.tables.push(blocks::table(2 * volume.keys)?);
    bar.finish_and_clear();
    Ok(report)
}

fn notes(servers: &Servers, volume: Volume) -> Vec<String> {
    let mut notes = vec![
        format!(
            "{} keys; values are random; one client, which has used all keys before and so remembers where \
             most are; gets at random",
            volume.keys
        ),
        format!(
            "{DEPTH} at once: a batch of one-sided reads; for memcached one `get` of {DEPTH} keys; for redis \
             {DEPTH} pipelined commands"
        ),
        "server µs: processor time of all threads of the server for a get. Nothing of the server is used for \
         a get in shared memory"
            .into(),
        "TCP: encrypted, as by default; TLS: version 1.3 with AES-128-GCM or better".into(),
        "blocks: the case study of FineMem; twice as many items, in a heap of this process. Its classes have \
         blocks of their own size in the product, so that each has 32 slots or more"
            .into(),
        "YCSB: values of 1,000 bytes, keys by Zipf 0.99, one operation at a time. A scan of E has up to 100 \
         keys, in the order of the index, which is not that of the keys; the peers have none"
            .into(),
    ];
    notes.extend(servers.missing().map(|program| format!("{program} is not installed, and left out")));
    notes
}

/// Results of one store.
#[derive(Default)]
struct Measured {
    latency_us: Vec<f64>,
    slowest_us: Vec<f64>,
    batched_k: Vec<f64>,
    server_us: Vec<f64>,
}

fn gets(
    stores: &mut [Box<dyn ComparedStore>],
    size: usize,
    volume: Volume,
    bar: &indicatif::ProgressBar,
) -> Result<(Table, Vec<Target>), BenchError> {
    let keys: Vec<Vec<u8>> = (0..volume.keys).map(|key| format!("{size}:{key}").into_bytes()).collect();
    for store in stores.iter_mut() {
        for (number, key) in keys.iter().enumerate() {
            store.put(key, &value(number, 0, size))?;
        }
        // The client caches the locations of all keys.
        get_all(store.as_mut(), &keys, size)?;
    }
    let mut measured: Vec<Measured> = stores.iter().map(|_| Measured::default()).collect();
    for round in 0..ROUNDS {
        bar.set_message(format!("gets of {size} bytes"));
        for (store, measured) in stores.iter_mut().zip(&mut measured) {
            interrupt::check()?;
            measure(store.as_mut(), measured, &keys, size, volume.gets, round)?;
        }
        bar.inc(1);
    }
    let rows = stores.iter().zip(&measured).map(|(store, measured)| measured.row(store.name()));
    let columns = ["µs", "slowest 1 % µs", "k/s at once", "server µs"];
    let table = Table {
        title: format!("gets of {size} bytes: one at a time, and {DEPTH} at once"),
        columns: columns.map(Column::full).to_vec(),
        pictured: Some("µs"),
        ratio: None,
        rows: rows.collect(),
    };
    let targets = if size == 4096 { targets(stores, &measured) } else { Vec::new() };
    Ok((table, targets))
}

fn get_all(store: &mut dyn ComparedStore, keys: &[Vec<u8>], size: usize) -> Result<(), BenchError> {
    let mut out = Vec::new();
    for (number, key) in keys.iter().enumerate() {
        let is_there = store.get(key, &mut out)?;
        stores::check(store.name(), is_there.then_some(&out), &value(number, 0, size))?;
    }
    Ok(())
}

fn measure(
    store: &mut dyn ComparedStore,
    measured: &mut Measured,
    keys: &[Vec<u8>],
    size: usize,
    gets: usize,
    round: usize,
) -> Result<(), BenchError> {
    let mut random = Random(round as u64 + 1);
    let expected: Vec<Vec<u8>> = (0..keys.len()).map(|number| value(number, 0, size)).collect();
    let mut out = Vec::new();
    let mut times_us = Vec::with_capacity(gets);
    for _ in 0..gets {
        let at = random.below(keys.len());
        let began = Instant::now();
        let is_there = store.get(&keys[at], &mut out)?;
        times_us.push(began.elapsed().as_secs_f64() * 1e6);
        stores::check(store.name(), is_there.then_some(&out), &expected[at])?;
    }
    times_us.sort_by(f64::total_cmp);
    measured.latency_us.push(times_us[gets / 2]);
    measured.slowest_us.push(times_us[gets * 99 / 100]);
    let batches: Vec<Vec<usize>> =
        (0..gets / DEPTH).map(|_| (0..DEPTH).map(|_| random.below(keys.len())).collect()).collect();
    let cpu = store.server_cpu_ns();
    let began = Instant::now();
    for batch in &batches {
        let wanted: Vec<&[u8]> = batch.iter().map(|at| keys[*at].as_slice()).collect();
        let name = store.name();
        store.get_many(&wanted, &mut |place, found| stores::check(name, found, &expected[batch[place]]))?;
    }
    let count = float((batches.len() * DEPTH) as u64);
    measured.batched_k.push(count / began.elapsed().as_secs_f64() / 1e3);
    measured.server_us.push(float(store.server_cpu_ns() - cpu) / 1e3 / count);
    Ok(())
}

impl Measured {
    fn row(&self, name: &str) -> Row {
        let spread = |values: &[f64]| Spread::of(values).expect("they were measured");
        let figures = [
            ("µs", spread(&self.latency_us)),
            ("slowest 1 % µs", spread(&self.slowest_us)),
            ("k/s at once", spread(&self.batched_k)),
            ("server µs", spread(&self.server_us)),
        ];
        Row { name: name.into(), figures: figures.into_iter().collect() }
    }
}

fn targets(stores: &[Box<dyn ComparedStore>], measured: &[Measured]) -> Vec<Target> {
    let find = |name: &str| {
        stores.iter().zip(measured).find(|(store, _)| store.name() == name).map(|(_, found)| found)
    };
    let ratio = |ours: &[f64], theirs: &[f64]| Spread::of_ratios(ours, theirs).expect("they were measured");
    let mut targets = Vec::new();
    for (ours, theirs) in [(stores::TCP, stores::MEMCACHED_TLS), (stores::PLAIN, stores::MEMCACHED)] {
        let Some((ours_found, theirs_found)) = find(ours).zip(find(theirs)) else { continue };
        targets.push(Target {
            name: format!("latency, {ours} ÷ {theirs}"),
            value: ratio(&ours_found.latency_us, &theirs_found.latency_us),
            bound: 1.0,
            at_most: true,
        });
        targets.push(Target {
            name: format!("gets for a second of the server, {ours} ÷ {theirs}, {DEPTH} at once"),
            value: ratio(&theirs_found.server_us, &ours_found.server_us),
            bound: 4.0,
            at_most: false,
        });
    }
    if let Some((ours, theirs)) = find(stores::SHARED).zip(find(stores::MEMCACHED)) {
        targets.push(Target {
            name: format!("latency, {} ÷ {}", stores::SHARED, stores::MEMCACHED),
            value: ratio(&ours.latency_us, &theirs.latency_us),
            bound: 0.1,
            at_most: true,
        });
    }
    targets
}
