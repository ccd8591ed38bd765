//! The allocation service: a session with the agent, measured in the program.

use std::collections::BTreeMap;
use std::time::Instant;

use aquifer::Fabric;
use aquifer_bench::BenchError;
use aquifer_bench::support::cluster::Cluster;
use aquifer_bench::support::report::{Column, Row, Table, Target};
use aquifer_bench::support::spread::{Spread, mean_us, permille_us};
use aquifer_client::{Extent, Session};

/// Memory that the nodes lend together.
const MEMORY_BYTES: u64 = 512 << 20;
/// Most extents held while each allocation comes from the pool: an eighth of a user's limit.
const HELD_MAX: usize = 8192;
const AT_ONCE: usize = 64;
/// Number of allocations of 64 extents at once, which are held.
const HELD_AT_ONCE_MAX: usize = 64;
/// Size of a large extent, and number of its allocations.
const LARGE_BYTES: u64 = 64 << 20;
const LARGE_MAX: usize = 100;

/// Names of the rows in order.
const STEPS: [&str; 9] = [
    "allocate, in stock",
    "free",
    "allocate, from the nodes",
    "allocate 64 at once, from the nodes, each",
    "allocate 64 at once, in stock, each",
    "write 4 KiB",
    "read 4 KiB",
    "allocate 64 MiB",
    "free 64 MiB",
];

/// Latencies of each row in ns, a list for each round.
type Rounds = [Vec<Vec<u64>>; STEPS.len()];

/// Measures over each fabric; returns tables and targets.
///
/// # Errors
/// If a cluster cannot be started, or fails.
pub fn measure(rounds: usize, count: usize) -> Result<(Vec<Table>, Vec<Target>), BenchError> {
    let mut tables = Vec::new();
    let mut targets = Vec::new();
    for fabric in [Fabric::Shm, Fabric::Tcp] {
        let cluster = Cluster::up(MEMORY_BYTES, fabric, None)?;
        let mut all = Rounds::default();
        for _ in 0..rounds {
            let session = Session::open_at(&cluster.state().join("agent.sock"))?;
            for (all, new) in all.iter_mut().zip(round(session, count)?) {
                all.push(new);
            }
        }
        let rows: Vec<Row> = STEPS.iter().zip(&all).map(|(step, rounds)| row(step, rounds)).collect();
        let median = rows[0].figures.get("p50 µs").copied();
        targets.extend(median.map(|value| Target {
            name: format!("{}, over {}: p50 µs", STEPS[0], fabric.name()),
            value,
            bound: 2.0,
            at_most: true,
        }));
        tables.push(Table {
            title: format!(
                "the service: extents of 4 KiB, and of 64 MiB, one program, over {}",
                fabric.name()
            ),
            columns: ["p50 µs", "p99 µs", "mean µs"].map(Column::full).to_vec(),
            pictured: Some("p50 µs"),
            ratio: None,
            rows,
        });
    }
    Ok((tables, targets))
}

fn round(mut session: Session, count: usize) -> Result<[Vec<u64>; STEPS.len()], BenchError> {
    let mut times: [Vec<u64>; STEPS.len()] = Default::default();
    let mut timed = |step: usize, each: u64, start: Instant| {
        times[step].push(u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX) / each);
    };
    for _ in 0..count {
        let start = Instant::now();
        let extent = session.allocate(4096)?;
        timed(0, 1, start);
        let start = Instant::now();
        session.free(extent)?;
        timed(1, 1, start);
    }
    let mut held: Vec<Extent> = Vec::new();
    for _ in 0..count.min(HELD_MAX) {
        let start = Instant::now();
        held.push(session.allocate(4096)?);
        timed(2, 1, start);
    }
    for _ in 0..(count / AT_ONCE).min(HELD_AT_ONCE_MAX) {
        let start = Instant::now();
        held.extend(session.allocate_many(4096, AT_ONCE)?);
        timed(3, AT_ONCE as u64, start);
    }
    session.free_many(&held)?;
    for _ in 0..count / AT_ONCE {
        let start = Instant::now();
        let extents = session.allocate_many(4096, AT_ONCE)?;
        timed(4, AT_ONCE as u64, start);
        session.free_many(&extents)?;
    }
    let extent = session.allocate(4096)?;
    let mut page = [7; 4096];
    for _ in 0..count {
        let start = Instant::now();
        session.write(&extent, 0, &page)?;
        timed(5, 1, start);
        let start = Instant::now();
        session.read(&extent, 0, &mut page)?;
        timed(6, 1, start);
    }
    for _ in 0..count.min(LARGE_MAX) {
        let start = Instant::now();
        let large = session.allocate(LARGE_BYTES)?;
        timed(7, 1, start);
        let start = Instant::now();
        session.free(large)?;
        timed(8, 1, start);
    }
    Ok(times)
}

fn row(name: &str, rounds: &[Vec<u64>]) -> Row {
    let figure = |of: &dyn Fn(&[u64]) -> f64| {
        let values = rounds.iter().map(|times| {
            let mut sorted = times.clone();
            sorted.sort_unstable();
            of(&sorted)
        });
        Spread::of(&values.collect::<Vec<f64>>())
    };
    let figures = [
        ("p50 µs", figure(&|times| permille_us(times, 500))),
        ("p99 µs", figure(&|times| permille_us(times, 990))),
        ("mean µs", figure(&mean_us)),
    ];
    let figures: BTreeMap<_, _> =
        figures.into_iter().filter_map(|(name, spread)| Some((name, spread?))).collect();
    Row { name: name.into(), figures }
}
