//! Empty slabs: some are kept, because they are soon needed again; the others are freed.

use aquifer_pool::{Extent, PoolClient, SizeClass};

use super::{ExtentRequest, Filler, NoRoom, OpenSlab, RecordedReplica, free_extents, free_recorded};
use crate::slabs::{SLABS_MAX, SlabId};

/// Empty slabs are kept up to this part of the run's pages on memory nodes. None is kept while the
/// pool is short of memory or the run writes nothing.
const KEPT_DIVISOR: u64 = 8;
/// Slabs that one call frees at most.
const TRIM_MAX: usize = 64;
/// Slabs that one request frees at most when the run has ended.
const CLOSE_MAX: usize = 1024;
/// Slabs of a fixed size are allocated several at a time, up to this number of pages.
const FIXED_SLABS_PAGES: u32 = 64;

/// How large slabs are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SlabSizing {
    /// Sized by the run's memory on nodes, from 4 KiB to 2 MiB. Sparse slabs are vacated.
    AsNeeded,
    /// All of one size, and freed only when all slabs of a group are empty. The slabs of a group
    /// are allocated together.
    ///
    /// This models systems with blocks of a fixed size, for measurements. Slabs have one replica,
    /// and are not vacated.
    Fixed {
        /// The size class of a slab.
        class: SizeClass,
        /// The number of slabs in a group.
        group_slabs: u32,
    },
}

impl Filler {
    /// Sets how large slabs are. Must be called before there are any.
    ///
    /// # Panics
    /// If slabs of a fixed size are to have several replicas.
    pub fn set_slab_sizing(&mut self, sizing: SlabSizing) {
        assert!(
            sizing == SlabSizing::AsNeeded || self.slabs.replicas_wanted() == 1,
            "slabs of a fixed size have one replica"
        );
        self.sizing = sizing;
    }

    /// Whether sparse slabs are vacated.
    #[must_use]
    pub fn is_repacking_enabled(&self) -> bool {
        self.sizing == SlabSizing::AsNeeded
    }

    /// Records the slabs that have become empty. They are kept until [`Self::trim_empty`] frees
    /// them.
    pub fn collect_emptied(&mut self, pool: &mut PoolClient) {
        let mut lost = Vec::new();
        for slab in self.slabs.drain_emptied() {
            let is_open = self.open.as_ref().is_some_and(|open| open.slab == slab);
            if self.slabs.live_pages(slab) > 0 || is_open || self.copying == Some(slab) {
                continue;
            }
            if self.in_use.contains(slab) {
                self.empty.insert(slab);
            } else {
                lost.push(slab);
            }
        }
        self.free_slabs(pool, &lost);
    }

    /// Frees some empty slabs that exceed what is kept, or some of all if `all`. Returns whether
    /// there are more.
    pub fn trim_empty(&mut self, pool: &mut PoolClient, all: bool) -> bool {
        if let SlabSizing::Fixed { group_slabs: 2.., .. } = self.sizing {
            self.free_empty_groups(pool);
            return false;
        }
        let max = if all { 0 } else { self.slabs.pages() / KEPT_DIVISOR };
        let mut pages: u64 = self.empty.iter().map(|slab| self.pages_of(slab)).sum();
        let mut slabs = Vec::new();
        while pages > max && slabs.len() < TRIM_MAX {
            let Some(slab) = self.empty.pop() else { break };
            pages -= self.pages_of(slab);
            slabs.push(slab);
        }
        self.free_slabs(pool, &slabs);
        pages > max && slabs.len() == TRIM_MAX
    }

    fn pages_of(&self, slab: SlabId) -> u64 {
        self.slabs.replicas(slab).class().map_or(0, |class| u64::from(class.chunks()))
    }

    /// Removes an empty slab with at least this number of replicas from those that are kept.
    pub(super) fn empty_slab(&mut self, replicas_min: usize) -> Option<OpenSlab> {
        let is_usable = |slab: &SlabId| {
            self.slabs.replicas(*slab).len() >= replicas_min
                && !self.slabs.is_vacating(*slab)
                && !self.has_suspended_replica(*slab)
        };
        let slab = self.empty.iter().find(is_usable)?;
        self.empty.remove(slab);
        Some(OpenSlab { slab, cursor: 0, pages: self.slabs.replicas(slab).class()?.chunks() })
    }

    /// Frees all slabs without referenced pages, because the run has ended.
    pub fn close(&mut self, pool: &mut PoolClient) {
        self.open = None;
        self.collect_emptied(pool);
        while self.empty.pop().is_some() {}
        let is_empty = |slab: &SlabId| self.slabs.live_pages(*slab) == 0;
        let empty: Vec<SlabId> = self.in_use.iter().filter(is_empty).collect();
        empty.chunks(CLOSE_MAX).for_each(|slabs| self.free_slabs(pool, slabs));
    }

