//! Chooses the slabs and locations for evicted pages. Slabs are filled in the order of eviction,
//! and the holes of sparse slabs first.

mod empty;
mod recalled;
mod slab_list;
mod sparse;
mod suspended;
#[cfg(test)]
mod tests;

use slab_list::SlabList;
pub use sparse::GainThreshold;

use std::sync::Arc;

use aquifer_pool::{Extent, NodeId, PoolClient, PoolError, RecalledMemory, SizeClass};

use crate::allowance::Allowance;
use crate::page::Location;
use crate::slabs::{SLAB_PAGES_MAX, SLABS_MAX, SlabId, SlabSet, UnfinishedReplica};

/// A new slab has 1/`SLAB_DIVISOR` of the run's bytes on memory nodes, from 4 KiB to 2 MiB. So
/// little memory is unused, and the number of slabs is small.
const SLAB_DIVISOR: u64 = 16;
/// Size classes to try when the pool has no extent of the wanted class.
const FALLBACK_CLASSES: [u8; 3] = [7, 5, 0];

/// Why evicted pages cannot be written to any node.
#[derive(Debug, thiserror::Error)]
pub enum NoRoom {
    /// No memory node is connected.
    #[error("no memory node is connected")]
    NoNodes,
    /// The run has as many slabs as a run may have.
    #[error("the run has {SLABS_MAX} slabs on memory nodes, which is the maximum")]
    TooManySlabs,
    /// A node is away, and the other nodes have no free memory. The node may return.
    #[error("memory node {} is away; waiting for it", .0.0)]
    Away(NodeId),
    /// The run may not allocate more ([`Allowance::bytes_max`]).
    #[error("the run may not have more memory of the pool")]
    NotAllowed,
    /// The free memory of the pool is left to others ([`Allowance::leave_free`]).
    #[error("the pool is full but for {} MiB, left to runs that have less of it", .free_bytes >> 20)]
    LeftToOthers {
        /// Free bytes on all nodes.
        free_bytes: u64,
    },
    /// No node has free memory. Contains the last error.
    #[error("the pool is full: {0}")]
    Pool(PoolError),
}

/// Consecutive free pages of one slab.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FreePages {
    /// The first page.
    pub first: Location,
    /// The number of pages.
    pub pages: u32,
}

/// The slab that is being filled.
#[derive(Debug)]
struct OpenSlab {
    slab: SlabId,
    /// The first page that was not examined yet.
    cursor: u32,
    pages: u32,
}

/// A request for extents of the pool.
#[derive(Clone, Copy, Debug)]
struct ExtentRequest {
    class: SizeClass,
    /// The number of nodes.
    nodes: usize,
    /// The maximum number of extents on each node. There is at least one.
    each: u32,
}

/// Chooses slabs and pages for one sender.
#[derive(Debug)]
pub struct Filler {
    slabs: Arc<SlabSet>,
    open: Option<OpenSlab>,
    allowance: Allowance,
    in_use: SlabList,
    /// Slabs in use with fewer replicas than requested.
    degraded: SlabList,
    /// Empty slabs that are kept for reuse.
    empty: SlabList,
    /// Sparse slabs that the last search found, the emptiest last.
    candidates: Vec<SlabId>,
    /// Number of slabs to fill before the next search for sparse slabs.
    fills_until_search: usize,
    /// The slab that is being copied to a new replica, which must not be filled or freed.
    copying: Option<SlabId>,
    /// Nodes that are away. Slabs with a replica there are not filled.
    suspended: Vec<NodeId>,
    /// Memory that nodes recall. Slabs with a replica there are not filled.
    recalled: Vec<RecalledMemory>,
    /// Nodes that an allocation found to be gone.
    gone_nodes: Vec<NodeId>,
    /// Slabs whose last replica is gone.
    unreachable: Vec<SlabId>,
    /// Numbers of slabs below `used_numbers` that are not in use.
    free_numbers: Vec<SlabId>,
    used_numbers: u32,
    /// The state of a xorshift generator.
    random: u64,
}

