//! Allocation with a cost model of RDMA: clients, nodes and network as events in virtual time. The
//! pool's clients run the product's state machines.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use aquifer_bench::support::allocation_trace::{AllocRequest, Arrival, Replay};
use aquifer_bench::support::spread::{mean_us, permille_us};
use aquifer_pool::SizeClass;
use aquifer_pool::size::SECTION_BYTES;

use super::allocators::{Allocator, Client};
use super::words::{Arrived, World};

/// Half of the round trip of a READ, a WRITE or an atomic, in ns.
pub const ONE_WAY_NS: u64 = 850;
/// Time of each further operation of a doorbell.
pub const MORE_NS: u64 = 100;
/// Time of an RPC on the node's only core. With the round trip an RPC takes 4 µs.
const RPC_NS: u64 = 2_300;
/// Time to register 4 MiB of memory.
const REGISTER_4M_NS: u64 = 450_000;
/// Time on the node's core to bind a window.
const BIND_NS: u64 = 1_300;
/// At most 1/`FILL` of the memory is allocated.
const FILL: u64 = 2;
/// Most extents that a client holds.
const HELD_MAX: u64 = 64;

/// A measured scene.
#[derive(Clone, Copy, Debug)]
pub struct Scene {
    /// The allocator.
    pub allocator: Allocator,
    /// Number of clients. Each has its own host, and does not pause between two operations.
    pub clients: usize,
    /// Number of memory nodes.
    pub nodes: usize,
    /// Sections of all nodes together.
    pub sections: u32,
}

impl Scene {
    /// Sections of each node.
    pub fn sections_each(&self) -> u32 {
        self.sections / u32::try_from(self.nodes).unwrap_or(1)
    }

    /// Most bytes that each client allocates.
    pub fn share_bytes(&self) -> u64 {
        u64::from(self.sections_each()) * self.nodes as u64 * SECTION_BYTES / FILL / self.clients as u64
    }
}

/// The load of the clients.
#[derive(Clone, Copy, Debug)]
pub enum Load<'a> {
    /// Extents of one size, allocated without a pause. A client that holds enough frees any extent.
    Closed {
        /// The size.
        class: SizeClass,
        /// Number of measured allocations. Measuring begins when all clients hold enough.
        allocations: usize,
    },
    /// The allocations of a trace.
    Trace(&'a [Arrival]),
}

/// Next step of a client.
#[derive(Clone, Copy, Debug)]
enum Next {
    /// An operation, and the time of its request.
    Begin(AllocRequest, u64),
    /// Wait until a time.
    Rest(u64),
    /// The client has finished.
    End,
}

/// Demand of the clients.
#[derive(Debug)]
enum Demand<'a> {
    Closed {
        class: SizeClass,
        allocations: usize,
        held_max: u64,
        /// For each client whether it has not held enough yet, and the number of such clients.
        grows: Vec<bool>,
        growing: usize,
    },
    Trace(Vec<Replay<'a>>),
}

impl<'a> Demand<'a> {
    fn new(scene: &Scene, load: &Load<'a>) -> Self {
        match *load {
            Load::Closed { class, allocations } => Self::Closed {
                class,
                allocations,
                held_max: (scene.share_bytes() / class.bytes()).clamp(1, HELD_MAX),
                grows: vec![true; scene.clients],
                growing: scene.clients,
            },
            Load::Trace(arrivals) => {
                let share = scene.share_bytes();
                let replay = |number| Replay::new(arrivals, number, scene.clients, share);
                Self::Trace((0..scene.clients).map(replay).collect())
            }
        }
    }

    fn next(&mut self, number: usize, held: u64, now_ns: u64) -> Next {
        match self {
            Self::Closed { class, held_max, grows, growing, .. } => {
                if held == *held_max && std::mem::replace(&mut grows[number], false) {
                    *growing -= 1;
                }
                Next::Begin(
                    if held < *held_max { AllocRequest::Allocate(*class) } else { AllocRequest::FreeAny },
                    now_ns,
                )
            }
            Self::Trace(replays) => match replays[number].next(now_ns) {
                None => Next::End,
                Some((request, at_ns)) if at_ns <= now_ns => Next::Begin(request, at_ns),
                Some((_, at_ns)) => Next::Rest(at_ns),
            },
        }
    }

