//! Figures 9 and 10: the time of each call by the size of objects, over shared memory and TCP.

use std::path::Path;
use std::time::Instant;

use aquifer_bench::BenchError;
use aquifer_bench::support::cluster::Cluster;
use aquifer_bench::support::interrupt;
use aquifer_bench::support::report::{Column, Row, Table};
use aquifer_bench::support::spread::Spread;
use aquifer_objects::client::HeapClient;
use aquifer_objects::pointer::Pointer;

use super::live::connect;

const SIZES: [u32; 5] = [8, 64, 256, 2000, 16_000];
const HEAP_BYTES: u64 = 256 << 20;
const ROUNDS: usize = 5;

const COLUMNS: [&str; 7] =
    ["allocate µs", "write µs", "read µs", "direct µs", "correct µs", "release µs", "free µs"];

/// Measures in shared memory and over TCP. Returns a table for each.
pub fn tables(is_quick: bool) -> Result<Vec<Table>, BenchError> {
    let objects = if is_quick { 200 } else { 2000 };
    let cluster = Cluster::up_with_heaps(64 << 20, HEAP_BYTES)?;
    let agent = cluster.state().join("agent.sock");
    let mut tables = Vec::new();
    for (name, is_remote) in [("in shared memory", false), ("over TCP", true)] {
        let mut rows = Vec::new();
        for size in SIZES {
            interrupt::check()?;
            rows.push(row(&agent, is_remote, size, objects)?);
        }
        tables.push(Table {
            title: format!("figures 9 and 10: time of each call {name}, median of all calls"),
            columns: COLUMNS.map(Column::full).to_vec(),
            pictured: None,
            ratio: None,
            rows,
        });
    }
    Ok(tables)
}

/// The medians of one round.
fn row(agent: &Path, is_remote: bool, size: u32, objects: usize) -> Result<Row, BenchError> {
    let mut client = connect(agent, is_remote)?;
    let mut medians: [Vec<f64>; 7] = Default::default();
    let bytes = vec![7; size as usize];
    let mut out = vec![0; size as usize];
    for _ in 0..ROUNDS {
        interrupt::check()?;
        let mut pointers: Vec<Pointer> = Vec::with_capacity(objects);
        let allocate = median(objects, |_| {
            pointers.push(client.allocate(size).map_err(BenchError::heap)?);
            Ok(())
        })?;
        let mut on = |call: &mut dyn FnMut(&mut HeapClient, &mut Pointer) -> Result<(), BenchError>| {
            median(objects, |at| call(&mut client, &mut pointers[at]))
        };
        let times = [
            allocate,
            on(&mut |client, pointer| client.write(pointer, &bytes).map(drop).map_err(BenchError::heap))?,
            on(&mut |client, pointer| client.read(pointer, &mut out).map(drop).map_err(BenchError::heap))?,
            on(&mut |client, pointer| {
                client.direct_read(*pointer, &mut out).map(drop).map_err(BenchError::heap)
            })?,
            on(&mut |client, pointer| client.correct(pointer).map(drop).map_err(BenchError::heap))?,
            on(&mut |client, pointer| client.release(pointer).map_err(BenchError::heap))?,
            on(&mut |client, pointer| client.free(*pointer).map_err(BenchError::heap))?,
        ];
        medians.iter_mut().zip(times).for_each(|(medians, time)| medians.push(time));
    }
    let spread = |values: &Vec<f64>| Spread::of(values).expect("they were measured");
    let figures = COLUMNS.into_iter().zip(medians.iter().map(spread)).collect();
    Ok(Row { name: format!("{size} B"), figures })
}

/// The median time of `count` calls, in µs.
fn median(count: usize, mut call: impl FnMut(usize) -> Result<(), BenchError>) -> Result<f64, BenchError> {
    let mut times = Vec::with_capacity(count);
    for at in 0..count {
        let began = Instant::now();
        call(at)?;
        times.push(began.elapsed().as_secs_f64() * 1e6);
    }
    times.sort_by(f64::total_cmp);
    Ok(times[count / 2])
}
