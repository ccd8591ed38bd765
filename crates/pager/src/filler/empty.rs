//! Slabs that hold nothing: some are kept, for they are soon wanted again; the others go back to the pool.

use aquifer_pool::{Extent, PoolClient, SizeClass};

use super::{Filler, NoRoom, Noted, Open, Order, give_back, give_back_noted};
use crate::slabs::{SLABS_MAX, SlabId};

/// Empty slabs are kept up to this part of the pages that the run has on memory nodes; none while the pool is short of memory, or the run writes nothing.
const RESERVE_DIVISOR: u64 = 8;
/// Slabs that are given back at a time.
const TRIM_MAX: usize = 64;
/// The same when the run has ended.
const CLOSE_MAX: usize = 1024;
/// Slabs of a fixed size are taken several at a time, up to so many pages.
const TAKE_PAGES: u32 = 64;

/// How large slabs are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Grain {
    /// As the run needs, from 4 KiB to 2 MiB, and sparse ones are emptied into others.
    AsNeeded,
    /// All alike, and given back only when `together` of them, which were taken together, are all empty: as systems with blocks of a fixed size do, for measurements.
    /// There are no copies.
    Blocks {
        /// The size of a slab.
        class: SizeClass,
        /// Slabs of a block.
        together: u32,
    },
}

impl Filler {
    /// How large slabs are from now on. To be said before there are any.
    ///
    /// # Panics
    /// If slabs of a fixed size are to have copies.
    pub fn set_grain(&mut self, grain: Grain) {
        assert!(
            grain == Grain::AsNeeded || self.slabs.replicas() == 1,
            "slabs of a fixed size have no copies"
        );
        self.grain = grain;
    }

    /// Whether sparse slabs are to be emptied into others.
    #[must_use]
    pub fn repacks(&self) -> bool {
        self.grain == Grain::AsNeeded
    }

    /// Take note of slabs that have become empty: they are kept until [`Self::trim_reserve`] finds that they are too many.
    pub fn keep_empty(&mut self, pool: &mut PoolClient) {
        let mut lost = Vec::new();
        for slab in self.slabs.take_emptied() {
            let is_open = self.open.as_ref().is_some_and(|open| open.slab == slab);
            if self.slabs.live_pages(slab) > 0 || is_open || self.set_aside == Some(slab) {
                continue;
            }
            if self.in_use.contains(slab) {
                self.reserve.insert(slab);
            } else {
                lost.push(slab);
            }
        }
        self.return_slabs(pool, &lost);
    }

    /// Give back some of what of the reserve is too much, which may be all; whether there is more.
    pub fn trim_reserve(&mut self, pool: &mut PoolClient, all: bool) -> bool {
        if let Grain::Blocks { together: 2.., .. } = self.grain {
            self.return_blocks(pool);
            return false;
        }
        let max = if all { 0 } else { self.slabs.pages() / RESERVE_DIVISOR };
        let mut pages: u64 = self.reserve.iter().map(|slab| self.pages_of(slab)).sum();
        let mut slabs = Vec::new();
        while pages > max && slabs.len() < TRIM_MAX {
            let Some(slab) = self.reserve.pop() else { break };
            pages -= self.pages_of(slab);
            slabs.push(slab);
        }
        self.return_slabs(pool, &slabs);
        pages > max && slabs.len() == TRIM_MAX
    }

    fn pages_of(&self, slab: SlabId) -> u64 {
        self.slabs.copies(slab).class().map_or(0, |class| u64::from(class.chunks()))
    }

    /// An empty slab with so many copies.
    pub(super) fn kept_slab(&mut self, copies_min: usize) -> Option<Open> {
        let has_copies = |slab: &SlabId| self.slabs.copies(*slab).len() >= copies_min;
        let slab = self.reserve.iter().find(|slab| has_copies(slab) && !self.slabs.is_vacating(*slab))?;
        self.reserve.remove(slab);
        Some(Open { slab, cursor: 0, pages: self.slabs.copies(slab).class()?.chunks() })
    }

    /// The run has ended: give everything back that no volume refers to.
    pub fn close(&mut self, pool: &mut PoolClient) {
        self.open = None;
        self.keep_empty(pool);
        while self.reserve.pop().is_some() {}
        let is_empty = |slab: &SlabId| self.slabs.live_pages(*slab) == 0;
        let empty: Vec<SlabId> = self.in_use.iter().filter(is_empty).collect();
        empty.chunks(CLOSE_MAX).for_each(|slabs| self.return_slabs(pool, slabs));
    }

