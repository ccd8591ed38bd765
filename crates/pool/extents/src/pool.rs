//! The pool of a session, over endpoints of the session's user to all memory nodes.

mod transfer;

use std::collections::BTreeMap;
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::time::{Duration, Instant};

use aquifer_channel::owners::owner;
use aquifer_fabric::{Completion, Endpoint, EndpointError, Host, LocalKey, Memory, Tenant};
use aquifer_ipc::ring::RingStatus;
use aquifer_pool::{
    Extent, FigureTable, LeakDetector, NodeId, OperationGuard, PoolClient, PoolError, SizeClass, Stretch,
};

use crate::core::{ExtentPool, Transfer};

/// Delay before the next attempt to connect to a node after a failure. Doubles with each failure,
/// because requests wait during an attempt.
const RECONNECT_DELAY: Duration = Duration::from_secs(1);
/// Maximum of the doubled [`RECONNECT_DELAY`].
const RECONNECT_DELAY_MAX: Duration = Duration::from_secs(60);

/// Connects sessions to the memory nodes of a cluster.
pub trait NodeConnector: Send + Sync + std::fmt::Debug {
    /// The numbers of the cluster's memory nodes.
    fn nodes(&self) -> Vec<NodeId>;

    /// The number of this host in the pool.
    fn host(&self) -> Host;

    /// The leak detection of this host, in which sessions register their books.
    fn leak_detector(&self) -> &Arc<LeakDetector>;

    /// The figures of the memory nodes.
    fn figures(&self) -> &Arc<FigureTable>;

    /// Whether the sessions of a user may allocate `bytes`, which then count as allocated, without
    /// what is left free for other users. `None` if that is not known now. A user is the owner of
    /// user ids.
    fn spend_room(&self, owner: u32, bytes: u64) -> Option<bool>;

    /// Sets what the sessions of a user may allocate, of a pool with these free and lent bytes.
    fn set_room(&self, owner: u32, free_bytes: u64, lent_bytes: u64);

    /// Whether the sessions of a user may read the free memory of the nodes now for that.
    fn may_read_nodes(&self, owner: u32) -> bool;

    /// Connects to a node on behalf of a user.
    ///
    /// # Errors
    /// If the node does not answer.
    fn connect(&self, node: NodeId, tenant: Tenant) -> Result<Box<dyn Endpoint>, EndpointError>;
}

/// A node that could not be connected to.
#[derive(Clone, Copy, Debug)]
struct FailedConnection {
    retry_at: Instant,
    delay: Duration,
}

/// The pool of one session: a pool client with an endpoint to each node, and the ring's memory.
#[derive(Debug)]
pub(crate) struct ConnectedPool {
    connector: Arc<dyn NodeConnector>,
    tenant: Tenant,
    /// The configured quota; `None`: half of the memory that the nodes lend.
    quota_bytes: Option<u64>,
    /// The owner of the user's id.
    owner: u32,
    client: PoolClient,
    ring: Arc<Memory>,
    /// The key of the ring's memory at the endpoint of each connected node.
    ring_keys: BTreeMap<NodeId, LocalKey>,
    failed: BTreeMap<NodeId, FailedConnection>,
    /// Nodes whose connection has broken since [`ExtentPool::drain_lost_nodes`].
    lost: Vec<NodeId>,
    /// State of the random number generator.
    random: u64,
    /// The time at which the agent started.
    started: Instant,
    completions: Vec<Completion>,
}

impl ConnectedPool {
    /// Connects to all nodes. `started` is the time at which the agent started.
    pub fn new(
        connector: Arc<dyn NodeConnector>,
        tenant: Tenant,
        quota_bytes: Option<u64>,
        ring: Arc<Memory>,
        started: Instant,
    ) -> Self {
        let mut client =
            PoolClient::with_leak_detector(connector.host(), tenant, Arc::clone(connector.leak_detector()));
        client.set_figures(Arc::clone(connector.figures()));
        let mut pool = Self {
            connector,
            tenant,
            quota_bytes,
            owner: owner(tenant.0),
            client,
            ring,
            ring_keys: BTreeMap::new(),
            failed: BTreeMap::new(),
            lost: Vec::new(),
            random: RandomState::new().hash_one(0) | 1,
            started,
            completions: Vec::with_capacity(transfer::COMPLETIONS_MAX),
        };
        pool.connect_new_nodes();
        pool
    }

    /// Connects to nodes that are not connected. Returns whether there were any.
    pub fn connect_new_nodes(&mut self) -> bool {
        let mut has_connected = false;
        for node in self.connector.nodes() {
            has_connected |= !self.ring_keys.contains_key(&node) && self.try_connect(node);
        }
        has_connected
    }

