//! The core workloads of YCSB (Cooper et al., *Benchmarking Cloud Serving Systems with YCSB*, SoCC
//! 2010).

use std::time::Instant;

use aquifer_bench::BenchError;
use aquifer_bench::support::bytes::float;
use aquifer_bench::support::interrupt;
use aquifer_bench::support::random::{Access, Draw, Random};
use aquifer_bench::support::report::{Column, Row, Table};
use aquifer_bench::support::spread::Spread;

use super::servers::Servers;
use super::stores::{self, ComparedStore, value};

const ROUNDS: usize = 3;
const VALUE_BYTES: usize = 1000;
const SCAN_KEYS_MAX: usize = 100;

/// A workload: percentages of its operations.
#[derive(Clone, Copy)]
pub struct Workload {
    name: &'static str,
    reads: usize,
    updates: usize,
    inserts: usize,
    scans: usize,
    /// Whether reads are of the newest key. Operations beyond the percentages are reads that are
    /// followed by an update of the same key.
    reads_latest: bool,
}

const fn workload(
    name: &'static str,
    [reads, updates, inserts, scans]: [usize; 4],
    latest: bool,
) -> Workload {
    Workload { name, reads, updates, inserts, scans, reads_latest: latest }
}

/// All workloads.
pub const WORKLOADS: [Workload; 6] = [
    workload("A: 50 % updates", [50, 50, 0, 0], false),
    workload("B: 5 % updates", [95, 5, 0, 0], false),
    workload("C: reads only", [100, 0, 0, 0], false),
    workload("D: reads of the latest, 5 % inserts", [95, 0, 5, 0], true),
    workload("E: scans, 5 % inserts", [0, 0, 5, 95], false),
    workload("F: 50 % read and update", [50, 0, 0, 0], false),
];

/// Measures all stores.
///
/// # Errors
/// If a store fails, or a value is wrong.
pub fn table(
    servers: &Servers,
    keys: usize,
    operations: usize,
    bar: &indicatif::ProgressBar,
) -> Result<Table, BenchError> {
    let mut stores = servers.stores()?;
    let mut clients: Vec<Client> = stores.iter().map(|_| Client::new(keys)).collect();
    for (store, client) in stores.iter_mut().zip(&mut clients) {
        client.fill(store.as_mut())?;
    }
    let names: Vec<&'static str> = stores.iter().map(|store| store.name()).collect();
    let mut rows = Vec::new();
    for workload in WORKLOADS {
        bar.set_message(format!("YCSB {}", workload.name));
        let mut figures: Vec<Vec<f64>> = vec![Vec::new(); stores.len()];
        // A scan has about 50 operations in it.
        let count = if workload.scans > 0 { operations / 50 } else { operations };
        for _ in 0..ROUNDS {
            for ((store, client), figures) in stores.iter_mut().zip(&mut clients).zip(&mut figures) {
                interrupt::check()?;
                if let Some(rate) = client.play(store.as_mut(), workload, count)? {
                    figures.push(rate / 1e3);
                }
            }
        }
        let measured = names.iter().zip(&figures);
        let measured = measured.filter_map(|(name, values)| Some((*name, Spread::of(values)?)));
        rows.push(Row { name: workload.name.into(), figures: measured.collect() });
        bar.inc(1);
    }
    Ok(Table {
        title: "YCSB, thousand operations a second".into(),
        columns: names.into_iter().map(Column::middle).collect(),
        pictured: None,
        ratio: None,
        rows,
    })
}

/// The client's record of the keys, and of their versions.
struct Client {
    versions: Vec<u64>,
    /// Number of keys at the start. Later ones were inserted.
    first: usize,
    draw: Draw,
    random: Random,
}

fn key(number: usize) -> Vec<u8> {
    format!("user{number}").into_bytes()
}

impl Client {
    fn new(keys: usize) -> Self {
        let draw = Draw::new(Access::Zipf, keys);
        Self { versions: vec![0; keys], first: keys, draw, random: Random(7) }
    }

    fn fill(&mut self, store: &mut dyn ComparedStore) -> Result<(), BenchError> {
        (0..self.versions.len())
            .try_for_each(|number| store.put(&key(number), &value(number, 0, VALUE_BYTES)))
    }

    /// Plays a workload. Returns the operations a second; `None` if the store does not support it.
    fn play(
        &mut self,
        store: &mut dyn ComparedStore,
        workload: Workload,
        operations: usize,
    ) -> Result<Option<f64>, BenchError> {
        let began = Instant::now();
        for _ in 0..operations {
            let part = self.random.below(100);
            let bounds = [workload.reads, workload.updates, workload.inserts, workload.scans];
            let mut end = 0;
            let kind = bounds.iter().position(|percent| {
                end += percent;
                part < end
            });
            match kind {
                Some(0) => self.read(store, workload.reads_latest).map(drop)?,
                Some(1) => {
                    let number = self.draw.key();
                    self.update(store, number)?;
                }
                Some(2) => {
                    self.versions.push(0);
                    let number = self.versions.len() - 1;
                    store.put(&key(number), &value(number, 0, VALUE_BYTES))?;
                }
                Some(_) => {
                    let first = key(self.draw.key());
                    let count = 1 + self.random.below(SCAN_KEYS_MAX);
                    match store.scan(&first, count) {
                        Some(scanned) => scanned?,
                        None => return Ok(None),
                    }
                }
                None => {
                    let number = self.read(store, false)?;
                    self.update(store, number)?;
                }
            }
        }
        Ok(Some(float(operations as u64) / began.elapsed().as_secs_f64()))
    }

    /// Reads a key and compares it. Returns its number.
    fn read(&mut self, store: &mut dyn ComparedStore, is_latest: bool) -> Result<usize, BenchError> {
        let drawn = self.draw.key();
        // The newest key is the most popular one.
        let number = if is_latest { self.versions.len() - 1 - drawn % self.first } else { drawn };
        let mut out = Vec::new();
        let is_there = store.get(&key(number), &mut out)?;
        stores::check(
            store.name(),
            is_there.then_some(&out),
            &value(number, self.versions[number], VALUE_BYTES),
        )?;
        Ok(number)
    }

    fn update(&mut self, store: &mut dyn ComparedStore, number: usize) -> Result<(), BenchError> {
        self.versions[number] += 1;
        store.put(&key(number), &value(number, self.versions[number], VALUE_BYTES))
    }
}