impl Filler {
    /// A filler for the slabs of one run. `seed` distributes runs over the nodes.
    #[must_use]
    pub fn new(slabs: Arc<SlabSet>, seed: u64) -> Self {
        // After a restart of the agent the set may have slabs.
        let has_slabs = slabs.bytes().0 > 0;
        let numbers: Vec<SlabId> =
            if has_slabs { slabs.in_use().map(|(slab, _)| slab).collect() } else { Vec::new() };
        let used_numbers = numbers.last().map_or(0, |slab| slab.0 + 1);
        let in_use: SlabList = numbers.into_iter().collect();
        let free_numbers = (0..used_numbers).map(SlabId).filter(|slab| !in_use.contains(*slab)).collect();
        let wanted = slabs.replicas_wanted();
        let degraded = in_use.iter().filter(|slab| slabs.replicas(*slab).len() < wanted).collect();
        Self {
            slabs,
            open: None,
            allowance: Allowance::ALL,
            in_use,
            degraded,
            empty: SlabList::default(),
            candidates: Vec::new(),
            fills_until_search: 0,
            copying: None,
            suspended: Vec::new(),
            recalled: Vec::new(),
            gone_nodes: Vec::new(),
            unreachable: Vec::new(),
            free_numbers,
            used_numbers,
            random: seed | 1,
        }
    }

    /// Sets the memory that may be allocated from now on.
    pub fn set_allowance(&mut self, allowance: Allowance) {
        self.allowance = allowance;
    }

    /// Finds up to `want` consecutive free pages. The caller must occupy them before the next call.
    ///
    /// # Errors
    /// If no node has free memory, or no node is left.
    pub fn find_free_pages(&mut self, pool: &mut PoolClient, want: u32) -> Result<FreePages, NoRoom> {
        loop {
            if let Some(open) = &mut self.open {
                let at = |index| Location::new(open.slab, index);
                let first = (open.cursor..open.pages).find(|index| self.slabs.is_free(at(*index)));
                if let Some(first) = first {
                    let limit = open.pages.min(first + want);
                    let end = (first..limit).find(|index| !self.slabs.is_free(at(*index))).unwrap_or(limit);
                    let free_pages = FreePages { first: at(first), pages: end - first };
                    open.cursor = end;
                    return Ok(free_pages);
                }
            }
            self.open = Some(self.next_slab(pool, want)?);
        }
    }

    /// Drops the replicas on a node that is gone.
    ///
    /// Slabs without another replica stay recorded while pages in them are referenced, so that
    /// readers get an error.
    pub fn forget_node(&mut self, node: NodeId) {
        self.resume(node);
        self.open.take_if(|open| self.slabs.replicas(open.slab).on(node).is_some());
        self.forget_replicas(|replica| replica.node == node);
    }

    /// Drops the replicas for which `is_lost` returns true. An empty slab without another replica
    /// is removed.
    fn forget_replicas(&mut self, mut is_lost: impl FnMut(Extent) -> bool) {
        let slabs = Arc::clone(&self.slabs);
        for slab in self.in_use.iter().collect::<Vec<_>>() {
            let mut replicas = slabs.replicas(slab).iter();
            if replicas.all(|replica| !is_lost(replica) || slabs.drop_replica(slab, replica.node)) {
                continue;
            }
            self.in_use.remove(slab);
            self.empty.remove(slab);
            self.unreachable.push(slab);
            slabs.unmark(slab);
            if slabs.live_pages(slab) == 0 && self.copying != Some(slab) {
                slabs.remove_slab(slab);
                self.free_numbers.push(slab);
            }
        }
        self.update_degraded();
    }

    /// After a restart, adopts the recovered slabs, and returns the nodes that they are on.
    ///
    /// Frees unfinished extents. Drops replicas on nodes to which `pool` has no connection.
    pub fn adopt_recovered(&mut self, pool: &mut PoolClient) -> Vec<NodeId> {
        self.slabs.unfinished_replicas().for_each(|unfinished| self.free_unfinished(pool, unfinished));
        // Drop replicas in an earlier life of their node's memory. If the node does not answer, the
        // life of its memory is unknown, so the replica stays for now.
        self.forget_replicas(|replica| !pool.is_current(replica).unwrap_or(true));
        let mut nodes = self.nodes();
        nodes.retain(|node| {
            let is_known = pool.nodes().any(|other| other == *node);
            if !is_known {
                self.forget_node(*node);
                pool.suspect_leak(*node);
            }
            is_known
        });
        self.free_surplus_replicas(pool);
        nodes
    }

    /// The nodes on which the slabs in use have replicas.
    pub fn nodes(&self) -> Vec<NodeId> {
        let mut nodes: Vec<NodeId> = Vec::new();
        for replica in self.in_use.iter().flat_map(|slab| self.slabs.replicas(slab).iter()) {
            if !nodes.contains(&replica.node) {
                nodes.push(replica.node);
            }
        }
        nodes
    }

