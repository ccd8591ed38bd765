//! The pool as a session reaches it: over endpoints of its user, to all memory nodes. What it reads and writes goes between the node and the ring's data
//! area, without a copy here.

use std::collections::BTreeMap;
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::time::{Duration, Instant};

use aquifer_fabric::{
    Completion, Endpoint, EndpointError, Host, LocalKey, LocalSlice, Memory, PostError, RemoteAddr, Tenant,
    Verb, Work, WorkError,
};
use aquifer_ipc::ring::{DATA_AT, ExtentStatus};
use aquifer_pool::{Extent, LeakDetector, NodeId, OperationGuard, PoolClient, PoolError, SizeClass, Stretch};

use crate::session::{Move, Pool};

/// An endpoint over a network is asked again after so long.
const PATIENCE: Duration = Duration::from_millis(20);
/// A node that did not answer is left alone for so long at first, and twice as long each time, since requests wait meanwhile.
const LEFT_ALONE: Duration = Duration::from_secs(1);
const LEFT_ALONE_MAX: Duration = Duration::from_secs(60);
/// Looks in vain before the processor is offered to others.
const SPINS_MAX: u32 = 256;
/// Completions taken at a time.
const POLL_MAX: usize = 64;

/// How to reach the memory nodes of a cluster.
pub trait Reach: Send + Sync + std::fmt::Debug {
    /// Their numbers.
    fn nodes(&self) -> Vec<NodeId>;

    /// This host, in the pool.
    fn host(&self) -> Host;

    /// What it has of the pool, and who knows of it.
    fn leak_detector(&self) -> &Arc<LeakDetector>;

    /// Connect to a node on behalf of a user.
    ///
    /// # Errors
    /// If it does not answer.
    fn connect(&self, node: NodeId, tenant: Tenant) -> Result<Box<dyn Endpoint>, EndpointError>;
}

/// See above.
#[derive(Debug)]
pub(crate) struct Cluster {
    reach: Arc<dyn Reach>,
    tenant: Tenant,
    /// As the agent was told; half of what nodes lend, if it was not.
    quota_bytes: Option<u64>,
    pool: PoolClient,
    ring: Arc<Memory>,
    /// The ring, as each node's endpoint names it.
    local: BTreeMap<NodeId, LocalKey>,
    /// Nodes that did not answer: when they may be tried again, and how long they are left alone after that.
    silent: BTreeMap<NodeId, (Instant, Duration)>,
    /// Nodes to which a connection has broken, until somebody asks.
    gone: Vec<NodeId>,
    random: u64,
    polled: Vec<Completion>,
}

impl Cluster {
    pub fn new(reach: Arc<dyn Reach>, tenant: Tenant, quota_bytes: Option<u64>, ring: Arc<Memory>) -> Self {
        let pool = PoolClient::with_leak_detector(reach.host(), tenant, Arc::clone(reach.leak_detector()));
        let mut cluster = Self {
            reach,
            tenant,
            quota_bytes,
            pool,
            ring,
            local: BTreeMap::new(),
            silent: BTreeMap::new(),
            gone: Vec::new(),
            random: RandomState::new().hash_one(0) | 1,
            polled: Vec::with_capacity(POLL_MAX),
        };
        cluster.meet_nodes();
        cluster
    }

    /// Connect to nodes that have come; whether there were any.
    pub fn meet_nodes(&mut self) -> bool {
        let mut has_met = false;
        for node in self.reach.nodes() {
            has_met |= !self.local.contains_key(&node) && self.meet(node);
        }
        has_met
    }

    /// Connect to a node, if it is one, and was not just tried in vain; whether it is connected.
    fn meet(&mut self, node: NodeId) -> bool {
        let silent = self.silent.get(&node).copied();
        if silent.is_some_and(|(until, _)| Instant::now() < until) || !self.reach.nodes().contains(&node) {
            return false;
        }
        match self.connect(node) {
            Ok(()) => {
                self.silent.remove(&node);
                true
            }
            Err(error) => {
                tracing::warn!(node = node.0, %error, "a memory node cannot be used");
                self.leave(node);
                let pause = silent.map_or(LEFT_ALONE, |(_, pause)| LEFT_ALONE_MAX.min(2 * pause));
                self.silent.insert(node, (Instant::now() + pause, pause));
                false
            }
        }
    }