    pub(super) fn return_slabs(&mut self, pool: &mut PoolClient, slabs: &[SlabId]) {
        let mut noted = Vec::with_capacity(slabs.len());
        for &slab in slabs {
            let copies = self.slabs.copies(slab);
            if copies.is_empty() {
                continue;
            }
            if self.in_use.contains(slab) {
                assert_eq!(self.slabs.live_pages(slab), 0, "{slab:?} still holds pages");
                noted.extend(copies.placed().map(|(place, extent)| Noted { slab, place, extent }));
            } else {
                // What was left on a lost node is not given back by its address: another memory may answer to its number now.
                self.slabs.withdraw(slab);
                copies.iter().for_each(|copy| pool.doubt(copy.node));
            }
            self.in_use.remove(slab);
            self.degraded.remove(slab);
            self.free_numbers.push(slab);
        }
        give_back_noted(&self.slabs, pool, &mut noted);
    }

    /// Slabs of that size. One is to be filled, the others are in reserve.
    pub(super) fn fresh_pieces(&mut self, pool: &mut PoolClient, class: SizeClass) -> Result<Open, NoRoom> {
        let wanted = (TAKE_PAGES / class.chunks()).max(1);
        let mut numbers: Vec<SlabId> = (0..wanted).map_while(|_| self.free_number().ok()).collect();
        let each = u32::try_from(numbers.len()).expect("no more than were wanted");
        let first = *numbers.last().ok_or(NoRoom::TooManySlabs)?;
        let _under_way = pool.under_way();
        let mut refused = NoRoom::NoNodes;
        for extent in self.take(pool, Order { class, nodes: 1, each }, |_| true, &mut refused) {
            let slab = numbers.pop().expect("one for each that was wanted");
            self.take_into_use(slab, &[extent]);
            self.reserve.insert(slab);
        }
        self.free_numbers.append(&mut numbers);
        if !self.in_use.contains(first) {
            return Err(refused);
        }
        self.reserve.remove(first);
        Ok(Open { slab: first, cursor: 0, pages: class.chunks() })
    }

    /// A block of slabs with consecutive numbers; the first is to be filled, the others are in reserve.
    pub(super) fn fresh_block(
        &mut self,
        pool: &mut PoolClient,
        class: SizeClass,
        together: u32,
    ) -> Result<Open, NoRoom> {
        let _under_way = pool.under_way();
        let mut refused = NoRoom::NoNodes;
        let mut extents = Vec::new();
        while extents.len() < together as usize {
            let each = together - u32::try_from(extents.len()).expect("fewer");
            let more = self.take(pool, Order { class, nodes: 1, each }, |_| true, &mut refused);
            if more.is_empty() {
                extents.iter().for_each(|extent: &Extent| give_back(pool, extent.node, &[*extent]));
                return Err(refused);
            }
            extents.extend(more);
        }
        let first = match self.free_numbers.pop() {
            Some(first) => first.0,
            None if self.used_numbers + together <= SLABS_MAX => {
                self.used_numbers += together;
                self.used_numbers - together
            }
            None => {
                extents.into_iter().for_each(|extent| give_back(pool, extent.node, &[extent]));
                return Err(NoRoom::TooManySlabs);
            }
        };
        for (slab, extent) in (first..).map(SlabId).zip(extents) {
            self.take_into_use(slab, &[extent]);
            self.reserve.insert(slab);
        }
        self.reserve.remove(SlabId(first));
        Ok(Open { slab: SlabId(first), cursor: 0, pages: class.chunks() })
    }

    /// Blocks of which all slabs are empty go back.
    fn return_blocks(&mut self, pool: &mut PoolClient) {
        let Grain::Blocks { together, .. } = self.grain else { return };
        let mut empty: Vec<u32> = self.reserve.iter().map(|slab| slab.0 / together).collect();
        empty.sort_unstable();
        for block in
            empty.chunk_by(|one, other| one == other).filter(|block| block.len() == together as usize)
        {
            let slabs = block[0] * together..(block[0] + 1) * together;
            for slab in slabs.clone().map(SlabId) {
                self.reserve.remove(slab);
                self.return_slabs(pool, &[slab]);
                self.free_numbers.pop();
            }
            self.free_numbers.push(SlabId(slabs.start));
        }
    }
}