    fn free_unfinished(&self, pool: &mut PoolClient, unfinished: UnfinishedReplica) {
        let UnfinishedReplica { slab, place, extent, inline_log } = unfinished;
        if inline_log == 0 {
            free_recorded(&self.slabs, pool, &mut [RecordedReplica { slab, place, extent }]);
            return;
        }
        match pool.resume_free(extent, inline_log) {
            Ok(true) => {}
            Ok(false) => tracing::info!(?extent, "extent was free or owned by another host already"),
            Err(error) => {
                tracing::warn!(%error, ?extent, "freeing a slab failed; the next leak scan frees it");
            }
        }
        self.slabs.clear(slab, place);
    }

    fn update_degraded(&mut self) {
        let wanted = self.slabs.replicas_wanted();
        self.degraded = self.in_use.iter().filter(|slab| self.slabs.replicas(*slab).len() < wanted).collect();
    }

    /// A replica of any slab on this node.
    #[must_use]
    pub fn any_replica_on(&self, node: NodeId) -> Option<Extent> {
        self.in_use.iter().find_map(|slab| self.slabs.replicas(slab).on(node))
    }

    /// Slabs in use with fewer replicas than requested.
    pub fn degraded(&self) -> impl Iterator<Item = SlabId> {
        self.degraded.iter()
    }

    /// The number of [`Self::degraded`] slabs.
    #[must_use]
    pub fn degraded_count(&self) -> usize {
        self.degraded.len()
    }

    /// Removes the nodes that allocations found to be gone since the last call.
    pub fn drain_gone_nodes(&mut self) -> Vec<NodeId> {
        std::mem::take(&mut self.gone_nodes)
    }

    /// Removes the slabs whose last replica was found gone since the last call.
    pub fn drain_unreachable(&mut self) -> Vec<SlabId> {
        std::mem::take(&mut self.unreachable)
    }

    /// Excludes a slab from filling and freeing while it is copied to a new replica.
    pub fn begin_copying(&mut self, slab: SlabId) {
        self.open.take_if(|open| open.slab == slab);
        self.copying = Some(slab);
    }

    /// Ends the exclusion of a slab that was copied, successfully or not.
    pub fn end_copying(&mut self, pool: &mut PoolClient, slab: SlabId) {
        self.copying = None;
        self.restore_slab(pool, slab);
        if self.slabs.replicas(slab).len() >= self.slabs.replicas_wanted() {
            self.degraded.remove(slab);
        }
        if self.slabs.live_pages(slab) == 0 {
            self.free_slabs(pool, &[slab]);
        }
    }

    /// Uses a slab again whose last node died while a new replica was made and completed.
    fn restore_slab(&mut self, pool: &PoolClient, slab: SlabId) {
        let is_here = |replica: &Extent| pool.nodes().any(|node| node == replica.node);
        let replicas = self.slabs.replicas(slab);
        if self.in_use.contains(slab) || !replicas.iter().any(|replica| is_here(&replica)) {
            return;
        }
        for replica in replicas.iter().filter(|replica| !is_here(replica)) {
            self.slabs.drop_replica(slab, replica.node);
            pool.suspect_leak(replica.node);
        }
        self.in_use.insert(slab);
        self.update_degraded();
    }

    /// Allocates an extent for one more replica of a slab, on a node that has none of it.
    pub fn allocate_replica(&mut self, pool: &mut PoolClient, slab: SlabId) -> Option<Extent> {
        let replicas = self.slabs.replicas(slab);
        let request = ExtentRequest { class: replicas.class()?, nodes: 1, each: 1 };
        self.allocate_on_nodes(pool, request, |node| replicas.on(node).is_none(), &mut NoRoom::NoNodes).pop()
    }

