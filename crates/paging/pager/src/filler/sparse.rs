//! Sparse slabs: chooses which of them to fill again, and which to vacate.

use std::cmp::Reverse;

use super::{CopyGoal, Filler, OpenSlab};
use crate::page::PAGE_BYTES;
use crate::slabs::{SlabId, SlabReplicas};

/// Least number of bytes that a round of vacating must free.
const GAIN_BYTES_MIN: u64 = 64 << 10;
/// A round must free at least 1/`GAIN_DIVISOR` of the run's bytes on memory nodes.
const GAIN_DIVISOR: u64 = 4;
/// While the pool is short of memory, a round must free at least 1/`GAIN_DIVISOR_SHORT` of these.
const GAIN_DIVISOR_SHORT: u64 = 16;
/// A slab with at most 1/`FRESH_DIVISOR` of its pages in use is worth vacating even into a new
/// slab, which is smaller.
const FRESH_DIVISOR: u32 = 4;
/// A run that uses less than this part of its memory on nodes, in thousandths, fills the holes of
/// slabs that are at most `HOLED_PERMILLE` full. Otherwise it fills only slabs that are at most
/// `SPARSE_PERMILLE` full, because large holes make large WRITEs.
const USED_MIN_PERMILLE: u64 = 750;
const SPARSE_PERMILLE: u32 = 500;
const HOLED_PERMILLE: u32 = 875;
/// The fullest slab that is worth vacating, in thousandths of its pages.
const MOVABLE_PERMILLE: u32 = 750;
/// Sparse slabs are searched each time that 1/`SEARCH_DIVISOR` of all slabs has been filled.
const SEARCH_DIVISOR: usize = 64;
/// Approximate maximum number of pages that one round moves.
const MOVES_MAX: u32 = 16384;

/// The memory that a round of vacating must free.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum GainThreshold {
    /// The usual part of the run's bytes.
    Normal,
    /// A smaller part, because the pool is short of memory.
    PoolShort,
}

/// A sparse slab, with the numbers of its pages in use and of all its pages.
#[derive(Clone, Copy, Debug)]
struct SparseSlab {
    slab: SlabId,
    replicas: SlabReplicas,
    live: u32,
    pages: u32,
}

impl SparseSlab {
    /// The part of the slab that is in use, in thousandths.
    fn fill_permille(&self) -> u32 {
        self.live * 1000 / self.pages
    }
}

impl Filler {
    /// Bytes of all copies of all slabs.
    fn held_bytes(&self) -> u64 {
        self.slabs.bytes().0 + self.slabs.backup_bytes()
    }

    /// The sparse slabs in use that are at most this full.
    fn sparse_slabs(&self, fill_permille_max: u32) -> impl Iterator<Item = SparseSlab> {
        self.in_use.iter().filter_map(move |slab| self.as_sparse(slab, fill_permille_max))
    }

    /// The slab, if it holds pages, is at most this full, and is not open, being copied or marked.
    fn as_sparse(&self, slab: SlabId, fill_permille_max: u32) -> Option<SparseSlab> {
        let is_open = self.open.as_ref().is_some_and(|open| open.slab == slab);
        let is_excluded = Some(slab) == self.copying || self.slabs.is_vacating(slab);
        if is_open || is_excluded || self.has_suspended_replica(slab) || self.is_recalled(slab) {
            return None;
        }
        let replicas = self.slabs.replicas(slab);
        let (live, pages) = (self.slabs.live_pages(slab), replicas.class()?.chunks());
        let sparse = SparseSlab { slab, replicas, live, pages };
        (live > 0 && sparse.fill_permille() <= fill_permille_max).then_some(sparse)
    }

