//! The compared allocators of extents, as clients of the cost model.

use aquifer_bench::support::allocation_trace::AllocRequest;
use aquifer_bench::support::one_sided_array::{ArrayClient, ArrayProgress, Held};
use aquifer_pool::SizeClass;

use super::ladder::Rung;
use super::model::Scene;
use super::pool_client::PoolModelClient;
use super::words::{Arrived, World, plain};

/// An allocator of extents.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Allocator {
    /// RPC; the node registers each extent on request (as CoRM).
    OnDemandRpc,
    /// RPC; all memory is registered in advance, without windows (as FUSEE).
    Rpc,
    /// RPC; all memory is registered in advance, with a window for each extent.
    RpcWindow,
    /// The one-sided array: CAS of an entry for each 4 KiB; no windows, no log (as CXL-SHM).
    Array,
    /// The pool.
    Pool,
    /// The pool with the mechanisms of a rung of the ladder.
    Part(Rung),
}

impl Allocator {
    /// All compared allocators; the pool is last.
    pub const ALL: [Self; 5] = [Self::OnDemandRpc, Self::Rpc, Self::RpcWindow, Self::Array, Self::Pool];

    /// Name in the report.
    pub fn name(self) -> &'static str {
        match self {
            Self::OnDemandRpc => "RPC, registered on demand",
            Self::Rpc => "RPC, registered beforehand",
            Self::RpcWindow => "the same, a window for each",
            Self::Array => "one-sided array",
            Self::Pool => "ours",
            Self::Part(rung) => rung.name(),
        }
    }

    /// Time on the node's core for an extent of this size, in addition to the RPC itself.
    pub fn core_ns(self, class: SizeClass, register_4m_ns: u64, bind_ns: u64) -> u64 {
        match self {
            Self::OnDemandRpc => (register_4m_ns << class.k()) / 1024,
            Self::RpcWindow => bind_ns,
            Self::Rpc | Self::Array | Self::Pool | Self::Part(_) => 0,
        }
    }
}

/// Removes and returns the oldest extent if the request is for that, else the one at index `any`.
/// Only the former keeps the order.
pub fn pick<T>(held: &mut Vec<T>, any: usize, request: AllocRequest) -> T {
    if request == AllocRequest::FreeOldest { held.remove(0) } else { held.swap_remove(any) }
}

/// A client of the cost model.
#[derive(Debug)]
pub struct Client {
    random: u64,
    nodes: usize,
    /// The node of the current operation.
    node: usize,
    inner: Inner,
}

#[derive(Debug)]
enum Inner {
    Rpc(RpcClient),
    Array(Box<ArrayEnd>),
    Pool(Box<PoolModelClient>),
}

/// A client that uses RPCs. The model only counts its extents.
#[derive(Debug, Default)]
struct RpcClient {
    held: Vec<(usize, SizeClass)>,
    request: Option<(SizeClass, bool)>,
}

#[derive(Debug)]
struct ArrayEnd {
    machine: ArrayClient,
    held: Vec<Held>,
    results: Vec<u16>,
}

impl Client {
    /// A client of a scene.
    pub fn new(scene: &Scene, number: usize, seed: u64) -> Self {
        let host = u16::try_from(number + 1).unwrap_or(u16::MAX);
        let (sections, nodes) = (scene.sections_each(), scene.nodes);
        let ours = |rung| Inner::Pool(Box::new(PoolModelClient::new(host, sections, nodes, seed, rung)));
        let inner = match scene.allocator {
            Allocator::OnDemandRpc | Allocator::Rpc | Allocator::RpcWindow => {
                Inner::Rpc(RpcClient::default())
            }
            Allocator::Array => {
                let machine = ArrayClient::new(host, sections, nodes, seed);
                Inner::Array(Box::new(ArrayEnd { machine, held: Vec::new(), results: Vec::new() }))
            }
            Allocator::Pool => ours(Rung::Log),
            Allocator::Part(rung) => ours(rung),
        };
        let random = (seed + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ (number as u64 + 1) << 17;
        Self { random, nodes, node: 0, inner }
    }

    /// Number of extents that the client holds.
    pub fn held(&self) -> u64 {
        let count = match &self.inner {
            Inner::Rpc(rpc) => rpc.held.len(),
            Inner::Array(array) => array.held.len(),
            Inner::Pool(ours) => ours.held(),
        };
        count as u64
    }

    fn below(&mut self, bound: usize) -> usize {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        usize::try_from((self.random >> 20) % bound.max(1) as u64).unwrap_or(0)
    }

    /// Starts an operation; returns true if it is complete without a trip.
    ///
    /// # Errors
    /// If no extent is free.
    pub fn begin(&mut self, request: AllocRequest) -> Result<bool, String> {
        self.node = self.below(self.nodes);
        let held = usize::try_from(self.held()).unwrap_or(0);
        let any = self.below(held);
        match (&mut self.inner, request) {
            (Inner::Rpc(rpc), AllocRequest::Allocate(class)) => rpc.request = Some((class, true)),
            (Inner::Rpc(rpc), _) => {
                let (node, class) = pick(&mut rpc.held, any, request);
                self.node = node;
                rpc.request = Some((class, false));
            }
            (Inner::Array(array), AllocRequest::Allocate(class)) => {
                if !array.machine.start_allocation(self.node, class) {
                    return Err("the array is full".into());
                }
            }
            (Inner::Array(array), _) => {
                let given = pick(&mut array.held, any, request);
                self.node = given.node;
                array.machine.start_free(given);
            }
            (Inner::Pool(ours), AllocRequest::Allocate(class)) => return ours.allocate(self.node, class),
            (Inner::Pool(ours), _) => return ours.free(any, request),
        }
        Ok(false)
    }

    /// Time in ns until the operation continues, if the next step is local to this host; `None` if
    /// it needs a node.
    pub fn local_ns(&self) -> Option<u64> {
        match &self.inner {
            Inner::Pool(ours) => ours.local_ns(),
            Inner::Rpc(_) | Inner::Array(_) => None,
        }
    }

    /// Carries out the posted operations at the node.
    pub fn arrive(&mut self, world: &mut World) -> Arrived {
        match &mut self.inner {
            Inner::Rpc(rpc) => {
                Arrived { node: self.node, rpc: rpc.request.map(|(class, _)| class), ..plain(1) }
            }
            Inner::Array(array) => world.nodes[self.node].touch(array.machine.touches(), &mut array.results),
            Inner::Pool(ours) => ours.arrive(world),
        }
    }

    /// Processes the answer; returns true if the operation is complete.
    ///
    /// # Errors
    /// If no extent is free.
    pub fn proceed(&mut self) -> Result<bool, String> {
        match &mut self.inner {
            Inner::Rpc(rpc) => {
                if let Some((class, true)) = rpc.request.take() {
                    rpc.held.push((self.node, class));
                }
                Ok(true)
            }
            Inner::Array(array) => Ok(match array.machine.complete(&array.results)? {
                ArrayProgress::LostRace => false,
                ArrayProgress::Freed => true,
                ArrayProgress::Allocated(held) => {
                    array.held.push(held);
                    true
                }
            }),
            Inner::Pool(ours) => ours.proceed(),
        }
    }
}
