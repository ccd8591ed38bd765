//! Recalled slabs: those with a replica in memory that its node recalls. They are not filled, and
//! the healer moves the replica to another node.

use aquifer_pool::{Extent, NodeClass, NodeId, PoolClient, RecalledMemory};

use super::{ExtentRequest, Filler, NoRoom, RecordedReplica, free_recorded};
use crate::allowance::Allowance;
use crate::slabs::{SlabId, is_backup_place};

impl Filler {
    /// Sets the memory that nodes recall. Empty slabs there are freed.
    pub fn set_recalled(&mut self, pool: &mut PoolClient, recalled: Vec<RecalledMemory>) {
        self.recalled = recalled;
        if self.recalled.is_empty() {
            return;
        }
        if let Some(open) = &self.open
            && self.is_recalled(open.slab)
        {
            let slab = open.slab;
            self.open = None;
            if self.slabs.live_pages(slab) == 0 {
                self.empty.insert(slab);
            }
        }
        let is_unused = |slab: &SlabId| self.is_recalled(*slab) && self.slabs.live_pages(*slab) == 0;
        let empty: Vec<SlabId> = self.empty.iter().filter(is_unused).collect();
        for slab in &empty {
            self.empty.remove(*slab);
        }
        self.free_slabs(pool, &empty);
    }

    /// Whether a node recalls memory.
    #[must_use]
    pub fn recalls_memory(&self, node: NodeId) -> bool {
        self.recalled.iter().any(|recalled| recalled.node == node)
    }

    /// Whether any node recalls memory.
    #[must_use]
    pub fn has_recalled_memory(&self) -> bool {
        !self.recalled.is_empty()
    }

    /// The replica of a slab that its node recalls, with its place; the first if there are several.
    #[must_use]
    pub fn recalled_replica(&self, slab: SlabId) -> Option<(usize, Extent)> {
        if self.recalled.is_empty() {
            return None;
        }
        let is_recalled = |replica: &Extent| self.recalled.iter().any(|recalled| recalled.includes(replica));
        self.slabs.replicas(slab).placed().find(|(_, replica)| is_recalled(replica))
    }

    /// Whether a node recalls a replica of the slab.
    pub(super) fn is_recalled(&self, slab: SlabId) -> bool {
        self.recalled_replica(slab).is_some()
    }

    /// The slabs with pages of which a node recalls a replica, those that were used last first.
    #[must_use]
    pub fn recalled_slabs(&self) -> Vec<SlabId> {
        let holds_pages = |slab: &SlabId| self.slabs.live_pages(*slab) > 0;
        let mut found: Vec<SlabId> =
            self.in_use.iter().filter(holds_pages).filter(|slab| self.is_recalled(*slab)).collect();
        found.sort_by_key(|slab| std::cmp::Reverse(self.slabs.touched_at(*slab)));
        found
    }

    /// Whether another node could have the replica of a slab that its node recalls.
    #[must_use]
    pub fn has_other_node(&self, pool: &PoolClient, slab: SlabId) -> bool {
        let replicas = self.slabs.replicas(slab);
        let bytes = replicas.class().map_or(0, aquifer_pool::SizeClass::bytes);
        let class = self.recalled_class(pool, slab);
        let may_have = |node: &NodeId| {
            Some(node_class(pool, *node)) == class
                && self.may_receive(slab, *node)
                && pool.may_have_free(*node, bytes)
        };
        pool.nodes().any(|node| may_have(&node))
    }

    /// The class of the node that recalls a replica of a slab.
    fn recalled_class(&self, pool: &PoolClient, slab: SlabId) -> Option<NodeClass> {
        self.recalled_replica(slab).map(|(_, replica)| node_class(pool, replica.node))
    }

    fn may_receive(&self, slab: SlabId, node: NodeId) -> bool {
        self.slabs.replicas(slab).on(node).is_none() && !self.recalls_memory(node)
    }

    /// Allocates an extent for the replica of a slab that its node recalls, on another node of the
    /// same class.
    ///
    /// What the run may have does not matter, because the old extent is freed for it.
    pub fn allocate_elsewhere(&mut self, pool: &mut PoolClient, slab: SlabId) -> Option<Extent> {
        let class = self.slabs.replicas(slab).class()?;
        let on = self.recalled_class(pool, slab)?;
        let request = ExtentRequest { class, nodes: 1, each: 1, on };
        let allowance = std::mem::replace(&mut self.allowance, Allowance::ALL);
        let (slabs, recalled) = (std::sync::Arc::clone(&self.slabs), self.recalled.clone());
        let may_receive = |node: NodeId| {
            slabs.replicas(slab).on(node).is_none() && recalled.iter().all(|recalled| recalled.node != node)
        };
        let allocated = self.allocate_on_nodes(pool, request, may_receive, &mut NoRoom::NoNodes);
        self.allowance = allowance;
        allocated.into_iter().next()
    }

    /// Frees the replica of a slab on a node, if there is another one.
    pub fn free_replica(&mut self, pool: &mut PoolClient, slab: SlabId, node: NodeId) -> bool {
        let replicas = self.slabs.replicas(slab);
        let found = replicas.placed().find(|(_, replica)| replica.node == node);
        let Some((place, extent)) = found.filter(|_| replicas.len() > 1) else { return false };
        free_recorded(&self.slabs, pool, &mut [RecordedReplica { slab, place, extent }]);
        self.slabs.leave_spare_place(slab);
        self.classify(slab);
        true
    }

    /// Frees replicas beyond those that are wanted: an earlier agent had moved a slab, and not
    /// freed the old replica yet.
    pub(super) fn free_surplus_replicas(&mut self, pool: &mut PoolClient) {
        for slab in self.in_use.iter().collect::<Vec<_>>() {
            let replicas = self.slabs.replicas(slab);
            let placed = |of_backups: bool| {
                replicas.placed().filter(move |(place, _)| is_backup_place(*place) == of_backups)
            };
            let is_surplus = replicas.in_memory() > self.slabs.replicas_wanted();
            // The new one is the last. A version without moves has not written to it.
            let replica = placed(false).last().filter(|_| is_surplus);
            let second_backup = placed(true).nth(1);
            let is_unneeded = !self.must_have_backup() && !self.lacks_replica(slab);
            let unneeded_backup = placed(true).next().filter(|_| is_unneeded);
            for (_, surplus) in [replica, second_backup, unneeded_backup].into_iter().flatten() {
                self.free_replica(pool, slab, surplus.node);
            }
        }
    }
}

/// The class of a node.
pub(crate) fn node_class(pool: &PoolClient, node: NodeId) -> NodeClass {
    if pool.is_disk(node) { NodeClass::Disk } else { NodeClass::Memory }
}
