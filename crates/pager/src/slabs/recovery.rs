//! The slabs of a run after a restart of the agent.
//!
//! What must be right lies in the page tables: a page on a memory node is one that a page table refers to. So references are counted
//! anew, and what an agent that was killed had begun, to write or to give back, is forgotten by that.

use std::sync::atomic::Ordering::{AcqRel, Relaxed, Release};
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Mutex, PoisonError};

use aquifer_fabric::Memory;
use aquifer_pool::{Extent, Ledger, SizeClass};

use super::{REPLICAS_MAX, SlabId, SlabSet};
use crate::page::Location;

/// An extent that an agent before this one took for a slab, and that is not part of it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct UnfinishedReplica {
    pub slab: SlabId,
    pub place: usize,
    pub extent: Extent,
    /// What its control word said when its return was begun; 0: that was not begun.
    pub record: u32,
}

impl Ledger for SlabSet {
    /// SlabReplicas that are not whole yet, and those that go back just now, included.
    fn extents(&self, each: &mut dyn FnMut(Extent)) {
        for slab in self.numbers() {
            (0..self.replicas_wanted).filter_map(|place| self.noted(slab, place)).for_each(&mut *each);
        }
    }
}

impl SlabSet {
    /// The memory that the records lie in: whoever has it can recover them.
    #[must_use]
    pub fn memory(&self) -> &Memory {
        &self.memory
    }

    /// The slabs that an agent before this one left in `memory`, each of which was to have so many copies; none of their pages is referred
    /// to yet. All volumes must be recovered before [`Self::finish_recovery`].
    ///
    /// # Panics
    /// If there can be no such number of copies.
    #[must_use]
    pub fn recover(memory: Memory, replicas: usize) -> Self {
        assert!((1..=REPLICAS_MAX).contains(&replicas), "{replicas} replicas");
        let slabs = Self {
            memory,
            replicas_wanted: replicas,
            emptied: Mutex::default(),
            is_untold: AtomicBool::new(false),
            damaged: Mutex::default(),
            slow: AtomicU64::new(0),
            marks: super::vacating::Marks::default(),
            pages: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
            bytes_peak: AtomicU64::new(0),
        };
        let mut bytes = 0;
        for (slab, class) in slabs.in_use() {
            bytes += class.bytes() * slabs.replicas(slab).len() as u64;
            slabs.live(slab).store(0, Relaxed);
            for index in 0..class.chunks() {
                slabs.references(Location::new(slab, index)).store(0, Relaxed);
            }
        }
        slabs.bytes.store(bytes, Relaxed);
        slabs.bytes_peak.store(bytes, Relaxed);
        slabs
    }

    /// A page table refers to the page.
    ///
    /// # Panics
    /// If there is no such slab: page table and slabs are not of one run, and nothing can be trusted.
    pub(crate) fn recover_reference(&self, location: Location) {
        assert!(!self.replicas(location.slab()).is_empty(), "{location:?} is in no slab");
        if self.references(location).fetch_add(1, AcqRel) == 0 {
            self.live(location.slab()).fetch_add(1, Release);
            self.pages.fetch_add(1, Relaxed);
        }
    }

    /// All volumes are recovered: slabs to which nothing refers go back to the pool when the sender next looks.
    pub fn finish_recovery(&self) {
        let empty = self.in_use().map(|(slab, _)| slab).filter(|slab| self.live_pages(*slab) == 0);
        self.emptied.lock().unwrap_or_else(PoisonError::into_inner).extend(empty);
    }

    /// What is noted and is no copy: it was begun, or begun to be given back.
    pub(crate) fn unfinished_replicas(&self) -> impl Iterator<Item = UnfinishedReplica> + '_ {
        let at = |slab, place| {
            let record = self.record(slab, place).load(Relaxed);
            Some(UnfinishedReplica { slab, place, extent: self.unfinished(slab, place)?, record })
        };
        self.numbers()
            .flat_map(move |slab| (0..self.replicas_wanted).filter_map(move |place| at(slab, place)))
    }

    /// All slabs there are.
    pub(crate) fn in_use(&self) -> impl Iterator<Item = (SlabId, SizeClass)> + '_ {
        let copy = |slab| (0..self.replicas_wanted).find_map(|place| self.replica(slab, place));
        self.numbers().filter_map(move |slab| Some((slab, copy(slab)?.class)))
    }
}
