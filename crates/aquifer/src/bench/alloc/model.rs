//! Allocation under a cost model of RDMA: clients, memory nodes and the network as events in virtual time. Ours are the very machines that the product drives.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::ways::{Arrived, Client, Task, Way};

/// Half of what a READ, a WRITE or an atomic takes, there and back, in nanoseconds.
pub const WAY_NS: u64 = 850;
/// What each further operation of one doorbell adds.
pub const MORE_NS: u64 = 100;
/// What an RPC takes of its node's one core; with the way there and back that makes 4 µs.
const RPC_NS: u64 = 2_300;
/// To register memory, for each 4 MiB.
const REGISTER_4M_NS: u64 = 450_000;
/// To bind a window, on the node's core.
const BIND_NS: u64 = 1_300;
/// Half of the memory is taken, at most.
const FILL: u64 = 2;
/// Extents that a client has, at most.
const HELD_MAX: u64 = 64;

/// What is measured.
#[derive(Clone, Copy, Debug)]
pub struct Scene {
    /// How extents are taken.
    pub way: Way,
    /// They have 4 KiB · 2^k.
    pub k: u8,
    /// So many clients, each of a host of its own, without a pause between two operations.
    pub clients: usize,
    /// So many memory nodes.
    pub nodes: usize,
    /// Sections of all nodes together.
    pub sections: u32,
    /// Allocations to be measured, from when all clients have as many as they want.
    pub allocations: usize,
}

/// What came of it, of allocations alone.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    /// How long each took, in nanoseconds, sorted.
    pub latencies_ns: Vec<u64>,
    /// Trips over the network.
    pub trips: u64,
    /// Compare-and-swaps.
    pub swaps: u64,
    /// Of these in vain.
    pub lost: u64,
    /// The nodes' processors, in nanoseconds.
    pub node_cpu_ns: u64,
    /// Extents given back, and how long that took together, in nanoseconds.
    pub frees: u64,
    pub free_ns: u64,
}

impl Outcome {
    /// Allocations.
    #[expect(clippy::cast_precision_loss, reason = "far below 2^52")]
    fn count(&self) -> f64 {
        self.latencies_ns.len() as f64
    }

    /// The mean latency in microseconds.
    pub fn mean_us(&self) -> f64 {
        super::service::mean_us(&self.latencies_ns)
    }

    /// The latency that so many in a thousand stay below, in microseconds.
    pub fn permille_us(&self, permille: usize) -> f64 {
        super::service::permille_us(&self.latencies_ns, permille)
    }

    /// The mean time of giving back, in microseconds.
    #[expect(clippy::cast_precision_loss, reason = "far below 2^52")]
    pub fn free_us(&self) -> f64 {
        self.free_ns as f64 / self.frees as f64 / 1e3
    }

    /// So many for each allocation.
    #[expect(clippy::cast_precision_loss, reason = "far below 2^52")]
    pub fn each(&self, count: u64) -> f64 {
        count as f64 / self.count()
    }
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Event {
    /// What a client has posted is at the node.
    Arrives,
    /// The answer is at the client.
    Returns,
}

/// A client's operation.
#[derive(Clone, Copy, Debug)]
struct Underway {
    task: Task,
    since_ns: u64,
}

/// Play a scene.
///
/// # Errors
/// A sentence, if an allocator has no extent though half of the memory is free.
pub fn play(scene: &Scene, seed: u64) -> Result<Outcome, String> {
    let per_node = scene.sections / u32::try_from(scene.nodes).unwrap_or(1);
    let chunks = u64::from(per_node) * 512 * scene.nodes as u64;
    let room = (chunks / FILL) >> scene.k;
    let held_max = (room / scene.clients as u64).clamp(1, HELD_MAX);
    let mut world = super::ways::World::new(scene.way, per_node, scene.nodes);
    let mut clients: Vec<Client> =
        (0..scene.clients).map(|number| Client::new(scene, number, per_node, seed)).collect();
    let mut underway: Vec<Option<Underway>> = vec![None; scene.clients];
    let mut core_free_ns = vec![0; scene.nodes];
    let mut outcome = Outcome::default();
    let mut queue = BinaryHeap::new();
    let mut order = 0u64;
    // Until all have as much as they want.
    let mut growing = scene.clients;
    let mut has_grown = vec![false; scene.clients];
    let mut post = |queue: &mut BinaryHeap<_>, at_ns: u64, event: Event, client: usize| {
        order += 1;
        queue.push(Reverse((at_ns, order, event, client)));
    };
    // They begin one after the other.
    (0..scene.clients).for_each(|client| post(&mut queue, client as u64 * 137, Event::Returns, client));
    while let Some(Reverse((now_ns, _, event, number))) = queue.pop() {
        let client = &mut clients[number];
        let is_measured = growing == 0;
        match event {
            Event::Arrives => {
                let Arrived { node, operations, swaps, lost, rpc } = client.arrive(&mut world);
                let mut leaves_ns = now_ns + MORE_NS * operations.saturating_sub(1);
                let mut cpu_ns = 0;
                if rpc {
                    cpu_ns = RPC_NS + scene.way.core_ns(scene.k, REGISTER_4M_NS, BIND_NS);
                    leaves_ns = core_free_ns[node].max(now_ns) + cpu_ns;
                    core_free_ns[node] = leaves_ns;
                }
                let is_allocation = underway[number].is_some_and(|under| under.task == Task::Allocate);
                if is_measured && is_allocation {
                    outcome.trips += 1;
                    outcome.swaps += swaps;
                    outcome.lost += lost;
                    outcome.node_cpu_ns += cpu_ns;
                }
                post(&mut queue, leaves_ns + WAY_NS, Event::Returns, number);
            }
            Event::Returns => {
                // What takes no trip is over at once, and the next begins.
                let mut is_over = underway[number].is_none() || client.proceed()?;
                while is_over {
                    match underway[number].take() {
                        Some(Underway { task: Task::Allocate, since_ns }) if is_measured => {
                            outcome.latencies_ns.push(now_ns - since_ns);
                        }
                        Some(Underway { task: Task::Free, since_ns }) if is_measured => {
                            outcome.frees += 1;
                            outcome.free_ns += now_ns - since_ns;
                        }
                        _ => {}
                    }
                    if client.held() == held_max && !std::mem::replace(&mut has_grown[number], true) {
                        growing -= 1;
                    }
                    let task = if client.held() < held_max { Task::Allocate } else { Task::Free };
                    underway[number] = Some(Underway { task, since_ns: now_ns });
                    is_over = client.begin(task)?;
                }
                if outcome.latencies_ns.len() >= scene.allocations {
                    break;
                }
                post(&mut queue, now_ns + WAY_NS, Event::Arrives, number);
            }
        }
    }
    outcome.latencies_ns.sort_unstable();
    Ok(outcome)
}