    /// Records that the next operation has started.
    fn begun(&mut self, number: usize, request: AllocRequest) {
        if let Self::Trace(replays) = self {
            replays[number].begun(request);
        }
    }

    fn is_measured(&self) -> bool {
        !matches!(self, Self::Closed { growing: 1.., .. })
    }

    fn is_over(&self, measured: usize) -> bool {
        matches!(self, Self::Closed { allocations, .. } if measured >= *allocations)
    }
}

/// Results of a schedule.
#[derive(Clone, Debug, Default)]
pub struct ModelResult {
    /// Latency of each allocation in nanoseconds, sorted.
    pub latencies_ns: Vec<u64>,
    /// Trips over the network.
    pub trips: u64,
    /// Compare-and-swaps.
    pub swaps: u64,
    /// Failed compare-and-swaps.
    pub lost: u64,
    /// Processor time of the nodes in nanoseconds.
    pub node_cpu_ns: u64,
    /// Number of frees, and their total latency in nanoseconds.
    pub frees: u64,
    pub free_ns: u64,
}

impl ModelResult {
    /// Number of allocations.
    #[expect(clippy::cast_precision_loss, reason = "far below 2^52")]
    fn count(&self) -> f64 {
        self.latencies_ns.len() as f64
    }

    /// The mean latency in microseconds.
    pub fn mean_us(&self) -> f64 {
        mean_us(&self.latencies_ns)
    }

    /// Quantile of the latency in microseconds; the median is 500.
    pub fn permille_us(&self, permille: usize) -> f64 {
        permille_us(&self.latencies_ns, permille)
    }

    /// Mean latency of a free in microseconds.
    #[expect(clippy::cast_precision_loss, reason = "far below 2^52")]
    pub fn free_us(&self) -> f64 {
        self.free_ns as f64 / self.frees as f64 / 1e3
    }

    /// A count for each allocation.
    #[expect(clippy::cast_precision_loss, reason = "far below 2^52")]
    pub fn each(&self, count: u64) -> f64 {
        count as f64 / self.count()
    }
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Event {
    /// Posted operations arrive at the node.
    Arrives,
    /// The answer arrives at the client.
    Returns,
}

/// An operation in progress.
#[derive(Clone, Copy, Debug)]
struct Underway {
    request: AllocRequest,
    since_ns: u64,
}

/// Simulates a scene.
///
/// # Errors
/// A message if an allocator has no extent although half of the memory is free.
pub fn play(scene: &Scene, load: &Load<'_>, seed: u64) -> Result<ModelResult, String> {
    let mut game = Game {
        allocator: scene.allocator,
        world: World::new(scene.allocator, scene.sections_each(), scene.nodes),
        clients: (0..scene.clients).map(|number| Client::new(scene, number, seed)).collect(),
        demand: Demand::new(scene, load),
        underway: vec![None; scene.clients],
        core_free_ns: vec![0; scene.nodes],
        outcome: ModelResult::default(),
        queue: BinaryHeap::new(),
        order: 0,
    };
    // The clients start one after the other.
    (0..scene.clients).for_each(|client| game.post(client as u64 * 137, Event::Returns, client));
    while let Some(Reverse((now_ns, _, event, number))) = game.queue.pop() {
        match event {
            Event::Arrives => game.arrives(number, now_ns),
            Event::Returns => game.returns(number, now_ns)?,
        }
        if game.demand.is_over(game.outcome.latencies_ns.len()) {
            break;
        }
    }
    let mut outcome = game.outcome;
    outcome.latencies_ns.sort_unstable();
    Ok(outcome)
}

struct Game<'a> {
    allocator: Allocator,
    world: World,
    clients: Vec<Client>,
    demand: Demand<'a>,
    underway: Vec<Option<Underway>>,
    core_free_ns: Vec<u64>,
    outcome: ModelResult,
    queue: BinaryHeap<Reverse<(u64, u64, Event, usize)>>,
    order: u64,
}

