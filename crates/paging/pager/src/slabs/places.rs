//! The places of a slab's record, each for one replica.

use std::sync::atomic::Ordering::Acquire;

use super::{
    BACKUP_PLACES, ENTRY_BYTES, FURTHER_BYTES, FURTHER_OFFSET, MEMORY_BYTES, PLACES, REPLICA_BYTES,
    REPLICAS_MAX, SPARE_PLACE, SlabId, SlabSet,
};

/// Whether a place of a slab's record is for backups.
#[must_use]
pub const fn is_backup_place(place: usize) -> bool {
    BACKUP_PLACES.start <= place && place < BACKUP_PLACES.end
}

impl SlabSet {
    /// The place for a replica in memory that is made before the one that it replaces is dropped;
    /// `None` if the record has no place for a fourth replica.
    pub(crate) fn spare_place(&self) -> Option<usize> {
        let wanted = self.policy.replicas;
        if wanted < REPLICAS_MAX { Some(wanted) } else { self.has_place(SPARE_PLACE) }
    }

    /// The places for replicas in memory: one more than the replicas wanted, if the record has it.
    pub(super) fn memory_places(&self) -> impl DoubleEndedIterator<Item = usize> + use<> {
        (0..self.policy.replicas).chain(self.spare_place())
    }

    /// The places of a slab's record that may be in use, the spare ones last.
    pub(crate) fn places(&self) -> impl DoubleEndedIterator<Item = usize> + use<> {
        let backups = if self.has_backups.load(Acquire) { BACKUP_PLACES } else { 0..0 };
        backups.chain(self.memory_places())
    }

    pub(super) fn replica_offset(slab: SlabId, place: usize) -> usize {
        if let Some(further) = place.checked_sub(REPLICAS_MAX) {
            let number = slab.0 as usize * (PLACES - REPLICAS_MAX) + further;
            return FURTHER_OFFSET + number * FURTHER_BYTES;
        }
        slab.0 as usize * ENTRY_BYTES + place * REPLICA_BYTES
    }

    /// The place, if the records have it: those of an earlier version have only the first.
    pub(super) fn has_place(&self, place: usize) -> Option<usize> {
        (place < REPLICAS_MAX || self.memory.len() >= MEMORY_BYTES).then_some(place)
    }
}
