//! Chooses the slabs and locations for evicted pages. Slabs are filled in the order of eviction,
//! and the holes of sparse slabs first.

mod backups;
mod empty;
mod extents;
pub(crate) mod recalled;
mod slab_list;
mod sparse;
mod suspended;
#[cfg(test)]
mod tests;

use backups::CopyGoal;
use extents::ExtentRequest;
pub(crate) use recalled::node_class;
use slab_list::SlabList;
pub use sparse::GainThreshold;

use std::sync::Arc;

use aquifer_pool::{Extent, NodeClass, NodeId, PoolClient, PoolError, RecalledMemory, SizeClass};

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

/// A request for the extents of a new slab.
#[derive(Clone, Copy, Debug)]
struct SlabRequest {
    /// The number of pages to be written at once.
    want: u32,
    /// Replicas in memory: the number, and the least number.
    replicas: usize,
    replicas_min: usize,
    /// Whether there must be a backup.
    must_have_backup: bool,
}

/// The extents of a new slab. There is at least one.
#[derive(Debug)]
struct NewSlab {
    class: SizeClass,
    replicas: Vec<Extent>,
    backup: Option<Extent>,
}

/// Chooses slabs and pages for one sender.
#[derive(Debug)]
pub struct Filler {
    slabs: Arc<SlabSet>,
    open: Option<OpenSlab>,
    allowance: Allowance,
    in_use: SlabList,
    /// Slabs in use with fewer copies than requested.
    degraded: SlabList,
    /// Slabs in use with a backup that lack replicas in memory.
    displaced: SlabList,
    /// Number of slabs that were put there so far.
    displaced_total: u64,
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
        let has_slabs = slabs.bytes().0 + slabs.backup_bytes() > 0;
        let numbers: Vec<SlabId> =
            if has_slabs { slabs.in_use().map(|(slab, _)| slab).collect() } else { Vec::new() };
        let used_numbers = numbers.last().map_or(0, |slab| slab.0 + 1);
        let in_use: SlabList = numbers.into_iter().collect();
        let free_numbers = (0..used_numbers).map(SlabId).filter(|slab| !in_use.contains(*slab)).collect();
        let mut filler = Self {
            slabs,
            open: None,
            allowance: Allowance::ALL,
            in_use,
            degraded: SlabList::default(),
            displaced: SlabList::default(),
            displaced_total: 0,
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
        };
        filler.classify_all();
        filler
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
        self.classify_all();
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

    fn classify_all(&mut self) {
        (self.degraded, self.displaced) = (SlabList::default(), SlabList::default());
        for slab in self.in_use.iter().collect::<Vec<_>>() {
            self.classify(slab);
        }
    }

    /// A replica of any slab on this node.
    #[must_use]
    pub fn any_replica_on(&self, node: NodeId) -> Option<Extent> {
        self.in_use.iter().find_map(|slab| self.slabs.replicas(slab).on(node))
    }

