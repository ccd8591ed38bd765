//! The spare place of a slab's record, which is used while a replica is moved. After the move the
//! new replica gets one of the usual places, because versions without moves know no others.

use super::{SlabId, SlabSet};

impl SlabSet {
    /// Moves the record of a complete replica from the spare place to a usual one, if one is free.
    /// No operation on the slab may be in flight whose id has the place.
    ///
    /// Between the two stores both places have the same extent, which is harmless for readers. An
    /// agent that dies there leaves that to the next one, which calls this for each slab.
    pub(crate) fn leave_spare_place(&self, slab: SlabId) {
        let (usual, spare) = (self.replicas_wanted(), self.places() - 1);
        if spare < usual {
            return;
        }
        let Some(replica) = self.replica(slab, spare) else { return };
        let is_here = |place: &usize| self.replica(slab, *place) == Some(replica);
        if (0..usual).any(|place| is_here(&place)) {
            self.clear(slab, spare);
            return;
        }
        let is_free = |place: &usize| self.extent_at_place(slab, *place).is_none();
        if let Some(place) = (0..usual).find(is_free) {
            self.record_replica(slab, place, replica, 0);
            self.clear(slab, spare);
        }
    }
}

#[cfg(test)]
mod tests {
    use aquifer_fabric::Key;
    use aquifer_pool::{Extent, NodeId, SizeClass};

    use super::*;

    fn replica(node: u16) -> Extent {
        let class = SizeClass::new(0).expect("a valid class");
        Extent { node: NodeId(node), addr: 4096 * u64::from(node), class, key: Key(u32::from(node)) }
    }

    #[test]
    fn a_moved_replica_leaves_the_spare_place() {
        let (slabs, slab) = (SlabSet::with_replicas(2).expect("memory"), SlabId(5));
        slabs.publish(slab, &[replica(1), replica(2)]);
        slabs.add_replica(slab, replica(3));
        slabs.leave_spare_place(slab);
        assert_eq!(slabs.replicas(slab).at(2), Some(replica(3)), "no usual place is free");
        slabs.begin_free(slab, 0, 1);
        slabs.leave_spare_place(slab);
        assert_eq!(slabs.replicas(slab).at(2), Some(replica(3)), "the old extent is being freed");
        slabs.clear(slab, 0);
        slabs.leave_spare_place(slab);
        let placed: Vec<_> = slabs.replicas(slab).placed().collect();
        assert_eq!(placed, [(0, replica(3)), (1, replica(2))]);
        assert_eq!(slabs.bytes().0, 2 * 4096);
    }

    #[test]
    fn an_agent_that_dies_in_between_leaves_one_replica() {
        let (slabs, slab) = (SlabSet::new().expect("memory"), SlabId(5));
        slabs.publish(slab, &[replica(1)]);
        slabs.record_replica(slab, 1, replica(1), 0);
        assert_eq!(slabs.replicas(slab).len(), 2, "it has died here");
        slabs.leave_spare_place(slab);
        assert_eq!(slabs.replicas(slab).placed().collect::<Vec<_>>(), [(0, replica(1))]);
    }

    #[test]
    fn three_replicas_have_no_spare_place() {
        let (slabs, slab) = (SlabSet::with_replicas(3).expect("memory"), SlabId(5));
        slabs.publish(slab, &[replica(1), replica(2), replica(3)]);
        slabs.drop_replica(slab, NodeId(1));
        slabs.leave_spare_place(slab);
        assert_eq!(slabs.replicas(slab).at(2), Some(replica(3)));
    }
}
