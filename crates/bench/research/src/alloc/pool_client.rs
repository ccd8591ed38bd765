//! Client of the pool in the cost model: the product's state machines. For the ladder, some of
//! their operations are not counted.

use aquifer_bench::support::allocation_trace::AllocRequest;
use aquifer_fabric::{Host, Tenant};
use aquifer_pool::SizeClass;
use aquifer_pool::cache::{NodeCache, NumberSource, search_start};
use aquifer_pool::layout::Layout;
use aquifer_pool::op::{Action, AllocOp, FreeOp, Grant, Outcomes, StateMachine, Step, StepResult, WordAt};
use aquifer_pool::word::{LogOp, SectionWord, SpanWord};

use super::allocators::pick;
use super::ladder::{Account, Rung};
use super::words::{Arrived, World, plain};

/// Time of a request to the agent of this host and its answer, through a polled ring.
const RING_NS: u64 = 1_000;

/// An operation of the pool.
#[derive(Debug)]
enum Operation {
    Alloc(AllocOp, SizeClass),
    Free(FreeOp),
}

/// A request of a program to its agent.
#[derive(Clone, Copy, Debug)]
enum Asked {
    Allocate(usize, SizeClass),
    Free,
}

/// A client of all nodes.
#[derive(Debug)]
pub struct PoolModelClient {
    host: Host,
    caches: Vec<NodeCache>,
    held: Vec<(usize, Grant)>,
    /// The node of the current operation.
    node: usize,
    operation: Option<Operation>,
    action: Option<Action>,
    results: Vec<u64>,
    rung: Rung,
    account: Account,
    /// Whether the last action lost a race at a control word, before the extent was allocated.
    has_lost: bool,
    /// Whether the extent is allocated; the remaining actions only update hint bits.
    has_taken: bool,
    asked: Option<Asked>,
    /// The stock: the extents that the program has freed. A real session keeps more.
    kept: Vec<(usize, Grant)>,
}

impl PoolModelClient {
    /// A client that assumes all nodes to be free.
    pub fn new(host: u16, sections: u32, nodes: usize, seed: u64, rung: Rung) -> Self {
        let cache = |node: usize| {
            let layout = Layout::new(u16::try_from(node + 1).unwrap_or(1), sections);
            // Without contention control all clients start at the same span.
            let place = if rung.has_contention_control() { host } else { 0 };
            let draws = NumberSource::counted(u32::from(host), 1 << 12);
            let search_start = search_start(Host(place), seed * nodes as u64 + node as u64);
            NodeCache::new(&layout.expect("the sections fit into a layout"), search_start, Tenant(0), draws)
        };
        Self {
            host: Host(host),
            caches: (0..nodes).map(cache).collect(),
            held: Vec::new(),
            node: 0,
            operation: None,
            action: None,
            results: Vec::new(),
            rung,
            account: Account::new(rung),
            has_lost: false,
            has_taken: false,
            asked: None,
            kept: Vec::new(),
        }
    }

    /// Number of extents that the client holds.
    pub fn held(&self) -> usize {
        self.held.len()
    }

    /// Starts an allocation; returns true if it is complete without a trip.
    pub fn allocate(&mut self, node: usize, class: SizeClass) -> Result<bool, String> {
        if self.rung == Rung::Service {
            self.asked = Some(Asked::Allocate(node, class));
            return Ok(false);
        }
        self.start(node, Operation::Alloc(AllocOp::new(self.host, class), class))
    }

    /// Starts a free; returns true if it is complete without a trip.
    pub fn free(&mut self, any: usize, request: AllocRequest) -> Result<bool, String> {
        let (node, grant) = pick(&mut self.held, any, request);
        if self.rung == Rung::Service {
            self.kept.push((node, grant));
            self.asked = Some(Asked::Free);
            return Ok(false);
        }
        self.start(node, Operation::Free(FreeOp::new(self.host, grant)))
    }

