//! The client of the pool: runs the state machines over fabric endpoints.

mod connection;
mod lanes;
mod node;
mod random;
mod recovery;

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use aquifer_fabric::{Endpoint, Host, Key, Tenant};

use crate::cache::{NO_RECORD, search_start};
use crate::error::PoolError;
use crate::figures::{FigureTable, NodeFigures, RecalledMemory};
use crate::layout::NodeClass;
use crate::leaks::{LeakDetector, Ledger, OperationGuard};
use crate::op::{
    AllocManyOp, AllocOp, FreeOp, Grant, GrantBatch, Holding, HoldingsOp, OpError, RecoverOp, Recovered,
    StateMachine, StretchOp,
};
use crate::size::{SECTION_BYTES, SizeClass};
use crate::word::AlignedRun;
pub use connection::{AnswerTimeout, Clock};
use node::{ClientNode, Failure};
pub use recovery::recover_node;

/// The lowest work id of the pool's own operations. The user of a shared endpoint uses smaller
/// ones.
pub const POOL_WORK_ID: u64 = 1 << 63;
/// Most nodes of one client.
pub const NODES_MAX: usize = 256;

/// The number of a node in the directory.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct NodeId(pub u16);

impl fmt::Display for NodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// One allocation of a node's memory.
///
/// An extent is not cleared when it is allocated: it may hold data of its last owner, of the same
/// tenant.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Extent {
    /// The node.
    pub node: NodeId,
    /// The address in the node's region.
    pub addr: u64,
    /// The size.
    pub class: SizeClass,
    /// The key that opens the extent for READ and WRITE.
    pub key: Key,
}

/// Neighbouring sections of a node that were allocated together: an extent above 2 MiB.
///
/// One key opens all sections. Each section is freed by itself.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Stretch {
    /// The first section.
    pub first: Extent,
    /// The number of sections.
    pub sections: u32,
}

impl Stretch {
    /// The sections, in the order of their addresses.
    pub fn extents(self) -> impl Iterator<Item = Extent> {
        let place = move |section| self.first.addr + u64::from(section) * SECTION_BYTES;
        (0..self.sections).map(move |section| Extent { addr: place(section), ..self.first })
    }
}

/// Allocates and frees extents of nodes, for one host and one tenant.
///
/// One thread uses a client at a time. Many clients, of the same host or of others, work at once.
#[derive(Debug)]
pub struct PoolClient {
    host: Host,
    tenant: Tenant,
    nodes: BTreeMap<NodeId, ClientNode>,
    leak_detector: Arc<LeakDetector>,
    /// The figures of the nodes; empty if no thread of this host reads them.
    figures: Arc<FigureTable>,
    answer_timeout: Option<AnswerTimeout>,
}

impl PoolClient {
    /// Creates a client without nodes. Only endpoints of `tenant` can access the extents that it
    /// allocates.
    #[must_use]
    pub fn new(host: Host, tenant: Tenant) -> Self {
        Self::with_leak_detector(host, tenant, Arc::default())
    }

    /// Creates a client of a host that has several clients, which share a leak detector.
    #[must_use]
    pub fn with_leak_detector(host: Host, tenant: Tenant, leak_detector: Arc<LeakDetector>) -> Self {
        let figures = Arc::default();
        Self { host, tenant, nodes: BTreeMap::new(), leak_detector, figures, answer_timeout: None }
    }

    /// Sets the table with the figures of all nodes, which the host keeps up to date.
    pub fn set_figures(&mut self, figures: Arc<FigureTable>) {
        self.figures = figures;
    }

    /// Sets the time for which operations wait for the answer of a node. The default is the timeout
    /// of the node's endpoint.
    pub fn set_answer_timeout(&mut self, answer_timeout: AnswerTimeout) {
        self.nodes
            .values_mut()
            .for_each(|node| node.connection.set_answer_timeout(Some(answer_timeout.clone())));
        self.answer_timeout = Some(answer_timeout);
    }

