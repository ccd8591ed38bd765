//! Figures 12 and 13: clients that read and write objects of 32 bytes, and the part of direct reads
//! that fail because of a concurrent write.

use std::path::Path;
use std::sync::Barrier;
use std::time::Instant;

use aquifer_bench::BenchError;
use aquifer_bench::support::bytes::float;
use aquifer_bench::support::cluster::Cluster;
use aquifer_bench::support::interrupt;
use aquifer_bench::support::random::{Access, Draw, Random};
use aquifer_bench::support::report::{Column, Row, Table, Target};
use aquifer_bench::support::spread::Spread;
use aquifer_objects::client::ReadCounts;
use aquifer_objects::pointer::Pointer;

use super::live::{bytes_of, check, connect, fill};

const SIZE: usize = 32;
const HEAP_BYTES: u64 = 256 << 20;
const ROUNDS: usize = 3;
/// Clients of figure 12, and of figure 13.
const CLIENTS: [(usize, &str); 4] = [(1, "1 client"), (2, "2 clients"), (8, "8 clients"), (32, "32 clients")];
const FAILED: &str = "failed reads %, 32 clients";

/// Measures all numbers of clients. Returns the tables of both figures, and the target.
pub fn tables(is_quick: bool) -> Result<(Vec<Table>, Vec<Target>), BenchError> {
    let (objects, operations) = if is_quick { (5000, 10_000) } else { (100_000, 60_000) };
    let cluster = Cluster::up_with_heaps(64 << 20, HEAP_BYTES)?;
    let agent = cluster.state().join("agent.sock");
    let pointers = fill(&mut connect(&agent, false)?, objects, SIZE)?;
    let (mut rows, mut targets) = (Vec::new(), Vec::new());
    for (access, skew) in [(Access::Uniform, "uniform"), (Access::Zipf, "Zipf 0.99")] {
        for writes in [0, 5, 50] {
            let mut row = Row { name: format!("{skew}, {writes} % writes"), figures: Default::default() };
            for (clients, name) in CLIENTS {
                let (mut rates, mut failed) = (Vec::new(), Vec::new());
                for round in 0..ROUNDS {
                    interrupt::check()?;
                    let load = Load { access, writes, clients, operations: operations / clients, round };
                    let (rate, counts) = load.play(&agent, &pointers)?;
                    rates.push(rate / 1e3);
                    failed.push(100.0 * float(counts.busy) / float((counts.direct + counts.busy).max(1)));
                }
                row.figures.insert(name, Spread::of(&rates).expect("they were measured"));
                if clients == 32 {
                    let failed = Spread::of(&failed).expect("they were measured");
                    row.figures.insert(FAILED, failed);
                    targets.extend((access == Access::Zipf && writes == 50).then(|| Target {
                        name: "failed direct reads %, Zipf 0.99, 50 % writes, 32 clients".into(),
                        value: failed,
                        bound: 0.1,
                        at_most: true,
                    }));
                }
            }
            rows.push(row);
        }
    }
    let names = CLIENTS.map(|(_, name)| name);
    let table = Table {
        title: "figures 12 and 13: objects of 32 B over TCP, thousand operations a second".into(),
        columns: names.into_iter().map(Column::middle).chain([Column::full(FAILED)]).collect(),
        pictured: None,
        ratio: None,
        rows,
    };
    Ok((vec![table], targets))
}

/// Clients that work at once.
#[derive(Clone, Copy)]
struct Load {
    access: Access,
    /// Writes among the operations, in percent.
    writes: usize,
    clients: usize,
    /// Operations of each client.
    operations: usize,
    round: usize,
}

impl Load {
    /// Runs all clients. Returns the operations a second, and counts of reads.
    fn play(self, agent: &Path, pointers: &[Pointer]) -> Result<(f64, ReadCounts), BenchError> {
        let barrier = Barrier::new(self.clients + 1);
        let barrier = &barrier;
        std::thread::scope(|scope| {
            let clients: Vec<_> = (0..self.clients)
                .map(|number| scope.spawn(move || self.work(number, agent, pointers, barrier)))
                .collect();
            barrier.wait();
            let began = Instant::now();
            let mut counts = ReadCounts::default();
            for client in clients {
                let done = client.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
                counts.direct += done.direct;
                counts.busy += done.busy;
            }
            let rate = float((self.clients * self.operations) as u64) / began.elapsed().as_secs_f64();
            Ok((rate, counts))
        })
    }

    fn work(
        self,
        number: usize,
        agent: &Path,
        pointers: &[Pointer],
        barrier: &Barrier,
    ) -> Result<ReadCounts, BenchError> {
        let connected = connect(agent, true);
        let mut draw = Draw::new(self.access, pointers.len());
        let mut random = Random((self.round * 1000 + number) as u64);
        for _ in 0..random.below(1000) {
            let _skipped = draw.key();
        }
        barrier.wait();
        let mut client = connected?;
        let mut out = [0; SIZE];
        for _ in 0..self.operations {
            let object = draw.key();
            let pointer = &mut pointers[object].clone();
            if random.below(100) < self.writes {
                client.write(pointer, &bytes_of(object, SIZE)).map_err(BenchError::heap)?;
            } else {
                client.get(pointer, &mut out).map_err(BenchError::heap)?;
                check(object, &out)?;
            }
        }
        Ok(client.counts())
    }
}
