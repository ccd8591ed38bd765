//! Moves replicas off memory that nodes recall (Valet, sections 3.5 and 4.3): to other nodes,
//! those of the slabs that were used least recently first.
//!
//! The healer copies a slab to another node, and frees the old replica when the new one is
//! complete. The data pass through this host, whose operations a node refuses once the host is
//! fenced. Locations do not change, and no write waits: a slab that is copied is not filled. A
//! reader that finds the old replica gone reads the new one.
//!
//! Records of an earlier version have no place for a fourth replica. Of a slab with three, the old
//! one is freed there when the extent of the new one is allocated.

use std::collections::BTreeMap;
use std::sync::Arc;

use aquifer_pool::NodeId;

use super::Sender;
use super::copy_task::{CopyKind, CopyStep, CopyTask};
use crate::filler::{RecordedReplica, free_recorded};
use crate::move_rate::MoveRate;
use crate::mutation::Mutation;
use crate::slabs::{REPLICAS_MAX, SlabId, is_backup_place};

/// Memory of a run that a node recalls.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RecalledBytes {
    /// The node.
    pub node: NodeId,
    /// Bytes of replicas that hold pages.
    pub bytes: u64,
    /// The part of them that is the only replica of its slab.
    pub only_copy_bytes: u64,
}

impl Sender {
    /// Sets the rate of moves, which all senders of a host share.
    pub fn set_move_rate(&mut self, rate: &Arc<MoveRate>) {
        self.move_rate = Arc::clone(rate);
    }

    /// Determines the memory that nodes recall now, and the slabs to move off it.
    pub(super) fn update_recalled_memory(&mut self) {
        let recalled = self.pool.recalled_memory();
        if recalled.is_empty() && !self.filler.has_recalled_memory() {
            return;
        }
        self.filler.set_recalled(&mut self.pool, recalled);
        let slabs = self.filler.recalled_slabs();
        let mut by_node: BTreeMap<NodeId, RecalledBytes> = BTreeMap::new();
        for (slab, old) in
            slabs.iter().filter_map(|slab| Some((*slab, self.filler.recalled_replica(*slab)?.1)))
        {
            let found = by_node.entry(old.node).or_insert(RecalledBytes {
                node: old.node,
                bytes: 0,
                only_copy_bytes: 0,
            });
            found.bytes += old.class.bytes();
            if self.slabs.replicas(slab).iter().all(|replica| replica == old) {
                found.only_copy_bytes += old.class.bytes();
            }
        }
        self.recalled = by_node.into_values().collect();
        self.stats.recalled_bytes = self.recalled.iter().map(|recalled| recalled.bytes).sum();
        self.healer.set_recalled(slabs);
    }

    /// The run's memory that nodes recall, by node.
    #[must_use]
    pub fn recalled(&self) -> &[RecalledBytes] {
        &self.recalled
    }

    /// The task to move the next slab off memory that its node recalls; `None` if there is none
    /// that can be moved now.
    pub(super) fn next_move(&mut self) -> Option<CopyTask> {
        while let Some(slab) = self.healer.pop_recalled() {
            let Some((old_place, old)) = self.filler.recalled_replica(slab) else { continue };
            let is_readable =
                self.slabs.replicas(slab).iter().any(|replica| !self.filler.is_suspended(replica.node));
            let is_free_first = self.slabs.spare_place().is_none()
                && !is_backup_place(old_place)
                && self.slabs.replicas(slab).in_memory() == REPLICAS_MAX;
            let must_wait = is_free_first && self.is_writing(slab);
            if !is_readable || must_wait || self.slabs.live_pages(slab) == 0 {
                continue;
            }
            if !self.filler.has_other_node(&self.pool, slab) {
                continue;
            }
            if !self.move_rate.spend(old.class.bytes(), self.ports.now()) {
                self.healer.push_recalled(slab);
                return None;
            }
            let copy = self.begin_copy(slab, |filler, pool| {
                let to = filler.allocate_elsewhere(pool, slab)?;
                if is_free_first {
                    filler.free_replica(pool, slab, old.node);
                }
                Some(to)
            });
            let Some(copy) = copy else {
                // The next attempts would fail as well, and each asks several nodes.
                self.healer.set_recalled(Vec::new());
                return None;
            };
            if Mutation::FreeBeforeSwitch.is_active() {
                let mut freed = [RecordedReplica { slab, place: old_place, extent: old }];
                free_recorded(&self.slabs, &mut self.pool, &mut freed);
            }
            return Some(CopyTask::new(slab, copy, CopyKind::Move((!is_free_first).then_some(old))));
        }
        None
    }

    /// The task to make a replica in memory of a slab that has a backup instead. `None` if there is
    /// none, if memory nodes have little room, or if enough is moved already.
    pub(super) fn next_return(&mut self) -> Option<CopyTask> {
        if self.filler.displaced_count() == 0 || !self.filler.has_room_to_return(&self.pool) {
            return None;
        }
        self.filler.free_empty_displaced(&mut self.pool);
        let Self { filler, slabs, healer, .. } = self;
        let is_readable = |slab: &SlabId| {
            slabs.live_pages(*slab) > 0
                && !healer.unreadable.contains(slab)
                && slabs.replicas(*slab).iter().any(|replica| !filler.is_suspended(replica.node))
        };
        // The slab that was used last is needed most.
        let slab = filler.displaced().filter(is_readable).max_by_key(|slab| slabs.touched_at(*slab))?;
        let bytes = slabs.replicas(slab).class()?.bytes();
        if !self.move_rate.spend(bytes, self.ports.now()) {
            return None;
        }
        let copy = self.begin_copy(slab, |filler, pool| filler.allocate_replica(pool, slab))?;
        let old = self.filler.replaceable_backup(slab);
        if let Some(old) = old.filter(|_| Mutation::ReturnEarly.is_active()) {
            self.filler.free_replica(&mut self.pool, slab, old.node);
        }
        let kind = old.map_or(CopyKind::Missing, |old| CopyKind::Move(Some(old)));
        Some(CopyTask::new(slab, copy, kind))
    }

    /// Makes the copy of a moved slab a complete replica. Returns false if the task does not move a
    /// slab, or has not copied all of it.
    pub(super) fn begin_switch(&mut self, task: &mut CopyTask) -> bool {
        let is_moving = matches!(task.kind, CopyKind::Move(Some(_))) && task.step != CopyStep::Switching;
        let Some(place) = task.place.filter(|_| is_moving && self.is_complete(task)) else { return false };
        self.slabs.finish_replica(task.slab, place);
        task.step = CopyStep::Switching;
        true
    }

    /// Frees the old replica of a slab, if the new one still exists. No operation of a batch on the
    /// old one may be in flight.
    pub(super) fn end_move(&mut self, task: &CopyTask) {
        let replicas = self.slabs.replicas(task.slab);
        let has_moved = replicas.on(task.to.node) == Some(task.to);
        if let CopyKind::Move(Some(old)) = task.kind
            && has_moved
            && replicas.on(old.node) == Some(old)
        {
            self.filler.free_replica(&mut self.pool, task.slab, old.node);
            if self.pool.is_disk(old.node) && !self.pool.is_disk(task.to.node) {
                self.stats.returned_slabs += 1;
            } else {
                self.stats.moved_slabs += 1;
            }
        }
        // The old one may have been lost meanwhile.
        self.slabs.leave_spare_place(task.slab);
        self.filler.end_copying(&mut self.pool, task.slab);
    }
}
