//! Replay of a trace on this machine. Clients take the lines in turn, each at its time.

use std::time::{Duration, Instant};

use aquifer_bench::BenchError;
use aquifer_bench::support::allocation_trace::{AllocRequest, Arrival, Replay};
use aquifer_bench::support::report::Table;
use aquifer_bench::support::{interrupt, procs, progress};
use aquifer_pool::SizeClass;
use aquifer_pool::size::SECTION_BYTES;

use super::clients::{AllocClient, Allocation, RealAllocator};
use super::round::Measured;
use super::{NODE_SECTIONS, Node, connect, table};

/// Replays a trace; returns a table for each fabric.
///
/// # Errors
/// If the serving process cannot be started, or an allocator fails.
pub fn replay(arrivals: &[Arrival], clients: usize, rounds: usize) -> Result<Vec<Table>, BenchError> {
    let node = Node::start()?;
    let bar = progress::bar(node.reaches.len() * RealAllocator::ALL.len() * rounds);
    let mut tables = Vec::new();
    for reach in &node.reaches {
        let mut all: Vec<Vec<Measured>> = vec![Vec::new(); RealAllocator::ALL.len()];
        for _ in 0..rounds {
            for (allocator, all) in RealAllocator::ALL.into_iter().zip(&mut all) {
                interrupt::check()?;
                bar.set_message(format!("the trace, over {}: {}", reach.provider(), allocator.name()));
                let alloc_clients = connect(reach, allocator, clients)?;
                all.push(play(alloc_clients, node.process.pid(), arrivals)?);
                bar.inc(1);
            }
        }
        let title = format!("the trace for real, over {}: {clients} clients", reach.provider());
        tables.push(table(&title, &all));
    }
    bar.finish_and_clear();
    Ok(tables)
}

fn play(alloc_clients: Vec<AllocClient>, node: u32, arrivals: &[Arrival]) -> Result<Measured, BenchError> {
    let count = alloc_clients.len();
    let share = u64::from(NODE_SECTIONS) * SECTION_BYTES / 2 / count as u64;
    let before_ns = procs::cpu_ns(node);
    let start = Instant::now();
    let mut all = Measured::default();
    std::thread::scope(|scope| {
        let work = |(number, client)| {
            let replay = Replay::new(arrivals, number, count, share);
            scope.spawn(move || replay_part(client, replay, start))
        };
        let workers: Vec<_> = alloc_clients.into_iter().enumerate().map(work).collect();
        let mut done = workers
            .into_iter()
            .map(|worker| worker.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
        done.try_for_each(|done| done.map(|measured| all.add(&measured)))
    })
    .map_err(|reason| BenchError::Allocator { reason })?;
    all.node_cpu_ns = procs::cpu_ns(node).saturating_sub(before_ns);
    all.latencies_ns.sort_unstable();
    Ok(all)
}

/// Replays a client's part. The latency of a late operation counts from its time in the trace; that
/// of another one from the wake-up of the thread, so that timers are not measured.
fn replay_part(mut client: AllocClient, mut replay: Replay<'_>, start: Instant) -> Result<Measured, String> {
    let mut measured = Measured::default();
    let mut held: Vec<Allocation> = Vec::new();
    let ns = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
    while let Some((request, at_ns)) = replay.next(ns(start.elapsed())) {
        let before = client.counts();
        let began = wait_until(start, start + Duration::from_nanos(at_ns));
        replay.begun(request);
        let done = match request {
            AllocRequest::Allocate(class) => allocate(&mut client, class, &mut held),
            AllocRequest::FreeAny | AllocRequest::FreeOldest => client.free(held.remove(0)),
        };
        done?;
        let took_ns = ns(began.elapsed());
        if request.is_allocation() {
            measured.latencies_ns.push(took_ns);
            measured.counts = measured.counts.and(client.counts().since(before));
        } else {
            measured.frees += 1;
            measured.free_ns += took_ns;
        }
    }
    held.into_iter().try_for_each(|allocation| client.free(allocation))?;
    Ok(measured)
}

fn allocate(client: &mut AllocClient, class: SizeClass, held: &mut Vec<Allocation>) -> Result<(), String> {
    held.push(client.allocate(class)?);
    Ok(())
}

/// Waits until `due`. Returns `due` if that is past, else the time of the wake-up.
fn wait_until(start: Instant, due: Instant) -> Instant {
    let now = Instant::now();
    if now >= due {
        return due.max(start);
    }
    // Sleeps instead of polling, since there are more clients than processors.
    std::thread::sleep(due - now);
    Instant::now()
}