    /// Chooses the next slab to fill, with as many replicas as requested and as there are nodes.
    ///
    /// In this order: the emptiest slab that is at most half full, an empty slab, a new slab. If
    /// there is no memory for all replicas, a slab with fewer; the missing ones are made later. If
    /// there is no memory at all, the slab with the most holes.
    fn next_slab(&mut self, pool: &mut PoolClient, want: u32) -> Result<OpenSlab, NoRoom> {
        let previous = self.open.take().map(|open| open.slab);
        // A slab that became empty while it was open was not recorded as empty.
        if let Some(slab) = previous.filter(|slab| self.slabs.live_pages(*slab) == 0) {
            self.empty.insert(slab);
        }
        let nodes = pool.nodes().filter(|node| !self.is_suspended(*node)).count();
        let replicas = self.slabs.replicas_wanted().min(nodes).max(1);
        if let Some(open) = self.sparse_slab(previous, replicas).or_else(|| self.empty_slab(replicas)) {
            return Ok(open);
        }
        let refused = match self.allocate_slab(pool, want, replicas, replicas) {
            Err(refused) => refused,
            outcome => return outcome,
        };
        if replicas > 1 {
            if let Some(open) = self.sparse_slab(previous, 1).or_else(|| self.empty_slab(1)) {
                return Ok(open);
            }
            if let Ok(open) = self.allocate_slab(pool, want, replicas, 1) {
                return Ok(open);
            }
        }
        self.slab_with_holes().ok_or(refused)
    }

    fn allocate_slab(
        &mut self,
        pool: &mut PoolClient,
        want: u32,
        replicas: usize,
        replicas_min: usize,
    ) -> Result<OpenSlab, NoRoom> {
        let slab = self.free_number()?;
        let _operation = pool.begin_operation();
        match self.allocate(pool, want, replicas, replicas_min) {
            Ok(extents) => {
                self.publish_slab(slab, &extents);
                Ok(OpenSlab { slab, cursor: 0, pages: extents[0].class.chunks() })
            }
            Err(error) => {
                self.free_numbers.push(slab);
                Err(error)
            }
        }
    }

    fn free_number(&mut self) -> Result<SlabId, NoRoom> {
        match self.free_numbers.pop() {
            Some(slab) => Ok(slab),
            None if self.used_numbers < SLABS_MAX => {
                self.used_numbers += 1;
                Ok(SlabId(self.used_numbers - 1))
            }
            None => Err(NoRoom::TooManySlabs),
        }
    }

    fn publish_slab(&mut self, slab: SlabId, extents: &[Extent]) {
        self.slabs.publish(slab, extents);
        self.in_use.insert(slab);
        if extents.len() < self.slabs.replicas_wanted() {
            self.degraded.insert(slab);
        }
    }

    /// The size class of a new slab: large enough for `want` pages (at most 64), and for at least
    /// 1/[`SLAB_DIVISOR`] of the run's pages.
    fn wanted_class(&self, want: u32) -> u8 {
        let part = (self.slabs.pages() / SLAB_DIVISOR).clamp(1, SLAB_PAGES_MAX.into());
        let k = part.ilog2().max(want.next_power_of_two().ilog2());
        u8::try_from(k).expect("at most 9")
    }

    /// Allocates extents of one size on up to `replicas` distinct nodes, of the largest size for
    /// which there are at least `replicas_min`.
    fn allocate(
        &mut self,
        pool: &mut PoolClient,
        want: u32,
        replicas: usize,
        replicas_min: usize,
    ) -> Result<Vec<Extent>, NoRoom> {
        let wanted = self.wanted_class(want);
        let mut refused = NoRoom::NoNodes;
        for k in std::iter::once(wanted).chain(FALLBACK_CLASSES.into_iter().filter(|k| *k < wanted)) {
            let class = SizeClass::new(k).expect("a valid class");
            let request = ExtentRequest { class, nodes: replicas, each: 1 };
            let extents = self.allocate_on_nodes(pool, request, |_| true, &mut refused);
            if extents.len() >= replicas_min {
                return Ok(extents);
            }
            extents.iter().for_each(|extent| free_extents(pool, extent.node, &[*extent]));
        }
        Err(refused)
    }