    /// Removes the emptiest of the sparse slabs that the last search found and that meet the goal,
    /// other than `previous`.
    /// Searches rarely, because a run may have tens of thousands of slabs.
    pub(super) fn sparse_slab(&mut self, previous: Option<SlabId>, goal: CopyGoal) -> Option<OpenSlab> {
        let held_pages = self.held_bytes() / (self.slabs.policy().copies() * PAGE_BYTES) as u64;
        let is_well_used = self.slabs.pages() * 1000 >= held_pages * USED_MIN_PERMILLE;
        let max = if is_well_used { SPARSE_PERMILLE } else { HOLED_PERMILLE };
        loop {
            while let Some(slab) = self.candidates.pop() {
                if let Some(found) = self.as_sparse(slab, max).filter(|_| self.in_use.contains(slab))
                    && Some(slab) != previous
                    && goal.is_met_by(found.replicas)
                {
                    return Some(OpenSlab { slab, cursor: 0, pages: found.pages });
                }
            }
            if self.fills_until_search > 0 {
                self.fills_until_search -= 1;
                return None;
            }
            self.fills_until_search = self.in_use.len() / SEARCH_DIVISOR;
            let mut found: Vec<SparseSlab> =
                self.sparse_slabs(max).filter(|one| Some(one.slab) != previous).collect();
            found.retain(|one| goal.is_met_by(one.replicas));
            if found.is_empty() {
                return None;
            }
            found.sort_unstable_by_key(|one| Reverse(one.fill_permille()));
            self.candidates.extend(found.into_iter().map(|one| one.slab));
        }
    }

    /// All slabs that hold pages and are neither open nor being copied.
    pub fn movable_slabs(&self) -> Vec<SlabId> {
        let is_open = |slab: SlabId| self.open.as_ref().is_some_and(|open| open.slab == slab);
        let is_movable = |slab: &SlabId| {
            !is_open(*slab) && Some(*slab) != self.copying && self.slabs.live_pages(*slab) > 0
        };
        self.in_use.iter().filter(is_movable).collect()
    }

    /// The slab with the most holes, for the case that the pool has no free memory.
    pub(super) fn slab_with_holes(&mut self) -> Option<OpenSlab> {
        let is_usable = |slab: &SlabId| {
            Some(*slab) != self.copying
                && !self.slabs.is_vacating(*slab)
                && !self.has_suspended_replica(*slab)
        };
        let holes = self.in_use.iter().filter(is_usable).filter_map(|slab| {
            let pages = self.slabs.replicas(slab).class()?.chunks();
            Some((pages.saturating_sub(self.slabs.live_pages(slab)), slab, pages))
        });
        let (free, slab, pages) = holes.max_by_key(|(free, _, _)| *free)?;
        if free == 0 {
            return None;
        }
        // An empty slab with a replica that its node recalls may be among them.
        self.empty.remove(slab);
        Some(OpenSlab { slab, cursor: 0, pages })
    }

    /// Chooses the slabs to vacate: the emptiest, as long as their pages fit into the holes of the
    /// other sparse slabs, or they are almost empty.
    ///
    /// Returns none if that would free less memory than `threshold` demands.
    pub fn slabs_to_vacate(&self, threshold: GainThreshold) -> Vec<SlabId> {
        let held_bytes = self.held_bytes();
        let divisor = if threshold == GainThreshold::PoolShort { GAIN_DIVISOR_SHORT } else { GAIN_DIVISOR };
        let wanted_bytes = (held_bytes / divisor).max(GAIN_BYTES_MIN);
        let live_bytes = self.slabs.pages() * (self.slabs.policy().copies() * PAGE_BYTES) as u64;
        if held_bytes < live_bytes + wanted_bytes {
            // All holes together are smaller than the memory that must be freed.
            return Vec::new();
        }
        let mut sparse: Vec<SparseSlab> = self.sparse_slabs(MOVABLE_PERMILLE).collect();
        sparse.sort_unstable_by_key(|one| (one.fill_permille(), Reverse(one.pages)));
        let mut holes: u32 = sparse.iter().map(|one| one.pages - one.live).sum();
        let (mut pages_to_move, mut holes_used) = (0, 0);
        let mut gain_bytes = 0;
        let mut chosen = Vec::new();
        for one in sparse {
            let other_holes = holes - (one.pages - one.live);
            let fits_into_holes = holes_used + one.live <= other_holes;
            let is_almost_empty =
                one.live * FRESH_DIVISOR <= one.pages && threshold != GainThreshold::PoolShort;
            if !fits_into_holes && !is_almost_empty || pages_to_move >= MOVES_MAX {
                continue;
            }
            let gained_pages = if fits_into_holes { one.pages } else { one.pages - one.live };
            gain_bytes += u64::from(gained_pages) * (one.replicas.len() * PAGE_BYTES) as u64;
            // The holes of a slab that is vacated cannot be filled.
            holes = other_holes;
            if fits_into_holes {
                holes_used += one.live;
            }
            pages_to_move += one.live;
            chosen.push(one.slab);
        }
        if gain_bytes < wanted_bytes {
            chosen.clear();
        }
        chosen
    }
}