    /// See [`super::allocators::Client::local_ns`].
    pub fn local_ns(&self) -> Option<u64> {
        match (self.asked, &self.action) {
            (Some(_), _) => Some(RING_NS),
            (None, Some(action)) if self.account.is_left_out(action) => Some(0),
            _ => None,
        }
    }

    /// Carries out the posted operations at the node.
    pub fn arrive(&mut self, world: &mut World) -> Arrived {
        let (Some(action), None) = (&self.action, self.asked) else { return plain(0) };
        let arrived = world.nodes[self.node].carry_out(action, &mut self.results);
        let takes = action.first_cas().and_then(|(at, _, desired)| is_allocation(at, desired));
        self.has_taken |= takes == Some(true) && arrived.lost == 0;
        self.has_lost = takes.is_some() && arrived.lost > 0 && !self.has_taken;
        self.account.charge(action, arrived)
    }

    /// Processes the answer; returns true if the operation is complete.
    pub fn proceed(&mut self) -> Result<bool, String> {
        match self.asked.take() {
            Some(Asked::Free) => return Ok(true),
            Some(Asked::Allocate(node, class)) => {
                if let Some(kept) = self.kept.pop() {
                    self.held.push(kept);
                    return Ok(true);
                }
                return self.start(node, Operation::Alloc(AllocOp::new(self.host, class), class));
            }
            None => {}
        }
        let cache = &mut self.caches[self.node];
        let result = StepResult(&self.results);
        match self.operation.as_mut() {
            Some(Operation::Alloc(op, class)) => {
                let step = op.step(cache, result);
                if self.has_lost && !self.rung.has_contention_control() {
                    // Starts again with the current word and without a count of races, so that
                    // no span is avoided, marked or read again.
                    let again = Operation::Alloc(AllocOp::new(self.host, *class), *class);
                    return self.start(self.node, again);
                }
                self.granted(step)
            }
            Some(Operation::Free(op)) => {
                let step = op.step(cache, result);
                self.given(step)
            }
            None => Ok(true),
        }
    }

    fn start(&mut self, node: usize, mut operation: Operation) -> Result<bool, String> {
        self.node = node;
        (self.has_lost, self.has_taken) = (false, false);
        self.account.begin();
        let cache = &mut self.caches[node];
        match &mut operation {
            Operation::Alloc(op, _) => {
                let step = op.start(cache);
                self.operation = Some(operation);
                self.granted(step)
            }
            Operation::Free(op) => {
                let step = op.start(cache);
                self.operation = Some(operation);
                self.given(step)
            }
        }
    }

    fn granted(&mut self, step: Step<Grant>) -> Result<bool, String> {
        match step {
            Step::Post(action) => self.post(action),
            Step::Done(grant) => {
                let grant = grant.map_err(|error| format!("an allocation failed: {error:?}"))?;
                self.held.push((self.node, grant));
                return Ok(true);
            }
        }
        Ok(false)
    }

    fn given(&mut self, step: Step<Outcomes>) -> Result<bool, String> {
        match step {
            Step::Post(action) => self.post(action),
            Step::Done(outcome) => {
                let freed = outcome.and_then(|outcomes| outcomes[0]);
                freed.map_err(|error| format!("a free failed: {error:?}"))?;
                return Ok(true);
            }
        }
        Ok(false)
    }

    fn post(&mut self, action: Action) {
        self.account.note(&action);
        self.action = Some(action);
    }
}

/// Whether a CAS of a control word allocates an extent; `None` if it is a CAS of another word.
fn is_allocation(at: WordAt, desired: u64) -> Option<bool> {
    let log = match at {
        WordAt::Span(_) => SpanWord(desired).log(),
        WordAt::Section(_) => SectionWord(desired).log(),
        WordAt::Log(_) | WordAt::Key(_) => return None,
    };
    Some(log.ok().flatten().is_some_and(|log| log.op == LogOp::Alloc))
}