impl Game<'_> {
    fn post(&mut self, at_ns: u64, event: Event, client: usize) {
        self.order += 1;
        self.queue.push(Reverse((at_ns, self.order, event, client)));
    }

    fn arrives(&mut self, number: usize, now_ns: u64) {
        let Arrived { node, operations, swaps, lost, rpc } = self.clients[number].arrive(&mut self.world);
        let mut leaves_ns = now_ns + MORE_NS * operations.saturating_sub(1);
        let mut cpu_ns = 0;
        if let Some(class) = rpc {
            cpu_ns = RPC_NS + self.allocator.core_ns(class, REGISTER_4M_NS, BIND_NS);
            leaves_ns = self.core_free_ns[node].max(now_ns) + cpu_ns;
            self.core_free_ns[node] = leaves_ns;
        }
        let is_allocation = self.underway[number].is_some_and(|under| under.request.is_allocation());
        if is_allocation && self.demand.is_measured() {
            self.outcome.trips += 1;
            self.outcome.swaps += swaps;
            self.outcome.lost += lost;
            self.outcome.node_cpu_ns += cpu_ns;
        }
        self.post(leaves_ns + ONE_WAY_NS, Event::Returns, number);
    }

    fn returns(&mut self, number: usize, now_ns: u64) -> Result<(), String> {
        // An operation without a trip is complete at once, and the next one starts.
        let mut is_over = self.underway[number].is_none() || self.clients[number].proceed()?;
        while is_over {
            if let Some(under) = self.underway[number].take() {
                self.count(under, now_ns);
            }
            match self.demand.next(number, self.clients[number].held(), now_ns) {
                Next::Begin(request, since_ns) => {
                    self.demand.begun(number, request);
                    self.underway[number] = Some(Underway { request, since_ns });
                    is_over = self.clients[number].begin(request)?;
                }
                Next::Rest(at_ns) => {
                    self.post(at_ns, Event::Returns, number);
                    return Ok(());
                }
                Next::End => return Ok(()),
            }
        }
        if let Some(local_ns) = self.clients[number].local_ns() {
            // Operations that do not count are carried out, too.
            self.clients[number].arrive(&mut self.world);
            self.post(now_ns + local_ns, Event::Returns, number);
        } else {
            self.post(now_ns + ONE_WAY_NS, Event::Arrives, number);
        }
        Ok(())
    }

    fn count(&mut self, under: Underway, now_ns: u64) {
        let took_ns = now_ns - under.since_ns;
        if !self.demand.is_measured() {
            return;
        }
        if under.request.is_allocation() {
            self.outcome.latencies_ns.push(took_ns);
        } else {
            self.outcome.frees += 1;
            self.outcome.free_ns += took_ns;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_line_of_a_trace_is_played_once_and_in_time() {
        let arrivals: Vec<Arrival> =
            (0..600).map(|number| Arrival { at_ns: number * 20_000, class: SizeClass::SPAN }).collect();
        for allocator in Allocator::ALL {
            let scene = Scene { allocator, clients: 4, nodes: 2, sections: 16 };
            let outcome = play(&scene, &Load::Trace(&arrivals), 1).unwrap();
            assert_eq!(outcome.latencies_ns.len(), 600, "{allocator:?}");
            // A client's share is 32 of its 150 extents.
            assert_eq!(outcome.frees, 4 * (150 - 32), "{allocator:?}");
            assert!(outcome.latencies_ns[0] >= 2 * ONE_WAY_NS, "{allocator:?}");
        }
    }

    #[test]
    fn a_late_request_counts_from_when_it_was_due() {
        let arrivals = [Arrival { at_ns: 1_000_000, class: SizeClass::CHUNK }; 3];
        let scene = Scene { allocator: Allocator::Array, clients: 1, nodes: 1, sections: 4 };
        let outcome = play(&scene, &Load::Trace(&arrivals), 1).unwrap();
        assert_eq!(outcome.latencies_ns, [1, 2, 3].map(|trips| trips * 2 * ONE_WAY_NS));
    }
}