    /// Connects to a node of the cluster, unless that has just failed. Returns whether it is
    /// connected.
    fn try_connect(&mut self, node: NodeId) -> bool {
        let failed = self.failed.get(&node).copied();
        let is_too_early = failed.is_some_and(|failed| Instant::now() < failed.retry_at);
        if is_too_early || !self.connector.nodes().contains(&node) {
            return false;
        }
        match self.connect(node) {
            Ok(()) => {
                self.failed.remove(&node);
                true
            }
            Err(error) => {
                let delay =
                    failed.map_or(RECONNECT_DELAY, |failed| RECONNECT_DELAY_MAX.min(2 * failed.delay));
                tracing::warn!(node = node.0, %error, retry_after = ?delay, "cannot connect to a node");
                self.disconnect(node);
                self.failed.insert(node, FailedConnection { retry_at: Instant::now() + delay, delay });
                false
            }
        }
    }

    fn connect(&mut self, node: NodeId) -> Result<(), PoolError> {
        let endpoint_error = |cause| PoolError::Endpoint { node, cause };
        let mut endpoint = self.connector.connect(node, self.tenant).map_err(endpoint_error)?;
        let key = endpoint.register_local(Arc::clone(&self.ring)).map_err(endpoint_error)?;
        self.client.add_node(node, endpoint)?;
        self.ring_keys.insert(node, key);
        Ok(())
    }

    fn disconnect(&mut self, node: NodeId) {
        self.client.remove_node(node);
        if self.ring_keys.remove(&node).is_some() {
            self.lost.push(node);
        }
    }

    /// The connected nodes that have extents of sessions: not those with a disk, whose memory has
    /// no atomics and is slow.
    fn memory_nodes(&self) -> Vec<NodeId> {
        self.client.nodes().filter(|node| !self.client.is_disk(*node)).collect()
    }

    /// All nodes that have extents of sessions. Of two random ones, the one with more free memory
    /// comes first.
    fn nodes_by_preference(&mut self) -> Vec<NodeId> {
        let mut nodes = self.memory_nodes();
        let count = nodes.len();
        if count < 2 {
            return nodes;
        }
        let first = self.random_below(count);
        nodes.swap(0, first);
        let second = 1 + self.random_below(count - 1);
        nodes.swap(1, second);
        if self.client.usable_bytes(nodes[0]) < self.client.usable_bytes(nodes[1]) {
            nodes.swap(0, 1);
        }
        // Extents do not move, so they should not be where a node wants its memory back.
        nodes.sort_by_key(|node| self.client.recalls_memory(*node));
        nodes
    }

    fn random_below(&mut self, bound: usize) -> usize {
        // Xorshift is good enough to spread sessions over nodes.
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        usize::try_from(self.random % bound as u64).unwrap_or(0)
    }

    /// Sets what the user may allocate, by what this session knows of the nodes.
    fn find_room(&self) {
        let nodes = self.memory_nodes();
        let free = |node: &NodeId| self.client.usable_bytes(*node).min(self.client.free_bytes(*node));
        let lent = |node: &NodeId| self.client.total_bytes(*node);
        self.connector.set_room(self.owner, nodes.iter().map(free).sum(), nodes.iter().map(lent).sum());
    }

    /// Reads the free memory of all nodes, also of new ones.
    fn read_nodes(&mut self) {
        self.connect_new_nodes();
        for node in self.client.nodes().collect::<Vec<_>>() {
            if let Err(error) = self.client.refresh(node) {
                tracing::debug!(node = node.0, %error, "reading the free memory of a memory node failed");
            }
        }
    }

    /// Allocates from the first node that has room. Connects to new nodes if no node has.
    fn allocate_with<T>(
        &mut self,
        allocate: impl Fn(&mut PoolClient, NodeId) -> Result<T, PoolError>,
    ) -> Result<T, RingStatus> {
        match self.allocate_from_connected(&allocate) {
            Err(RingStatus::Full) if self.connect_new_nodes() => self.allocate_from_connected(&allocate),
            outcome => outcome,
        }
    }

    fn allocate_from_connected<T>(
        &mut self,
        allocate: &impl Fn(&mut PoolClient, NodeId) -> Result<T, PoolError>,
    ) -> Result<T, RingStatus> {
        let mut status = RingStatus::Full;
        for node in self.nodes_by_preference() {
            let mut outcome = allocate(&mut self.client, node);
            while let Err(PoolError::Away { .. }) = outcome {
                // It is unknown whether something was allocated; the leak scan will find it. The
                // retry waits until the node has returned or is gone.
                outcome = allocate(&mut self.client, node);
            }
            match outcome {
                Ok(allocated) => return Ok(allocated),
                Err(PoolError::Full { .. }) => {}
                Err(PoolError::NodeGone { cause, .. }) => self.lose_node(node, &cause),
                Err(error) => {
                    tracing::error!(node = node.0, %error, "cannot allocate an extent");
                    status = RingStatus::Failed;
                }
            }
        }
        Err(status)
    }

    fn lose_node(&mut self, node: NodeId, cause: &dyn std::fmt::Display) {
        tracing::warn!(node = node.0, %cause, "lost the connection to a memory node");
        self.disconnect(node);
    }