    /// Allocates the requested extents on nodes for which `may_be_on` returns true; returns fewer
    /// if there is not enough memory.
    ///
    /// Each extent is on the node with more free memory of two random ones. If that node has no
    /// memory, the others are tried in the order of their free memory. Slow nodes are last, and
    /// behind them those that recall memory. `refused` receives the last error.
    fn allocate_on_nodes(
        &mut self,
        pool: &mut PoolClient,
        request: ExtentRequest,
        may_be_on: impl Fn(NodeId) -> bool,
        refused: &mut NoRoom,
    ) -> Vec<Extent> {
        let mut allocated = Vec::new();
        let mut nodes_found = 0;
        let mut nodes: Vec<NodeId> = pool.nodes().filter(|node| may_be_on(*node)).collect();
        if let Some(away) = nodes.extract_if(.., |node| self.suspended.contains(node)).last() {
            *refused = NoRoom::Away(away);
        }
        nodes.sort_unstable_by_key(|node| {
            let is_reluctant = (self.recalls_memory(*node), self.slabs.is_slow(*node));
            (is_reluctant, std::cmp::Reverse(pool.usable_bytes(*node)))
        });
        let mut is_first_choice = true;
        while nodes_found < request.nodes && !nodes.is_empty() {
            let at = if is_first_choice { self.choose(&nodes) } else { 0 };
            let node = nodes.remove(at);
            is_first_choice = false;
            if let Err(not_allowed) = self.check_allowance(pool, request) {
                *refused = not_allowed;
                break;
            }
            match pool.allocate_many(node, request.class, request.each) {
                Ok(extents) => {
                    self.allowance.spend(request.class.bytes() * extents.len() as u64);
                    allocated.extend(extents);
                    nodes_found += 1;
                    is_first_choice = true;
                }
                Err(error) => {
                    if let PoolError::NodeGone { node, .. } = error {
                        self.gone_nodes.push(node);
                    }
                    match error {
                        PoolError::Away { node } => *refused = NoRoom::Away(node),
                        // A node that is away may have free memory, so this error is reported
                        // before *full*.
                        _ if matches!(refused, NoRoom::Away(_)) => {}
                        error => *refused = NoRoom::Pool(error),
                    }
                }
            }
        }
        allocated
    }

    /// Whether the allowance permits a request to one node.
    fn check_allowance(&self, pool: &PoolClient, request: ExtentRequest) -> Result<(), NoRoom> {
        let Allowance { bytes_max, leave_free } = self.allowance;
        let bytes = request.class.bytes() * u64::from(request.each);
        if bytes > bytes_max {
            return Err(NoRoom::NotAllowed);
        }
        // Most runs need not leave memory free, and so need not sum up the free memory.
        if leave_free == 0 {
            return Ok(());
        }
        let free_bytes = pool.nodes().map(|node| pool.free_bytes(node)).sum();
        if free_bytes >= bytes + leave_free { Ok(()) } else { Err(NoRoom::LeftToOthers { free_bytes }) }
    }

    /// Draws two of the nodes, which are sorted by preference, and returns the index of the better
    /// one.
    fn choose(&mut self, nodes: &[NodeId]) -> usize {
        match nodes.len() {
            0..=2 => 0,
            // The nodes are sorted, so the smaller index is the better node.
            count => self.random_below(count).min(self.random_below(count)),
        }
    }

    fn random_below(&mut self, below: usize) -> usize {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        usize::try_from(self.random >> 33).expect("31 bits") % below
    }
}

/// An extent at a place of a slab's record.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RecordedReplica {
    pub slab: SlabId,
    pub place: usize,
    pub extent: Extent,
}

/// Frees extents that are recorded as replicas, node by node, and then clears their records.
///
/// Each extent stays recorded as being freed until its node has answered, so that a later agent can
/// complete the free. If the pool does not have the node, only the records are cleared, and a leak
/// scan frees the extents. Failures are logged.
pub(crate) fn free_recorded(slabs: &SlabSet, pool: &mut PoolClient, recorded: &mut [RecordedReplica]) {
    recorded.sort_unstable_by_key(|recorded| recorded.extent.node);
    for of_node in recorded.chunk_by(|one, other| one.extent.node == other.extent.node) {
        let node = of_node[0].extent.node;
        let forget = || of_node.iter().for_each(|recorded| slabs.clear(recorded.slab, recorded.place));
        if pool.nodes().any(|other| other == node) {
            for recorded in of_node {
                slabs.begin_free(recorded.slab, recorded.place, pool.last_record(recorded.extent));
            }
            let extents: Vec<Extent> = of_node.iter().map(|recorded| recorded.extent).collect();
            free_extents(pool, node, &extents);
            forget();
        } else {
            forget();
            pool.suspect_leak(node);
        }
    }
}

/// Frees extents of one node. Logs a failure.
pub(crate) fn free_extents(pool: &mut PoolClient, node: NodeId, extents: &[Extent]) {
    let outcomes = match pool.free_many(node, extents) {
        Ok(outcomes) => outcomes,
        Err(error) => vec![Err(error)],
    };
    for error in outcomes.into_iter().filter_map(Result::err) {
        if let PoolError::Away { .. } = error {
            tracing::debug!(%error, slabs = extents.len(), "slabs will be freed when their node returns");
        } else {
            tracing::warn!(%error, "freeing a slab failed; the next leak scan frees it");
        }
    }
}