    pub(super) fn free_slabs(&mut self, pool: &mut PoolClient, slabs: &[SlabId]) {
        let mut recorded = Vec::with_capacity(slabs.len());
        for &slab in slabs {
            let replicas = self.slabs.replicas(slab);
            if replicas.is_empty() {
                continue;
            }
            if self.in_use.contains(slab) {
                assert_eq!(self.slabs.live_pages(slab), 0, "{slab:?} still holds pages");
                recorded.extend(replicas.placed().map(|(place, extent)| RecordedReplica {
                    slab,
                    place,
                    extent,
                }));
            } else {
                // A replica on a lost node is not freed by its address: the node's number may stand
                // for other memory by now.
                self.slabs.remove_slab(slab);
                replicas.iter().for_each(|replica| pool.suspect_leak(replica.node));
            }
            self.in_use.remove(slab);
            self.degraded.remove(slab);
            self.free_numbers.push(slab);
        }
        free_recorded(&self.slabs, pool, &mut recorded);
    }

    /// Allocates several slabs of a fixed size. The first is opened, the others are kept as empty.
    pub(super) fn allocate_fixed_slabs(
        &mut self,
        pool: &mut PoolClient,
        class: SizeClass,
    ) -> Result<OpenSlab, NoRoom> {
        let wanted = (FIXED_SLABS_PAGES / class.chunks()).max(1);
        let mut numbers: Vec<SlabId> = (0..wanted).map_while(|_| self.free_number().ok()).collect();
        let each = u32::try_from(numbers.len()).expect("no more than were wanted");
        let first = *numbers.last().ok_or(NoRoom::TooManySlabs)?;
        let _operation = pool.begin_operation();
        let mut refused = NoRoom::NoNodes;
        for extent in
            self.allocate_on_nodes(pool, ExtentRequest { class, nodes: 1, each }, |_| true, &mut refused)
        {
            let slab = numbers.pop().expect("one for each that was wanted");
            self.publish_slab(slab, &[extent]);
            self.empty.insert(slab);
        }
        self.free_numbers.append(&mut numbers);
        if !self.in_use.contains(first) {
            return Err(refused);
        }
        self.empty.remove(first);
        Ok(OpenSlab { slab: first, cursor: 0, pages: class.chunks() })
    }

    /// Allocates a group of slabs with consecutive numbers. The first is opened, the others are
    /// kept as empty.
    pub(super) fn allocate_slab_group(
        &mut self,
        pool: &mut PoolClient,
        class: SizeClass,
        group_slabs: u32,
    ) -> Result<OpenSlab, NoRoom> {
        let _operation = pool.begin_operation();
        let mut refused = NoRoom::NoNodes;
        let mut extents = Vec::new();
        while extents.len() < group_slabs as usize {
            let each = group_slabs - u32::try_from(extents.len()).expect("fewer");
            let more =
                self.allocate_on_nodes(pool, ExtentRequest { class, nodes: 1, each }, |_| true, &mut refused);
            if more.is_empty() {
                extents.iter().for_each(|extent: &Extent| free_extents(pool, extent.node, &[*extent]));
                return Err(refused);
            }
            extents.extend(more);
        }
        let first = match self.free_numbers.pop() {
            Some(first) => first.0,
            None if self.used_numbers + group_slabs <= SLABS_MAX => {
                self.used_numbers += group_slabs;
                self.used_numbers - group_slabs
            }
            None => {
                extents.into_iter().for_each(|extent| free_extents(pool, extent.node, &[extent]));
                return Err(NoRoom::TooManySlabs);
            }
        };
        for (slab, extent) in (first..).map(SlabId).zip(extents) {
            self.publish_slab(slab, &[extent]);
            self.empty.insert(slab);
        }
        self.empty.remove(SlabId(first));
        Ok(OpenSlab { slab: SlabId(first), cursor: 0, pages: class.chunks() })
    }

    /// Frees the groups whose slabs are all empty.
    fn free_empty_groups(&mut self, pool: &mut PoolClient) {
        let SlabSizing::Fixed { group_slabs, .. } = self.sizing else { return };
        let mut empty: Vec<u32> = self.empty.iter().map(|slab| slab.0 / group_slabs).collect();
        empty.sort_unstable();
        for group in
            empty.chunk_by(|one, other| one == other).filter(|group| group.len() == group_slabs as usize)
        {
            let slabs = group[0] * group_slabs..(group[0] + 1) * group_slabs;
            for slab in slabs.clone().map(SlabId) {
                self.empty.remove(slab);
                self.free_slabs(pool, &[slab]);
                self.free_numbers.pop();
            }
            self.free_numbers.push(SlabId(slabs.start));
        }
    }
}
