//! Suspended nodes: nodes that are away, to which the sender does not write.

use aquifer_pool::NodeId;

use super::Filler;
use crate::slabs::SlabId;

impl Filler {
    /// Excludes slabs with a replica on this node from filling, until [`Self::resume`]. Returns
    /// false if the node was suspended already.
    pub fn suspend(&mut self, node: NodeId) -> bool {
        if self.is_suspended(node) {
            return false;
        }
        self.suspended.push(node);
        if let Some(open) = self.open.take_if(|open| self.slabs.replicas(open.slab).on(node).is_some())
            && self.slabs.live_pages(open.slab) == 0
        {
            self.empty.insert(open.slab);
        }
        true
    }

    /// Permits to fill slabs with replicas on this node again. Returns false if the node was not
    /// suspended.
    pub fn resume(&mut self, node: NodeId) -> bool {
        self.suspended.extract_if(.., |other| *other == node).count() > 0
    }

    /// Whether a node is suspended.
    #[must_use]
    pub fn is_suspended(&self, node: NodeId) -> bool {
        self.suspended.contains(&node)
    }

    /// The number of [degraded](Self::degraded) slabs that hold pages.
    #[must_use]
    pub fn degraded_with_pages(&self) -> usize {
        self.degraded.iter().filter(|slab| self.slabs.live_pages(*slab) > 0).count()
    }

    /// The number of other slabs that hold pages and have a replica on a suspended node. While
    /// nodes are suspended no slab becomes one of them.
    #[must_use]
    pub fn suspended_with_pages(&self) -> usize {
        if self.suspended.is_empty() {
            return 0;
        }
        let copies = self.slabs.policy().copies();
        let is_complete = |slab: &SlabId| self.slabs.replicas(*slab).len() >= copies;
        let counted = self.in_use.iter().filter(|slab| self.slabs.live_pages(*slab) > 0);
        counted.filter(is_complete).filter(|slab| self.has_suspended_replica(*slab)).count()
    }

    /// Whether any node is suspended.
    #[must_use]
    pub fn has_suspended_nodes(&self) -> bool {
        !self.suspended.is_empty()
    }

    /// Whether a slab has a replica on a node that is suspended.
    pub(super) fn has_suspended_replica(&self, slab: SlabId) -> bool {
        !self.suspended.is_empty()
            && self.slabs.replicas(slab).iter().any(|replica| self.is_suspended(replica.node))
    }

    /// Drops the replica of a slab on a node that lacks a WRITE, if there is another replica.
    pub fn drop_replica(&mut self, slab: SlabId, node: NodeId) {
        if self.slabs.drop_replica(slab, node) {
            self.classify(slab);
        }
    }
}
