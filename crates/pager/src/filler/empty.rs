//! Slabs that hold nothing: some are kept, for they are soon wanted again; the others go back to the pool.

use aquifer_pool::{Extent, PoolClient, SizeClass};

use super::{ExtentRequest, Filler, NoRoom, OpenSlab, RecordedReplica, free_extents, free_recorded};
use crate::slabs::{SLABS_MAX, SlabId};

/// Empty slabs are kept up to this part of the pages that the run has on memory nodes; none while the pool is short of memory, or the run writes nothing.
const RESERVE_DIVISOR: u64 = 8;
/// Slabs that are given back at a time.
const TRIM_MAX: usize = 64;
/// The same when the run has ended.
const CLOSE_MAX: usize = 1024;
/// Slabs of a fixed size are taken several at a time, up to so many pages.
const FIXED_SLABS_PAGES: u32 = 64;

/// How large slabs are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SlabSizing {
    /// As the run needs, from 4 KiB to 2 MiB, and sparse ones are emptied into others.
    AsNeeded,
    /// All alike, and given back only when `group_slabs` of them, which were taken group_slabs, are all empty: as systems with blocks of a fixed size do, for measurements.
    /// There are no copies.
    Fixed {
        /// The size of a slab.
        class: SizeClass,
        /// Slabs of a block.
        group_slabs: u32,
    },
}

impl Filler {
    /// How large slabs are from now on. To be said before there are any.
    ///
    /// # Panics
    /// If slabs of a fixed size are to have copies.
    pub fn set_slab_sizing(&mut self, sizing: SlabSizing) {
        assert!(
            sizing == SlabSizing::AsNeeded || self.slabs.replicas_wanted() == 1,
            "slabs of a fixed size have no copies"
        );
        self.sizing = sizing;
    }

    /// Whether sparse slabs are to be emptied into others.
    #[must_use]
    pub fn is_repacking_enabled(&self) -> bool {
        self.sizing == SlabSizing::AsNeeded
    }

    /// Take note of slabs that have become empty: they are kept until [`Self::trim_empty`] finds that they are too many.
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

    /// Give back some of what of the reserve is too much, which may be all; whether there is more.
    pub fn trim_empty(&mut self, pool: &mut PoolClient, all: bool) -> bool {
        if let SlabSizing::Fixed { group_slabs: 2.., .. } = self.sizing {
            self.free_empty_groups(pool);
            return false;
        }
        let max = if all { 0 } else { self.slabs.pages() / RESERVE_DIVISOR };
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

    /// An empty slab with so many copies.
    pub(super) fn empty_slab(&mut self, copies_min: usize) -> Option<OpenSlab> {
        let has_copies = |slab: &SlabId| self.slabs.replicas(*slab).len() >= copies_min;
        let slab = self.empty.iter().find(|slab| has_copies(slab) && !self.slabs.is_vacating(*slab))?;
        self.empty.remove(slab);
        Some(OpenSlab { slab, cursor: 0, pages: self.slabs.replicas(slab).class()?.chunks() })
    }

    /// The run has ended: give everything back that no volume refers to.
    pub fn close(&mut self, pool: &mut PoolClient) {
        self.open = None;
        self.collect_emptied(pool);
        while self.empty.pop().is_some() {}
        let is_empty = |slab: &SlabId| self.slabs.live_pages(*slab) == 0;
        let empty: Vec<SlabId> = self.in_use.iter().filter(is_empty).collect();
        empty.chunks(CLOSE_MAX).for_each(|slabs| self.free_slabs(pool, slabs));
    }

    pub(super) fn free_slabs(&mut self, pool: &mut PoolClient, slabs: &[SlabId]) {
        let mut noted = Vec::with_capacity(slabs.len());
        for &slab in slabs {
            let copies = self.slabs.replicas(slab);
            if copies.is_empty() {
                continue;
            }
            if self.in_use.contains(slab) {
                assert_eq!(self.slabs.live_pages(slab), 0, "{slab:?} still holds pages");
                noted.extend(copies.placed().map(|(place, extent)| RecordedReplica { slab, place, extent }));
            } else {
                // What was left on a lost node is not given back by its address: another memory may answer to its number now.
                self.slabs.remove_slab(slab);
                copies.iter().for_each(|copy| pool.doubt(copy.node));
            }
            self.in_use.remove(slab);
            self.degraded.remove(slab);
            self.free_numbers.push(slab);
        }
        free_recorded(&self.slabs, pool, &mut noted);
    }

    /// Slabs of that size. One is to be filled, the others are in reserve.
    pub(super) fn allocate_fixed_slabs(
        &mut self,
        pool: &mut PoolClient,
        class: SizeClass,
    ) -> Result<OpenSlab, NoRoom> {
        let wanted = (FIXED_SLABS_PAGES / class.chunks()).max(1);
        let mut numbers: Vec<SlabId> = (0..wanted).map_while(|_| self.free_number().ok()).collect();
        let each = u32::try_from(numbers.len()).expect("no more than were wanted");
        let first = *numbers.last().ok_or(NoRoom::TooManySlabs)?;
        let _under_way = pool.under_way();
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

    /// A block of slabs with consecutive numbers; the first is to be filled, the others are in reserve.
    pub(super) fn allocate_slab_group(
        &mut self,
        pool: &mut PoolClient,
        class: SizeClass,
        group_slabs: u32,
    ) -> Result<OpenSlab, NoRoom> {
        let _under_way = pool.under_way();
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

    /// Blocks of which all slabs are empty go back.
    fn free_empty_groups(&mut self, pool: &mut PoolClient) {
        let SlabSizing::Fixed { group_slabs, .. } = self.sizing else { return };
        let mut empty: Vec<u32> = self.empty.iter().map(|slab| slab.0 / group_slabs).collect();
        empty.sort_unstable();
        for block in
            empty.chunk_by(|one, other| one == other).filter(|block| block.len() == group_slabs as usize)
        {
            let slabs = block[0] * group_slabs..(block[0] + 1) * group_slabs;
            for slab in slabs.clone().map(SlabId) {
                self.empty.remove(slab);
                self.free_slabs(pool, &[slab]);
                self.free_numbers.pop();
            }
            self.free_numbers.push(SlabId(slabs.start));
        }
    }
}
