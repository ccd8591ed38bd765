//! Sparse slabs: which are filled again, and which are worth emptying.

use std::cmp::Reverse;

use aquifer_pool::SizeClass;

use super::{Filler, OpenSlab, SlabSizing};
use crate::page::PAGE_BYTES;
use crate::slabs::SlabId;

/// Fewer bytes are not worth the trouble.
const GAIN_BYTES_MIN: u64 = 64 << 10;
/// What is won must be this part of all that the run has; less, while the pool is short of memory.
const GAIN_DIVISOR: u64 = 4;
const GAIN_DIVISOR_SHORT: u64 = 16;
/// A slab that is emptier than this part is worth emptying even into a fresh one, which is smaller.
const FRESH_DIVISOR: u32 = 4;
/// A run that uses less than this part of what it has fills holes, up to slabs that have few left; else only slabs that are at most half full, for large writes.
const USED_MIN_PERMILLE: u64 = 750;
const SPARSE_PERMILLE: u32 = 500;
const HOLED_PERMILLE: u32 = 875;
/// Slabs that are fuller are not worth emptying.
const MOVABLE_PERMILLE: u32 = 750;
/// Sparse slabs are looked for each time that such a part of all has been filled.
const SEARCH_DIVISOR: usize = 64;
/// Pages to be moved in one round, about.
const MOVES_MAX: u32 = 16384;

/// What is won must be so much.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum GainThreshold {
    /// A good part of what the run has.
    Normal,
    /// The pool is short of memory: less.
    PoolShort,
}

/// A slab with holes.
#[derive(Clone, Copy, Debug)]
struct Sparse {
    slab: SlabId,
    copies: usize,
    live: u32,
    pages: u32,
}

impl Sparse {
    /// How full it is, of a thousand.
    fn fill_permille(&self) -> u32 {
        self.live * 1000 / self.pages
    }
}

impl Filler {
    /// Those that hold something, are at most so full, and nothing is the matter with.
    fn sparse(&self, fill_permille_max: u32) -> impl Iterator<Item = Sparse> {
        self.in_use.iter().filter_map(move |slab| self.sparse_if(slab, fill_permille_max))
    }

    /// A slab, if it is sparse.
    fn sparse_if(&self, slab: SlabId, fill_permille_max: u32) -> Option<Sparse> {
        let is_open = self.open.as_ref().is_some_and(|open| open.slab == slab);
        if is_open || Some(slab) == self.copying || self.slabs.is_vacating(slab) {
            return None;
        }
        let copies = self.slabs.replicas(slab);
        let (live, pages) = (self.slabs.live_pages(slab), copies.class()?.chunks());
        let sparse = Sparse { slab, copies: copies.len(), live, pages };
        (live > 0 && sparse.fill_permille() <= fill_permille_max).then_some(sparse)
    }

    /// The emptiest slab that can be filled again, but for the one that was filled last. They are looked for now and then only: a run may have tens of thousands.
    pub(super) fn sparse_slab(&mut self, previous: Option<SlabId>, copies_min: usize) -> Option<OpenSlab> {
        if matches!(self.sizing, SlabSizing::Fixed { class: SizeClass::CHUNK, .. }) {
            return None;
        }
        let held_pages = self.slabs.bytes().0 / (self.slabs.replicas_wanted() * PAGE_BYTES) as u64;
        let is_well_used = self.slabs.pages() * 1000 >= held_pages * USED_MIN_PERMILLE;
        let max = if is_well_used || self.sizing != SlabSizing::AsNeeded {
            SPARSE_PERMILLE
        } else {
            HOLED_PERMILLE
        };
        loop {
            while let Some(slab) = self.candidates.pop() {
                if let Some(found) = self.sparse_if(slab, max).filter(|_| self.in_use.contains(slab))
                    && Some(slab) != previous
                    && found.copies >= copies_min
                {
                    return Some(OpenSlab { slab, cursor: 0, pages: found.pages });
                }
            }
            if self.fills_until_search > 0 {
                self.fills_until_search -= 1;
                return None;
            }
            self.fills_until_search = self.in_use.len() / SEARCH_DIVISOR;
            let mut found: Vec<Sparse> = self.sparse(max).filter(|one| Some(one.slab) != previous).collect();
            found.retain(|one| one.copies >= copies_min);
            if found.is_empty() {
                return None;
            }
            found.sort_unstable_by_key(|one| Reverse(one.fill_permille()));
            self.candidates.extend(found.into_iter().map(|one| one.slab));
        }
    }

    /// All slabs that hold something and are not just being filled or copied.
    pub fn movable_slabs(&self) -> Vec<SlabId> {
        let is_open = |slab: SlabId| self.open.as_ref().is_some_and(|open| open.slab == slab);
        let is_movable = |slab: &SlabId| {
            !is_open(*slab) && Some(*slab) != self.copying && self.slabs.live_pages(*slab) > 0
        };
        self.in_use.iter().filter(is_movable).collect()
    }

    /// The slab with the most holes: for when the pool has no room.
    pub(super) fn slab_with_holes(&self) -> Option<OpenSlab> {
        let is_usable = |slab: &SlabId| Some(*slab) != self.copying && !self.slabs.is_vacating(*slab);
        let holes = self.in_use.iter().filter(is_usable).filter_map(|slab| {
            let pages = self.slabs.replicas(slab).class()?.chunks();
            Some((pages.saturating_sub(self.slabs.live_pages(slab)), slab, pages))
        });
        let (free, slab, pages) = holes.max_by_key(|(free, _, _)| *free)?;
        (free > 0).then_some(OpenSlab { slab, cursor: 0, pages })
    }

    /// The emptiest slabs, as many of them as find room in the holes of the other sparse ones, or are almost empty; none if that is not `worth` it.
    pub fn slabs_to_vacate(&self, worth: GainThreshold) -> Vec<SlabId> {
        let held_bytes = self.slabs.bytes().0;
        let divisor = if worth == GainThreshold::PoolShort { GAIN_DIVISOR_SHORT } else { GAIN_DIVISOR };
        let wanted_bytes = (held_bytes / divisor).max(GAIN_BYTES_MIN);
        let live_bytes = self.slabs.pages() * (self.slabs.replicas_wanted() * PAGE_BYTES) as u64;
        if held_bytes < live_bytes + wanted_bytes {
            // Not even all holes group_slabs are worth it.
            return Vec::new();
        }
        let mut sparse: Vec<Sparse> = self.sparse(MOVABLE_PERMILLE).collect();
        sparse.sort_unstable_by_key(|one| (one.fill_permille(), Reverse(one.pages)));
        let mut room: u32 = sparse.iter().map(|one| one.pages - one.live).sum();
        let (mut moved, mut room_taken) = (0, 0);
        let mut gain_bytes = 0;
        let mut chosen = Vec::new();
        for one in sparse {
            let room_without = room - (one.pages - one.live);
            let has_room = room_taken + one.live <= room_without;
            let is_almost_empty = one.live * FRESH_DIVISOR <= one.pages && worth != GainThreshold::PoolShort;
            if !has_room && !is_almost_empty || moved >= MOVES_MAX {
                continue;
            }
            let won = if has_room { one.pages } else { one.pages - one.live };
            gain_bytes += u64::from(won) * (one.copies * PAGE_BYTES) as u64;
            // What it has of room is nobody's any more.
            room = room_without;
            if has_room {
                room_taken += one.live;
            }
            moved += one.live;
            chosen.push(one.slab);
        }
        if gain_bytes < wanted_bytes {
            chosen.clear();
        }
        chosen
    }
}
