//! The spare places of a slab's record, for replicas in memory and for backups, which are used
//! while a replica is moved. After the move the new replica gets a usual place.

use std::ops::Range;
use std::sync::atomic::Ordering::Relaxed;

use super::{BACKUP_PLACES, SlabId, SlabSet};

impl SlabSet {
    /// Moves the records of complete replicas from the spare places to usual ones, if they are
    /// free. No operation on the slab may be in flight whose id has the place.
    ///
    /// Between the two stores both places have the same extent, which is harmless for readers. An
    /// agent that dies there leaves that to the next one, which calls this for each slab.
    pub(crate) fn leave_spare_place(&self, slab: SlabId) {
        if let Some(spare) = self.spare_place() {
            self.leave_place(slab, spare, 0..self.replicas_wanted());
        }
        if self.has_backups.load(Relaxed) {
            let Range { start: usual, end } = BACKUP_PLACES;
            self.leave_place(slab, end - 1, usual..usual + 1);
        }
    }

    /// Moves the record of a complete replica from a spare place to a usual one.
    fn leave_place(&self, slab: SlabId, spare: usize, usual: Range<usize>) {
        let Some(replica) = self.replica(slab, spare) else { return };
        let is_here = |place: &usize| self.replica(slab, *place) == Some(replica);
        if usual.clone().any(|place| is_here(&place)) {
            self.clear(slab, spare);
            return;
        }
        let is_free = |place: &usize| self.extent_at_place(slab, *place).is_none();
        if let Some(place) = usual.into_iter().find(is_free) {
            self.record_replica(slab, place, replica, 0);
            self.clear(slab, spare);
        }
    }
}

#[cfg(test)]
mod tests {
    use aquifer_fabric::Key;
    use aquifer_pool::{Extent, NodeClass, NodeId, SizeClass};

    use super::super::{REPLICAS_MAX, SPARE_PLACE};
    use super::*;
    use crate::copy_policy::{Backup, CopyPolicy};

    fn replica(node: u16) -> Extent {
        let class = SizeClass::new(0).expect("a valid class");
        Extent { node: NodeId(node), addr: 4096 * u64::from(node), class, key: Key(u32::from(node)) }
    }

    #[test]
    fn a_moved_replica_leaves_the_spare_place() {
        let (slabs, slab) = (SlabSet::with_replicas(2).expect("memory"), SlabId(5));
        slabs.publish(slab, &[replica(1), replica(2)], None);
        slabs.add_replica(slab, replica(3), NodeClass::Memory);
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
        slabs.publish(slab, &[replica(1)], None);
        slabs.record_replica(slab, 1, replica(1), 0);
        assert_eq!(slabs.replicas(slab).len(), 2, "it has died here");
        slabs.leave_spare_place(slab);
        assert_eq!(slabs.replicas(slab).placed().collect::<Vec<_>>(), [(0, replica(1))]);
    }

    #[test]
    fn a_moved_backup_leaves_its_spare_place() {
        let policy = CopyPolicy { replicas: 1, backup: Backup::IfNeeded };
        let (slabs, slab) = (SlabSet::with_policy(policy).expect("memory"), SlabId(5));
        slabs.publish(slab, &[], Some(replica(1)));
        slabs.add_replica(slab, replica(2), NodeClass::Disk);
        slabs.leave_spare_place(slab);
        assert_eq!(slabs.replicas(slab).at(REPLICAS_MAX + 1), Some(replica(2)), "no usual place is free");
        assert!(slabs.drop_replica(slab, NodeId(1)));
        slabs.leave_spare_place(slab);
        assert_eq!(slabs.replicas(slab).placed().collect::<Vec<_>>(), [(REPLICAS_MAX, replica(2))]);
        assert_eq!((slabs.bytes().0, slabs.backup_bytes()), (0, 4096));
    }

    #[test]
    fn three_replicas_have_a_spare_place_behind_the_backups() {
        let (slabs, slab) = (SlabSet::with_replicas(3).expect("memory"), SlabId(5));
        slabs.publish(slab, &[replica(1), replica(2), replica(3)], None);
        slabs.add_replica(slab, replica(4), NodeClass::Memory);
        assert_eq!(slabs.replicas(slab).at(SPARE_PLACE), Some(replica(4)));
        assert_eq!(slabs.replicas(slab).in_memory(), 4);
        slabs.drop_replica(slab, NodeId(1));
        slabs.leave_spare_place(slab);
        let placed: Vec<_> = slabs.replicas(slab).placed().collect();
        assert_eq!(placed, [(0, replica(4)), (1, replica(2)), (2, replica(3))]);
    }
}
