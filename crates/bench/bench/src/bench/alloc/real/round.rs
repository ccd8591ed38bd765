//! A round of an allocator: in turns, all clients allocate, then all free half of their extents.

use std::sync::Barrier;
use std::time::Instant;

use aquifer_bench::BenchError;
use aquifer_bench::support::bytes::float;
use aquifer_bench::support::procs;
use aquifer_pool::SizeClass;
use aquifer_pool::size::SECTION_BYTES;
use parking_lot::Mutex;

use super::NODE_SECTIONS;
use super::clients::{AllocClient, Allocation};
use super::counted::Counts;

/// Most extents of a client, unless its share of half of the memory is smaller.
const HELD_MAX: u64 = 64;

/// Results of a round.
#[derive(Clone, Debug, Default)]
pub struct Measured {
    /// Latency of each allocation in nanoseconds, sorted.
    pub latencies_ns: Vec<u64>,
    /// Operations over the endpoints.
    pub counts: Counts,
    /// Processor time of the node during allocations, in nanoseconds.
    pub node_cpu_ns: u64,
    /// Number of frees, and their total latency in nanoseconds.
    pub frees: u64,
    pub free_ns: u64,
}

impl Measured {
    /// Number of allocations.
    pub fn count(&self) -> f64 {
        float(self.latencies_ns.len() as u64)
    }

    /// Processor time of the node for each allocation, in µs.
    pub fn node_cpu_us(&self) -> f64 {
        float(self.node_cpu_ns) / 1e3 / self.count()
    }

    /// Mean latency of a free in µs.
    pub fn free_us(&self) -> f64 {
        float(self.free_ns) / 1e3 / float(self.frees)
    }

    /// Adds the results of another client.
    pub fn add(&mut self, other: &Self) {
        self.latencies_ns.extend_from_slice(&other.latencies_ns);
        self.counts = self.counts.and(other.counts);
        self.frees += other.frees;
        self.free_ns += other.free_ns;
    }
}

/// Measures about this number of allocations. The processor time of the node is read between two
/// turns, when there are no requests.
///
/// # Errors
/// If a client fails.
pub fn play(
    clients: Vec<AllocClient>,
    node: u32,
    class: SizeClass,
    allocations: usize,
) -> Result<Measured, BenchError> {
    let share = u64::from(NODE_SECTIONS) * SECTION_BYTES / 2 / clients.len() as u64 / class.bytes();
    let held_max = usize::try_from(share.clamp(2, HELD_MAX)).unwrap_or(2);
    let turns = (allocations / clients.len() / (held_max / 2)).max(2);
    let count = clients.len();
    // This thread takes part in the barrier, too, and reads the node's processor time.
    let barrier = Barrier::new(count + 1);
    let failure = Mutex::new(None);
    let mut all = Measured::default();
    let mut node_cpu_ns = 0;
    std::thread::scope(|scope| {
        let work = |(number, client): (usize, AllocClient)| {
            let (barrier, failure) = (&barrier, &failure);
            scope.spawn(move || {
                let mut worker = Worker::new(client, number, class, held_max);
                for turn in 0..turns {
                    barrier.wait();
                    let allocated = worker.allocate_all(turn > 0);
                    barrier.wait();
                    let outcome = allocated.and_then(|()| worker.free_some(turn + 1 == turns));
                    if let Err(reason) = outcome {
                        failure.lock().get_or_insert(reason);
                    }
                }
                worker.measured
            })
        };
        let workers: Vec<_> = clients.into_iter().enumerate().map(work).collect();
        for turn in 0..turns {
            barrier.wait();
            let before_ns = procs::cpu_ns(node);
            barrier.wait();
            if turn > 0 {
                node_cpu_ns += procs::cpu_ns(node).saturating_sub(before_ns);
            }
        }
        for worker in workers {
            all.add(&worker.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
        }
    });
    if let Some(reason) = failure.into_inner() {
        return Err(BenchError::Allocator { reason });
    }
    all.node_cpu_ns = node_cpu_ns;
    all.latencies_ns.sort_unstable();
    Ok(all)
}

/// A client in a round.
struct Worker {
    client: AllocClient,
    class: SizeClass,
    held: Vec<Allocation>,
    held_max: usize,
    random: u64,
    measured: Measured,
}

impl Worker {
    fn new(client: AllocClient, number: usize, class: SizeClass, held_max: usize) -> Self {
        let random = (number as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        Self { client, class, held: Vec::new(), held_max, random, measured: Measured::default() }
    }

    /// Allocates until the client holds enough. The first turn is not counted.
    fn allocate_all(&mut self, counts: bool) -> Result<(), String> {
        let before = self.client.counts();
        while self.held.len() < self.held_max {
            let start = Instant::now();
            let allocated = self.client.allocate(self.class)?;
            let took = start.elapsed();
            self.held.push(allocated);
            if counts {
                self.measured.latencies_ns.push(u64::try_from(took.as_nanos()).unwrap_or(u64::MAX));
            }
        }
        if counts {
            self.measured.counts = self.measured.counts.and(self.client.counts().since(before));
        }
        Ok(())
    }

    /// Frees half of the extents at random, or all.
    fn free_some(&mut self, all: bool) -> Result<(), String> {
        let kept = if all { 0 } else { self.held_max / 2 };
        while self.held.len() > kept {
            self.random = self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let any = usize::try_from(self.random >> 33).unwrap_or(0) % self.held.len();
            let start = Instant::now();
            self.client.free(self.held.swap_remove(any))?;
            self.measured.free_ns += u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX);
            self.measured.frees += 1;
        }
        Ok(())
    }
}