    /// Registers a ledger with the host's leak detector.
    pub fn register_ledger<L: Ledger + 'static>(&self, ledger: &Arc<L>) {
        self.leak_detector.register_ledger(ledger);
    }

    /// Begins an operation that allocates extents and records them in a ledger, or frees extents.
    #[must_use]
    pub fn begin_operation(&self) -> OperationGuard {
        self.leak_detector.begin_operation()
    }

    /// Reports that this host may have leaked memory of a node, such as an extent that could not be
    /// freed.
    pub fn suspect_leak(&self, node: NodeId) {
        self.leak_detector.suspect_leak(node);
    }

    /// Adds a node. The client and its user share the endpoint ([`PoolClient::endpoint`]).
    ///
    /// # Errors
    /// If the node's memory has another format or version, if the endpoint fails, or at
    /// [`NODES_MAX`].
    pub fn add_node(&mut self, id: NodeId, endpoint: Box<dyn Endpoint>) -> Result<(), PoolError> {
        /// Number of clients of this process. It makes their searches begin at different places.
        static CLIENTS: AtomicU64 = AtomicU64::new(0);
        if self.nodes.contains_key(&id) {
            return Err(PoolError::NodeExists { node: id });
        }
        if self.nodes.len() >= NODES_MAX {
            return Err(PoolError::TooManyNodes { limit: NODES_MAX });
        }
        let start = search_start(self.host, CLIENTS.fetch_add(1, Ordering::Relaxed));
        let mut node = ClientNode::open(id, endpoint, start, self.tenant)?;
        node.connection.set_answer_timeout(self.answer_timeout.clone());
        self.nodes.insert(id, node);
        Ok(())
    }

    /// Removes a node and returns its endpoint. Extents of the node stay allocated, and the node is
    /// suspect.
    pub fn remove_node(&mut self, id: NodeId) -> Option<Box<dyn Endpoint>> {
        let mut node = self.nodes.remove(&id)?;
        if let Some(drain) = node.connection.pop_drain() {
            self.leak_detector.add_abandoned(id, node.region_key(), drain);
        }
        self.leak_detector.suspect_leak(id);
        Some(node.into_endpoint())
    }

    /// Runs a state machine to its end.
    fn run<M: StateMachine>(
        &mut self,
        id: NodeId,
        machine: M,
    ) -> Result<Result<M::Output, Failure>, PoolError> {
        self.with_node(id, |node| node.run(machine))
    }

    /// Runs `work` on a node as one operation. If the connection breaks, this reports it to the
    /// leak detector before the operation ends.
    fn with_node<T>(
        &mut self,
        id: NodeId,
        work: impl FnOnce(&mut ClientNode) -> Result<T, Failure>,
    ) -> Result<Result<T, Failure>, PoolError> {
        let _operation = self.leak_detector.begin_operation();
        let node = self.nodes.get_mut(&id).ok_or(PoolError::NoSuchNode { node: id })?;
        let outcome = work(node);
        if let Err(Failure::Work(_)) = outcome
            && let Some(drain) = node.connection.pop_drain()
        {
            self.leak_detector.add_abandoned(id, node.region_key(), drain);
        }
        Ok(outcome)
    }

    /// The nodes of this client.
    pub fn nodes(&self) -> impl Iterator<Item = NodeId> {
        self.nodes.keys().copied()
    }

    /// The number of a node's sections, offline ones included; 0 for a node that this client does
    /// not have.
    #[must_use]
    pub fn sections(&self, id: NodeId) -> u32 {
        self.nodes.get(&id).map_or(0, ClientNode::sections)
    }

    /// Whether the data of a node are on a disk. False for a node that this client does not have.
    #[must_use]
    pub fn is_disk(&self, id: NodeId) -> bool {
        self.nodes.get(&id).is_some_and(|node| node.layout().class() == NodeClass::Disk)
    }

    /// Free bytes of a node, by the cached words; 0 for a node that this client does not have.
    #[must_use]
    pub fn free_bytes(&self, id: NodeId) -> u64 {
        self.nodes.get(&id).map_or(0, ClientNode::free_bytes)
    }

    /// Free bytes of a node, by its latest figures, less what this client has allocated since. By
    /// the cached words if the figures are not known.
    #[must_use]
    pub fn usable_bytes(&self, id: NodeId) -> u64 {
        let Some(node) = self.nodes.get(&id) else { return 0 };
        let Some(read) = self.figures.get(id) else { return node.free_bytes() };
        read.figures.free_bytes.saturating_sub(node.allocated_since(read.read))
    }

    /// Whether a node may have this much free memory. True if its figures are not known.
    #[must_use]
    pub fn may_have_free(&self, id: NodeId, bytes: u64) -> bool {
        self.figures.get(id).is_none() || self.usable_bytes(id) >= bytes
    }

    /// Whether a node recalls memory, by its latest figures.
    #[must_use]
    pub fn recalls_memory(&self, id: NodeId) -> bool {
        self.figures.get(id).is_some_and(|read| read.figures.recalls_memory())
    }

    /// The memory that nodes recall.
    #[must_use]
    pub fn recalled_memory(&self) -> Vec<RecalledMemory> {
        let recalling = self.figures.all().into_iter().filter(|(_, figures)| figures.recalls_memory());
        recalling.filter_map(|(id, figures)| self.nodes.get(&id)?.recalled_memory(&figures)).collect()
    }

    /// Reads the figures of a node, for a host's [`FigureTable`]. `None` if the node was writing
    /// them.
    ///
    /// # Errors
    /// If the node is gone or away.
    pub fn read_figures(&mut self, id: NodeId) -> Result<Option<NodeFigures>, PoolError> {
        self.node(id)?.read_figures()
    }

    /// Bytes that a node lends, by the cached words; 0 for a node that this client does not have.
    #[must_use]
    pub fn total_bytes(&self, id: NodeId) -> u64 {
        self.nodes.get(&id).map_or(0, ClientNode::total_bytes)
    }

    /// Reads all control words of a node, so that [`PoolClient::free_bytes`] is up to date.
    ///
    /// # Errors
    /// If the node is gone.
    pub fn refresh(&mut self, id: NodeId) -> Result<(), PoolError> {
        self.node(id)?.refresh()
    }

    /// The key of a node's region. A node that began with new memory has another key.
    pub(crate) fn region_key(&self, id: NodeId) -> Key {
        self.nodes.get(&id).map_or(Key(0), ClientNode::region_key)
    }

    /// Lists all holdings of this host in some sections, by words and log, of all its clients.
    ///
    /// # Errors
    /// The errors of [`Self::recover`].
    pub(crate) fn holdings(&mut self, id: NodeId, sections: Range<u32>) -> Result<Vec<Holding>, PoolError> {
        let op = HoldingsOp::new(self.host, sections);
        self.run(id, op)?.map_err(|failure| failure.of(id, 0, 0))
    }

    /// Frees holdings of this host in a section, as far as they have not changed.
    ///
    /// # Errors
    /// The errors of [`Self::recover`].
    pub(crate) fn free_holdings(
        &mut self,
        id: NodeId,
        section: u32,
        holdings: Vec<Holding>,
    ) -> Result<Recovered, PoolError> {
        let op = RecoverOp::only(self.host, holdings).within(section..section + 1);
        self.run(id, op)?.map_err(|failure| failure.of(id, 0, 0))
    }

    /// Frees all holdings of this host in some sections, except extents at recorded addresses. No
    /// other client of the host may change these sections meanwhile.
    ///
    /// # Errors
    /// The errors of [`Self::recover`].
    pub fn free_unrecorded(
        &mut self,
        id: NodeId,
        sections: Range<u32>,
        is_recorded: &dyn Fn(u64) -> bool,
    ) -> Result<Recovered, PoolError> {
        let mut unrecorded = self.holdings(id, sections.clone())?;
        unrecorded.retain(|holding| !self.address_of(id, holding).is_some_and(is_recorded));
        let op = RecoverOp::only(self.host, unrecorded).within(sections);
        self.run(id, op)?.map_err(|failure| failure.of(id, 0, 0))
    }

    /// The address of a holding; `None` if it is not an extent.
    pub(crate) fn address_of(&self, id: NodeId, holding: &Holding) -> Option<u64> {
        match holding {
            Holding::Extent(grant) | Holding::Unkeyed { grant, .. } => {
                self.nodes.get(&id).map(|node| node.extent(*grant).addr)
            }
            Holding::Span { .. } => None,
        }
    }

    /// Allocates an extent of a node.
    ///
    /// # Errors
    /// [`PoolError::Full`] if no extent is free. After [`PoolError::NodeGone`] or
    /// [`PoolError::Away`] it is unknown whether an extent was allocated; the node is suspect.
    pub fn allocate(&mut self, id: NodeId, class: SizeClass) -> Result<Extent, PoolError> {
        let grant = self.run_alloc(id, AllocOp::new(self.host, class), class.bytes())?;
        self.count_allocated(id, class.bytes());
        Ok(self.node(id)?.extent(grant))
    }

    /// Allocates up to `count` extents of a node, at least one.
    ///
    /// Each extent costs one trip to the node, and the last one a second trip.
    ///
    /// # Errors
    /// The errors of [`Self::allocate`].
    pub fn allocate_many(
        &mut self,
        id: NodeId,
        class: SizeClass,
        count: u32,
    ) -> Result<Vec<Extent>, PoolError> {
        let op = AllocManyOp::new(self.host, class, count);
        let GrantBatch { grants, failure } = self.run_alloc(id, op, class.bytes())?;
        if let Some(error) = failure {
            let error = Failure::Op(error).of(id, 0, class.bytes());
            let allocated = grants.len();
            tracing::debug!(node = id.0, count, allocated, %error, "allocated fewer extents than requested");
            self.leak_detector.suspect_leak(id);
        }
        self.count_allocated(id, class.bytes() * grants.len() as u64);
        let node = self.node(id)?;
        Ok(grants.into_iter().map(|grant| node.extent(grant)).collect())
    }

    /// Allocates neighbouring sections of a node, all or none.
    ///
    /// # Errors
    /// The errors of [`Self::allocate`].
    pub fn allocate_stretch(&mut self, id: NodeId, sections: u32) -> Result<Stretch, PoolError> {
        let op = StretchOp::new(self.host, sections);
        let grant = self.run_alloc(id, op, u64::from(sections) * SECTION_BYTES)?;
        self.count_allocated(id, u64::from(sections) * SECTION_BYTES);
        Ok(Stretch { first: self.node(id)?.extent(grant), sections })
    }

    /// Counts an allocation, until the figures of the node are read again.
    fn count_allocated(&mut self, id: NodeId, bytes: u64) {
        if let (Some(read), Some(node)) = (self.figures.get(id), self.nodes.get_mut(&id)) {
            node.count_allocated(read.read, bytes);
        }
    }

    /// A number that changes with each section that the node clears.
    ///
    /// Computed from the cached words. `None` if no stretch of `sections` will be free when all is
    /// cleared. Offline sections count as sections that are being cleared.
    #[must_use]
    pub fn clearing_progress(&self, id: NodeId, sections: u32) -> Option<u64> {
        self.nodes.get(&id)?.cache.clearing_progress(sections)
    }

    fn run_alloc<M: StateMachine>(&mut self, id: NodeId, op: M, bytes: u64) -> Result<M::Output, PoolError> {
        let outcome = self.run(id, op)?.map_err(|failure| failure.of(id, 0, bytes));
        if !matches!(outcome, Ok(_) | Err(PoolError::Full { .. })) {
            // The node may have allocated an extent although the operation failed.
            self.leak_detector.suspect_leak(id);
        }
        outcome
    }

    /// Polls the connections, to detect broken ones and to reconnect to nodes that are away.
    ///
    /// To be called from time to time while no operation runs.
    pub fn maintain(&mut self) {
        self.nodes.values_mut().for_each(ClientNode::poll);
    }

    /// Allocates a group of a section's spans without a key, whichever tenant used them last.
    ///
    /// Used by the node itself, to clear the group or to take it offline. `None` if the group is
    /// not free.
    ///
    /// # Errors
    /// The errors of [`Self::allocate`].
    pub fn allocate_group(
        &mut self,
        id: NodeId,
        section: u32,
        group: AlignedRun,
    ) -> Result<Option<Extent>, PoolError> {
        match self.run(id, AllocOp::of_group(self.host, section, group))? {
            Ok(grant) => Ok(Some(self.node(id)?.extent(grant))),
            Err(Failure::Op(OpError::Full)) => Ok(None),
            Err(failure) => Err(failure.of(id, 0, 0)),
        }
    }

    /// Whether an extent's key is still in its entry. It is not after a free, nor in new memory of
    /// the node.
    ///
    /// # Errors
    /// If the client does not have the node, or the node is gone.
    pub fn is_current(&mut self, extent: Extent) -> Result<bool, PoolError> {
        let node = self.node(extent.node)?;
        let Some(chunk) = node.chunk_of(extent.addr) else { return Ok(false) };
        let grant = Grant { chunk, class: extent.class, key: Key(0) };
        Ok(node.with_key(grant)?.key == extent.key)
    }

    /// Frees an extent.
    ///
    /// # Errors
    /// [`PoolError::NotAllocated`] or [`PoolError::NotOurs`] by the node's words; then nothing was
    /// changed.
    pub fn free(&mut self, extent: Extent) -> Result<(), PoolError> {
        self.run_free(extent, |op| op)
    }

    /// Frees several extents of a node, in different sections concurrently. Returns the outcome of
    /// each, as [`Self::free`] does.
    ///
    /// # Errors
    /// If the client does not have the node, or the node is gone or away. Then it is unknown which
    /// extents are free; the node is suspect.
    ///
    /// # Panics
    /// If an extent is on another node.
    pub fn free_many(
        &mut self,
        id: NodeId,
        extents: &[Extent],
    ) -> Result<Vec<Result<(), PoolError>>, PoolError> {
        assert!(extents.iter().all(|extent| extent.node == id), "all are on node {id}");
        let host = self.host;
        let outcomes = self.with_node(id, |node| {
            // An address outside of the region becomes a number that no chunk has, so its free ends
            // with `NotAllocated`.
            let chunk = |node: &ClientNode, addr| node.chunk_of(addr).unwrap_or(u32::MAX);
            let grant = |extent: &Extent| Grant {
                chunk: chunk(node, extent.addr),
                class: extent.class,
                key: extent.key,
            };
            let grants: Vec<Grant> = extents.iter().map(grant).collect();
            node.free_all(host, &grants)
        });
        let outcomes = outcomes.inspect_err(|_| self.leak_detector.suspect_leak(id))?;
        let outcomes = outcomes.map_err(|failure| failure.of(id, 0, 0)).map(|outcomes| {
            let with_error = |(extent, outcome): (&Extent, Result<(), OpError>)| {
                outcome.map_err(|error| Failure::Op(error).of(id, extent.addr, extent.class.bytes()))
            };
            extents.iter().zip(outcomes).map(with_error).collect::<Vec<_>>()
        });
        if outcomes.as_ref().map_or(true, |outcomes| !outcomes.iter().all(is_certain)) {
            self.leak_detector.suspect_leak(id);
        }
        outcomes
    }

    fn run_free(&mut self, extent: Extent, how: impl FnOnce(FreeOp) -> FreeOp) -> Result<(), PoolError> {
        let outcome = self.try_free(extent, how);
        if !is_certain(&outcome) {
            self.leak_detector.suspect_leak(extent.node);
        }
        outcome
    }

    fn try_free(&mut self, extent: Extent, how: impl FnOnce(FreeOp) -> FreeOp) -> Result<(), PoolError> {
        let host = self.host;
        let node = self.node(extent.node)?;
        let (addr, bytes) = (extent.addr, extent.class.bytes());
        let chunk = node.chunk_of(addr).ok_or(PoolError::NotAllocated { node: extent.node, addr, bytes })?;
        let grant = Grant { chunk, class: extent.class, key: extent.key };
        let op = how(FreeOp::new(host, grant));
        let outcome = match self.run(extent.node, op)? {
            Ok(outcomes) => outcomes[0].map_err(Failure::Op),
            Err(failure) => Err(failure),
        };
        outcome.map_err(|failure| failure.of(extent.node, addr, bytes))
    }

    /// Frees all holdings of a dead host on a node.
    ///
    /// The host must be fenced at the node, so that its operations in flight cannot take effect.
    /// Two clients may recover the same host at once, and a recovery that was interrupted can be
    /// repeated.
    ///
    /// # Errors
    /// [`PoolError::NodeGone`]; [`PoolError::Busy`], after which some holdings are not freed yet;
    /// [`PoolError::Damaged`].
    pub fn recover(&mut self, id: NodeId, dead: Host) -> Result<Recovered, PoolError> {
        let host = self.host;
        self.run(id, RecoverOp::new(host, dead))?.map_err(|failure| failure.of(id, 0, 0))
    }

    /// Frees the holdings of a dead host in some sections of a node.
    ///
    /// # Errors
    /// The errors of [`Self::recover`].
    pub fn recover_within(
        &mut self,
        id: NodeId,
        dead: Host,
        sections: Range<u32>,
    ) -> Result<Recovered, PoolError> {
        let op = RecoverOp::new(self.host, dead).within(sections);
        self.run(id, op)?.map_err(|failure| failure.of(id, 0, 0))
    }

    /// The record in an extent's control word, as cached, for [`Self::resume_free`]. Never 0.
    #[must_use]
    pub fn last_record(&self, extent: Extent) -> u32 {
        let record = |node: &ClientNode| {
            let chunk = node.chunk_of(extent.addr)?;
            Some(node.cache.last_record(Grant { chunk, class: extent.class, key: extent.key }))
        };
        self.nodes.get(&extent.node).and_then(record).unwrap_or(NO_RECORD)
    }

    /// Resumes a free that a process of this host began and may not have finished before it was
    /// killed.
    ///
    /// `record` is the record that the extent's control word had then ([`Self::last_record`]).
    /// Returns whether the extent was freed now. If not, it was freed before, or the word has
    /// changed since; then the node is suspect, and a leak scan frees the extent if necessary.
    ///
    /// # Errors
    /// The errors of [`Self::free`].
    pub fn resume_free(&mut self, extent: Extent, record: u32) -> Result<bool, PoolError> {
        match self.run_free(extent, |op| op.resumed(record)) {
            Err(PoolError::NotAllocated { .. } | PoolError::NotOurs { .. }) => {}
            outcome => return outcome.map(|()| true),
        }
        // Another part of the word may have changed. If the key was not revoked, the extent still
        // belongs to this host. An operation in flight of the killed process may revoke the key at
        // this moment.
        if self.is_current(extent).inspect_err(|_| self.leak_detector.suspect_leak(extent.node))? {
            match self.free(extent) {
                Err(PoolError::NotAllocated { .. } | PoolError::NotOurs { .. }) => {}
                outcome => return outcome.map(|()| true),
            }
        }
        self.leak_detector.suspect_leak(extent.node);
        Ok(false)
    }

    /// The endpoint to a node, for the user's own READs and WRITEs.
    ///
    /// Work ids of the user must be below [`POOL_WORK_ID`]. The user's completions that the pool
    /// polls are kept until the user polls.
    pub fn endpoint(&mut self, id: NodeId) -> Option<&mut Box<dyn Endpoint>> {
        self.nodes.get_mut(&id).map(ClientNode::endpoint)
    }

    fn node(&mut self, id: NodeId) -> Result<&mut ClientNode, PoolError> {
        self.nodes.get_mut(&id).ok_or(PoolError::NoSuchNode { node: id })
    }
}

/// Whether the outcome of a free proves that this host does not own the extent.
const fn is_certain(outcome: &Result<(), PoolError>) -> bool {
    matches!(outcome, Ok(()) | Err(PoolError::NotAllocated { .. } | PoolError::NotOurs { .. }))
}