    fn connect(&mut self, node: NodeId) -> Result<(), PoolError> {
        let endpoint = |cause| PoolError::Endpoint { node, cause };
        let mut connection = self.reach.connect(node, self.tenant).map_err(endpoint)?;
        let key = connection.register_local(Arc::clone(&self.ring)).map_err(endpoint)?;
        self.pool.add_node(node, connection)?;
        self.local.insert(node, key);
        Ok(())
    }

    fn leave(&mut self, node: NodeId) {
        self.pool.remove_node(node);
        if self.local.remove(&node).is_some() {
            self.gone.push(node);
        }
    }

    /// The better of two random nodes by free memory, then the others.
    fn nodes_by_room(&mut self) -> Vec<NodeId> {
        let mut nodes: Vec<NodeId> = self.pool.nodes().collect();
        let count = nodes.len();
        if count < 2 {
            return nodes;
        }
        let first = self.random_below(count);
        nodes.swap(0, first);
        let second = 1 + self.random_below(count - 1);
        nodes.swap(1, second);
        if self.pool.free_bytes(nodes[0]) < self.pool.free_bytes(nodes[1]) {
            nodes.swap(0, 1);
        }
        nodes
    }

    fn random_below(&mut self, bound: usize) -> usize {
        // Xorshift: it only spreads sessions over nodes.
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        usize::try_from(self.random % bound as u64).unwrap_or(0)
    }

    /// Allocates from the best node that has room, nodes that have just come included.
    fn take<T>(
        &mut self,
        take: impl Fn(&mut PoolClient, NodeId) -> Result<T, PoolError>,
    ) -> Result<T, ExtentStatus> {
        match self.take_somewhere(&take) {
            Err(ExtentStatus::Full) if self.meet_nodes() => self.take_somewhere(&take),
            outcome => outcome,
        }
    }

    fn take_somewhere<T>(
        &mut self,
        take: &impl Fn(&mut PoolClient, NodeId) -> Result<T, PoolError>,
    ) -> Result<T, ExtentStatus> {
        let mut status = ExtentStatus::Full;
        for node in self.nodes_by_room() {
            let mut taken = take(&mut self.pool, node);
            while let Err(PoolError::Away { .. }) = taken {
                // Nobody knows whether something was taken, and an audit finds it. This waits until the node is back, or gone.
                taken = take(&mut self.pool, node);
            }
            match taken {
                Ok(taken) => return Ok(taken),
                Err(PoolError::Full { .. }) => {}
                Err(PoolError::NodeGone { cause, .. }) => {
                    tracing::warn!(node = node.0, %cause, "a memory node is gone");
                    self.leave(node);
                }
                Err(error) => {
                    tracing::error!(node = node.0, %error, "no extent could be taken");
                    status = ExtentStatus::Failed;
                }
            }
        }
        Err(status)
    }

    /// Whether a node is one no longer. It may come back with its memory all the same.
    fn is_gone(&self, node: NodeId) -> bool {
        let is_gone = !self.reach.nodes().contains(&node);
        if is_gone {
            self.pool.suspect_leak(node);
        }
        is_gone
    }

    /// Give back, by one of the pool's ways; whether that is done, or the node is gone with its memory.
    fn return_by<T>(
        &mut self,
        node: NodeId,
        way: impl FnOnce(&mut PoolClient) -> Result<T, PoolError>,
    ) -> Result<Option<T>, NotReturned> {
        if !self.local.contains_key(&node) && !self.meet(node) {
            return if self.is_gone(node) { Ok(None) } else { Err(NotReturned) };
        }
        match way(&mut self.pool) {
            Ok(returned) => return Ok(Some(returned)),
            Err(PoolError::NodeGone { cause, .. }) => {
                tracing::warn!(node = node.0, %cause, "a memory node is gone");
                self.leave(node);
                return if self.is_gone(node) { Ok(None) } else { Err(NotReturned) };
            }
            Err(error) => note_unreturned(&error),
        }
        Ok(None)
    }
}

/// The node cannot be reached just now.
struct NotReturned;

