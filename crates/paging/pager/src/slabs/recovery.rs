//! Recovers the slabs of a run after a restart of the agent.
//!
//! The page tables decide which locations are in use: those that a page word references. So all
//! references are counted again, and the unfinished writes and releases of the killed agent have no
//! effect.

use std::sync::atomic::Ordering::{AcqRel, Relaxed, Release};
use std::sync::atomic::{AtomicBool, AtomicU64};

use aquifer_fabric::Memory;
use aquifer_pool::{Extent, Ledger, SizeClass};
use parking_lot::Mutex;

use super::{MEMORY_BYTES, REPLICAS_MAX, SlabId, SlabSet};
use crate::copy_policy::{Backup, CopyPolicy};
use crate::page::Location;

/// A recorded extent that is not a complete replica, because an earlier agent had begun to fill or
/// to free it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct UnfinishedReplica {
    pub slab: SlabId,
    pub place: usize,
    pub extent: Extent,
    /// The inline log in the control word when the free was begun; 0 if no free was begun.
    pub inline_log: u32,
}

impl Ledger for SlabSet {
    /// All recorded extents, also those that are being filled or freed.
    fn extents(&self, each: &mut dyn FnMut(Extent)) {
        for slab in self.numbers() {
            // A record may move from a spare place to a usual one meanwhile.
            self.places().rev().filter_map(|place| self.extent_at_place(slab, place)).for_each(&mut *each);
        }
    }
}

impl SlabSet {
    /// The memory of the records, from which [`Self::recover`] recovers them.
    #[must_use]
    pub fn memory(&self) -> &Memory {
        &self.memory
    }

    /// Recovers the slabs that an earlier agent left in `memory`. No location is referenced yet.
    ///
    /// All volumes must be recovered before [`Self::finish_recovery`].
    ///
    /// # Panics
    /// If there are 0 or more than [`REPLICAS_MAX`] replicas.
    #[must_use]
    pub fn recover(memory: Memory, policy: CopyPolicy) -> Self {
        assert!((1..=REPLICAS_MAX).contains(&policy.replicas), "{policy:?}");
        // The records of a version without backups have no room for any.
        let policy =
            if memory.len() < MEMORY_BYTES { CopyPolicy::in_memory(policy.replicas) } else { policy };
        let slabs = Self {
            memory,
            policy,
            has_backups: AtomicBool::new(policy.backup != Backup::Never),
            emptied: Mutex::default(),
            needs_notification: AtomicBool::new(false),
            damaged: Mutex::default(),
            slow: AtomicU64::new(0),
            marks: super::vacating::Marks::default(),
            activity: super::activity::Activity::default(),
            cache: std::sync::OnceLock::new(),
            pages: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
            bytes_peak: AtomicU64::new(0),
            backup_bytes: AtomicU64::new(0),
        };
        slabs.numbers().for_each(|slab| slabs.leave_spare_place(slab));
        for (slab, class) in slabs.in_use() {
            slabs.replicas(slab).placed().for_each(|(place, replica)| slabs.count_replica(place, replica));
            slabs.live(slab).store(0, Relaxed);
            slabs.activity.prepare(slab);
            for index in 0..class.chunks() {
                slabs.references(Location::new(slab, index)).store(0, Relaxed);
            }
        }
        slabs
    }

    /// Counts the reference of a page word to a location.
    ///
    /// # Panics
    /// If there is no such slab: the page table does not belong to these slabs.
    pub(crate) fn recover_reference(&self, location: Location) {
        assert!(!self.replicas(location.slab()).is_empty(), "{location:?} is in no slab");
        if self.references(location).fetch_add(1, AcqRel) == 0 {
            self.live(location.slab()).fetch_add(1, Release);
            self.pages.fetch_add(1, Relaxed);
        }
    }

    /// Ends the recovery. The sender will free the slabs to which no page word refers.
    pub fn finish_recovery(&self) {
        let empty = self.in_use().map(|(slab, _)| slab).filter(|slab| self.live_pages(*slab) == 0);
        self.emptied.lock().extend(empty);
    }

    /// All recorded extents that are not complete replicas.
    pub(crate) fn unfinished_replicas(&self) -> impl Iterator<Item = UnfinishedReplica> + '_ {
        let at = |slab, place| {
            let inline_log = self.inline_log(slab, place).load(Relaxed);
            Some(UnfinishedReplica { slab, place, extent: self.unfinished(slab, place)?, inline_log })
        };
        self.numbers().flat_map(move |slab| self.places().filter_map(move |place| at(slab, place)))
    }

    /// All slabs in use, with their size classes.
    pub(crate) fn in_use(&self) -> impl Iterator<Item = (SlabId, SizeClass)> + '_ {
        let replica = |slab| self.places().find_map(|place| self.replica(slab, place));
        self.numbers().filter_map(move |slab| Some((slab, replica(slab)?.class)))
    }
}