    /// Slabs in use with fewer copies than requested.
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
        self.classify(slab);
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
        self.classify_all();
    }

    /// Allocates an extent for one more replica of a slab in memory, on a node that has none of it.
    pub fn allocate_replica(&mut self, pool: &mut PoolClient, slab: SlabId) -> Option<Extent> {
        let replicas = self.slabs.replicas(slab);
        let request = ExtentRequest { class: replicas.class()?, nodes: 1, each: 1, on: NodeClass::Memory };
        self.allocate_on_nodes(pool, request, |node| replicas.on(node).is_none(), &mut NoRoom::NoNodes).pop()
    }

    /// Chooses the next slab to fill, with as many replicas as requested and as there are nodes.
    ///
    /// In this order: the emptiest slab that is at most half full, an empty slab, a new slab. If
    /// there is no memory for all replicas, a slab with a backup; then one with fewer replicas. The
    /// missing ones are made later. If there is no room at all, the slab with the most holes.
    fn next_slab(&mut self, pool: &mut PoolClient, want: u32) -> Result<OpenSlab, NoRoom> {
        let previous = self.open.take().map(|open| open.slab);
        // A slab that became empty while it was open was not recorded as empty.
        if let Some(slab) = previous.filter(|slab| self.slabs.live_pages(*slab) == 0) {
            self.empty.insert(slab);
        }
        let is_usable = |node: &NodeId| !self.is_suspended(*node) && !pool.is_disk(*node);
        let nodes = pool.nodes().filter(is_usable).count();
        let wanted = self.slabs.replicas_wanted();
        let replicas = wanted.min(nodes).max(1);
        let has_disk = self.has_disk_node(pool);
        // With too few memory nodes, no replica can be made later in place of the backup.
        let must_have_backup = has_disk && nodes < wanted;
        let with_backup = has_disk && (must_have_backup || self.must_have_backup());
        let goal = CopyGoal::Complete { replicas, with_backup };
        let complete = SlabRequest { want, replicas, replicas_min: replicas, must_have_backup };
        let refused = match self.slab_for(pool, previous, goal, complete) {
            Err(refused) => refused,
            outcome => return outcome,
        };
        if has_disk {
            let backed = SlabRequest { replicas_min: 0, must_have_backup: true, ..complete };
            if let Ok(open) = self.slab_for(pool, previous, CopyGoal::Backup, backed) {
                return Ok(open);
            }
        }
        if replicas > 1 || with_backup {
            let fewer = SlabRequest { replicas_min: 1, must_have_backup: false, ..complete };
            if let Ok(open) = self.slab_for(pool, previous, CopyGoal::Any, fewer) {
                return Ok(open);
            }
        }
        self.slab_with_holes().ok_or(refused)
    }

    /// The emptiest slab that meets the goal, an empty one, or a new one.
    fn slab_for(
        &mut self,
        pool: &mut PoolClient,
        previous: Option<SlabId>,
        goal: CopyGoal,
        request: SlabRequest,
    ) -> Result<OpenSlab, NoRoom> {
        let found = self.sparse_slab(previous, goal).or_else(|| self.empty_slab(goal));
        found.map_or_else(|| self.allocate_slab(pool, request), Ok)
    }

    fn allocate_slab(&mut self, pool: &mut PoolClient, request: SlabRequest) -> Result<OpenSlab, NoRoom> {
        let slab = self.free_number()?;
        let _operation = pool.begin_operation();
        match self.allocate(pool, request) {
            Ok(new) => {
                self.publish_slab(slab, &new);
                Ok(OpenSlab { slab, cursor: 0, pages: new.class.chunks() })
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

    fn publish_slab(&mut self, slab: SlabId, new: &NewSlab) {
        self.slabs.publish(slab, &new.replicas, new.backup);
        self.in_use.insert(slab);
        self.classify(slab);
    }

    /// The size class of a new slab: large enough for `want` pages (at most 64), and for at least
    /// 1/[`SLAB_DIVISOR`] of the run's pages.
    fn wanted_class(&self, want: u32) -> u8 {
        let part = (self.slabs.pages() / SLAB_DIVISOR).clamp(1, SLAB_PAGES_MAX.into());
        let k = part.ilog2().max(want.next_power_of_two().ilog2());
        u8::try_from(k).expect("at most 9")
    }

    /// Allocates extents of one size on distinct nodes, of the largest size for which there are as
    /// many as the request demands.
    fn allocate(&mut self, pool: &mut PoolClient, request: SlabRequest) -> Result<NewSlab, NoRoom> {
        let SlabRequest { want, replicas, replicas_min, must_have_backup } = request;
        let wanted = self.wanted_class(want);
        let mut refused = NoRoom::NoNodes;
        for k in std::iter::once(wanted).chain(FALLBACK_CLASSES.into_iter().filter(|k| *k < wanted)) {
            let class = SizeClass::new(k).expect("a valid class");
            let on_memory = ExtentRequest { class, nodes: replicas, each: 1, on: NodeClass::Memory };
            let replicas = self.allocate_on_nodes(pool, on_memory, |_| true, &mut refused);
            let is_enough = replicas.len() >= replicas_min;
            let mut backup = None;
            if is_enough && (must_have_backup || self.must_have_backup()) {
                let on_disk = ExtentRequest { nodes: 1, on: NodeClass::Disk, ..on_memory };
                backup = self.allocate_on_nodes(pool, on_disk, |_| true, &mut refused).pop();
            }
            if is_enough && (backup.is_some() || !must_have_backup) {
                return Ok(NewSlab { class, replicas, backup });
            }
            replicas.iter().for_each(|extent| free_extents(pool, extent.node, &[*extent]));
        }
        Err(refused)
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