    /// Whether the node has left the cluster. It may still return with its memory.
    fn has_left(&self, node: NodeId) -> bool {
        let has_left = !self.connector.nodes().contains(&node);
        if has_left {
            self.client.suspect_leak(node);
        }
        has_left
    }

    /// Frees extents of a node by `free`, and returns its outcome.
    ///
    /// Returns `None` if the node has left the cluster, or if a retry of the free would fail, too.
    fn free_with<T>(
        &mut self,
        node: NodeId,
        free: impl FnOnce(&mut PoolClient) -> Result<T, PoolError>,
    ) -> Result<Option<T>, NodeUnreachable> {
        if !self.ring_keys.contains_key(&node) && !self.try_connect(node) {
            return if self.has_left(node) { Ok(None) } else { Err(NodeUnreachable) };
        }
        match free(&mut self.client) {
            Ok(outcome) => Ok(Some(outcome)),
            Err(PoolError::NodeGone { cause, .. }) => {
                self.lose_node(node, &cause);
                if self.has_left(node) { Ok(None) } else { Err(NodeUnreachable) }
            }
            Err(error) => {
                log_failed_free(&error);
                Ok(None)
            }
        }
    }
}

/// The node cannot be reached at present, and the free must be repeated.
struct NodeUnreachable;

fn log_failed_free(error: &PoolError) {
    match error {
        PoolError::Away { .. } => {
            tracing::debug!(%error, "cannot free an extent now; the leak scan frees it if necessary");
        }
        PoolError::NotAllocated { .. } => {
            tracing::debug!(%error, "an extent was lost, because its node has returned without its memory");
        }
        _ => tracing::error!(%error, "cannot free an extent"),
    }
}

impl ExtentPool for ConnectedPool {
    fn begin_allocation(&self) -> Option<OperationGuard> {
        Some(self.client.begin_operation())
    }

    fn allocate(&mut self, class: SizeClass) -> Result<Extent, RingStatus> {
        self.allocate_with(|client, node| client.allocate(node, class))
    }

    fn allocate_many(&mut self, class: SizeClass, count: u32) -> Result<Vec<Extent>, RingStatus> {
        self.allocate_with(|client, node| client.allocate_many(node, class, count))
    }

    fn allocate_stretch(&mut self, sections: u32) -> Result<Stretch, RingStatus> {
        self.allocate_with(|client, node| client.allocate_stretch(node, sections))
    }

    fn clearing_progress(&self, sections: u32) -> Option<u64> {
        let of_nodes = self.client.nodes().filter_map(|node| self.client.clearing_progress(node, sections));
        of_nodes.reduce(u64::wrapping_add)
    }

    fn last_record(&self, extent: Extent) -> u32 {
        self.client.last_record(extent)
    }

    fn free(&mut self, extents: &[Extent]) -> Vec<bool> {
        let mut by_node: BTreeMap<NodeId, Vec<usize>> = BTreeMap::new();
        for (index, extent) in extents.iter().enumerate() {
            by_node.entry(extent.node).or_default().push(index);
        }
        let mut is_freed = vec![true; extents.len()];
        for (node, indices) in by_node {
            let of_node: Vec<Extent> = indices.iter().map(|index| extents[*index]).collect();
            match self.free_with(node, |client| client.free_many(node, &of_node)) {
                Ok(outcomes) => {
                    let errors = outcomes.into_iter().flatten().filter_map(Result::err);
                    errors.for_each(|error| log_failed_free(&error));
                }
                Err(NodeUnreachable) => indices.into_iter().for_each(|index| is_freed[index] = false),
            }
        }
        is_freed
    }

    fn resume_free(&mut self, extent: Extent, record: u32) -> bool {
        self.free_with(extent.node, |client| client.resume_free(extent, record)).is_ok()
    }

    fn is_connected(&self, node: NodeId) -> bool {
        self.ring_keys.contains_key(&node)
    }

    fn transfer(&mut self, transfers: &[Transfer]) -> Vec<RingStatus> {
        self.run_transfers(transfers)
    }

    fn drain_lost_nodes(&mut self) -> Vec<NodeId> {
        std::mem::take(&mut self.lost)
    }

    fn quota_bytes(&self) -> u64 {
        let half_of_lent = || self.client.nodes().map(|node| self.client.total_bytes(node)).sum::<u64>() / 2;
        self.quota_bytes.unwrap_or_else(half_of_lent)
    }

    fn has_room(&mut self, bytes: u64) -> bool {
        let spend = |pool: &Self| pool.connector.spend_room(pool.owner, bytes);
        let mut has_room = spend(self);
        if has_room.is_none() {
            self.find_room();
            has_room = spend(self);
        }
        if has_room == Some(true) {
            return true;
        }
        if !self.connector.may_read_nodes(self.owner) {
            return false;
        }
        self.read_nodes();
        self.find_room();
        spend(self) == Some(true)
    }

    fn now(&self) -> Duration {
        self.started.elapsed()
    }

    fn pause(&mut self, time: Duration) {
        std::thread::sleep(time);
    }
}