fn note_unreturned(error: &PoolError) {
    match error {
        // It was away, and an audit looks whether that was done.
        PoolError::Away { .. } => tracing::debug!(%error, "an extent is given back when it is back"),
        // It came back without its memory.
        PoolError::NotAllocated { .. } => tracing::debug!(%error, "lost with its node"),
        _ => tracing::error!(%error, "an extent could not be given back"),
    }
}

impl Pool for Cluster {
    fn under_way(&self) -> Option<OperationGuard> {
        Some(self.pool.begin_operation())
    }

    fn allocate(&mut self, class: SizeClass) -> Result<Extent, ExtentStatus> {
        self.take(|pool, node| pool.allocate(node, class))
    }

    fn allocate_many(&mut self, class: SizeClass, count: u32) -> Result<Vec<Extent>, ExtentStatus> {
        self.take(|pool, node| pool.allocate_many(node, class, count))
    }

    fn allocate_stretch(&mut self, sections: u32) -> Result<Stretch, ExtentStatus> {
        self.take(|pool, node| pool.allocate_stretch(node, sections))
    }

    fn sections_to_clear(&self, sections: u32) -> Option<u32> {
        let of_nodes = self.pool.nodes().filter_map(|node| self.pool.sections_to_clear(node, sections));
        of_nodes.reduce(|one, other| one + other)
    }

    fn last_record(&self, extent: Extent) -> u32 {
        self.pool.last_record(extent)
    }

    fn give_back(&mut self, extents: &[Extent]) -> Vec<bool> {
        let mut by_node: BTreeMap<NodeId, Vec<usize>> = BTreeMap::new();
        for (number, extent) in extents.iter().enumerate() {
            by_node.entry(extent.node).or_default().push(number);
        }
        let mut is_done = vec![true; extents.len()];
        for (node, numbers) in by_node {
            let there: Vec<Extent> = numbers.iter().map(|number| extents[*number]).collect();
            match self.return_by(node, |pool| pool.free_many(node, &there)) {
                Ok(outcomes) => {
                    outcomes.into_iter().flatten().filter_map(Result::err).for_each(|e| note_unreturned(&e));
                }
                Err(NotReturned) => numbers.into_iter().for_each(|number| is_done[number] = false),
            }
        }
        is_done
    }

    fn give_back_begun(&mut self, extent: Extent, record: u32) -> bool {
        self.return_by(extent.node, |pool| pool.resume_free(extent, record)).is_ok()
    }

    fn reaches(&self, node: NodeId) -> bool {
        self.local.contains_key(&node)
    }

    fn transfer(&mut self, moves: &[Move]) -> Vec<ExtentStatus> {
        let mut outcomes = vec![Outcome::Broken; moves.len()];
        for each in moves {
            if !self.local.contains_key(&each.extent.node) {
                self.meet(each.extent.node);
            }
        }
        self.carry_out(moves, &mut outcomes);
        outcomes.into_iter().map(Outcome::status).collect()
    }

    fn take_gone(&mut self) -> Vec<NodeId> {
        std::mem::take(&mut self.gone)
    }

    fn quota_bytes(&self) -> u64 {
        let lent = || self.pool.nodes().map(|node| self.pool.total_bytes(node)).sum::<u64>() / 2;
        self.quota_bytes.unwrap_or_else(lent)
    }
}

/// How moving one piece went.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Outcome {
    Done,
    Refused,
    /// The connection broke, or there is none.
    Broken,
    /// The piece is impossible.
    Failed,
}

impl Outcome {
    fn status(self) -> ExtentStatus {
        match self {
            Self::Done => ExtentStatus::Done,
            Self::Refused => ExtentStatus::Refused,
            Self::Broken => ExtentStatus::NodeGone,
            Self::Failed => ExtentStatus::Failed,
        }
    }

    fn of(error: WorkError) -> Self {
        match error {
            WorkError::RemoteAccess => Self::Refused,
            WorkError::LocalAccess
            | WorkError::Misaligned
            | WorkError::TooLong
            | WorkError::ReceiverNotReady => Self::Failed,
            WorkError::Fenced
            | WorkError::PeerGone
            | WorkError::Timeout
            | WorkError::Away
            | WorkError::Flushed => Self::Broken,
        }
    }
}

