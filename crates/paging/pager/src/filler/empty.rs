//! Empty slabs: some are kept, because they are soon needed again; the others are freed.

use aquifer_pool::PoolClient;

use super::{CopyGoal, Filler, OpenSlab, RecordedReplica, free_recorded};
use crate::slabs::SlabId;

/// Empty slabs are kept up to 1/`KEPT_DIVISOR` of the run's pages on memory nodes. None is kept
/// while the pool is short of memory or the run does not write.
const KEPT_DIVISOR: u64 = 8;
/// Maximum number of slabs that one call frees.
const TRIM_MAX: usize = 64;
/// Maximum number of slabs that one request frees when the run has ended.
const CLOSE_MAX: usize = 1024;
impl Filler {
    /// Records the slabs that have become empty, which are kept until [`Self::trim_empty`] frees
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

    /// Frees some of the surplus empty slabs, or of all empty slabs if `all`. Returns whether there
    /// are more.
    pub fn trim_empty(&mut self, pool: &mut PoolClient, all: bool) -> bool {
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

    /// Removes an empty slab that meets the goal from those that are kept.
    pub(super) fn empty_slab(&mut self, goal: CopyGoal) -> Option<OpenSlab> {
        let is_usable = |slab: &SlabId| {
            goal.is_met_by(self.slabs.replicas(*slab))
                && !self.slabs.is_vacating(*slab)
                && !self.has_suspended_replica(*slab)
                && !self.is_recalled(*slab)
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
                // A replica on a lost node is not freed by its address, because the node's number
                // may be that of other memory now.
                self.slabs.remove_slab(slab);
                replicas.iter().for_each(|replica| pool.suspect_leak(replica.node));
            }
            self.in_use.remove(slab);
            self.degraded.remove(slab);
            self.displaced.remove(slab);
            self.free_numbers.push(slab);
        }
        free_recorded(&self.slabs, pool, &mut recorded);
    }
}