/// Work for one node.
#[derive(Debug)]
struct Queue {
    node: NodeId,
    work: Vec<Work>,
    posted: usize,
    ended: usize,
    /// Looks in vain since the connection broke.
    silent: u32,
}

impl Cluster {
    /// Post everything, to all nodes, and wait for its end.
    fn carry_out(&mut self, moves: &[Move], outcomes: &mut [Outcome]) {
        let mut queues = self.queues(moves, outcomes);
        let mut spins = 0u32;
        while queues.iter().any(|queue| queue.ended < queue.work.len()) {
            let mut progress = false;
            for queue in &mut queues {
                progress |= self.advance(queue, outcomes);
            }
            spins = if progress { 0 } else { spins + 1 };
            if spins > SPINS_MAX {
                std::thread::yield_now();
            }
            if !progress {
                let waiting = queues.iter().find(|queue| queue.ended < queue.work.len());
                if let Some(endpoint) = waiting.and_then(|queue| self.pool.endpoint(queue.node)) {
                    endpoint.wait(PATIENCE);
                }
            }
        }
        for queue in queues {
            let is_broken = self.pool.endpoint(queue.node).is_none_or(|endpoint| endpoint.is_broken());
            if is_broken {
                self.leave(queue.node);
            }
        }
    }

    fn queues(&mut self, moves: &[Move], outcomes: &mut [Outcome]) -> Vec<Queue> {
        let mut queues: Vec<Queue> = Vec::new();
        for ((id, each), outcome) in (0u64..).zip(moves).zip(outcomes) {
            let node = each.extent.node;
            let Some((key, endpoint)) = self.local.get(&node).zip(self.pool.endpoint(node)) else { continue };
            *outcome = Outcome::Done;
            let at = queues.iter().position(|queue| queue.node == node).unwrap_or_else(|| {
                queues.push(Queue { node, work: Vec::new(), posted: 0, ended: 0, silent: 0 });
                queues.len() - 1
            });
            let step = endpoint.limits().transfer_bytes_max.clamp(1, 1 << 30);
            queues[at].work.extend(parts(each, *key, step).map(|verb| Work { id, verb, signalled: true }));
        }
        queues
    }

    /// Post what there is room for, and take what has ended; whether anything did.
    fn advance(&mut self, queue: &mut Queue, outcomes: &mut [Outcome]) -> bool {
        if queue.ended == queue.work.len() {
            return false;
        }
        let Some(endpoint) = self.pool.endpoint(queue.node) else {
            queue.ended = queue.work.len();
            return true;
        };
        if queue.posted < queue.work.len() {
            queue.posted += match endpoint.post(&queue.work[queue.posted..]) {
                Ok(()) => queue.work.len() - queue.posted,
                Err(PostError::QueueFull { accepted }) => accepted,
            };
        }
        let was_broken = endpoint.is_broken();
        self.polled.clear();
        endpoint.poll(&mut self.polled, POLL_MAX);
        for completion in &self.polled {
            queue.ended += 1;
            if let (Err(error), Ok(number)) = (completion.outcome, usize::try_from(completion.id))
                && let Some(outcome) = outcomes.get_mut(number)
            {
                *outcome = Outcome::of(error);
            }
        }
        let progress = !self.polled.is_empty();
        queue.silent = if was_broken && !progress { queue.silent + 1 } else { 0 };
        // What is accepted completes, come what may; a broken endpoint that says nothing more never will.
        if queue.silent > SPINS_MAX {
            for work in &queue.work {
                outcomes[usize::try_from(work.id).unwrap_or(0)] = Outcome::Broken;
            }
            queue.ended = queue.work.len();
            return true;
        }
        progress
    }
}

/// One or several operations for one piece.
fn parts(each: &Move, key: LocalKey, step: u32) -> impl Iterator<Item = Verb> {
    let Move { extent, piece, is_write } = *each;
    (0..piece.len).step_by(step as usize).map(move |from| {
        let len = step.min(piece.len - from);
        let local = LocalSlice { key, offset: DATA_AT as u64 + u64::from(piece.data + from), len };
        let remote =
            RemoteAddr { addr: extent.addr + u64::from(piece.offset) + u64::from(from), key: extent.key };
        if is_write { Verb::Write { local, remote } } else { Verb::Read { local, remote } }
    })
}
