//! Backups: copies of slabs on disk nodes (Valet, Table 3). A slab has one backup at most.
//!
//! A slab is *displaced* if it has a backup because it lacks replicas in memory. When memory nodes
//! have room again, the healer makes the replicas, and frees the backup if it is not needed.

use aquifer_pool::{Extent, NodeClass, NodeId, PoolClient};

use super::{ExtentRequest, Filler, NoRoom};
use crate::copy_policy::Backup;
use crate::slabs::{SlabId, SlabReplicas};

/// A displaced slab is returned to memory nodes if at least 1/`RETURN_FREE_DIVISOR` of their memory
/// is free. The rest is for new pages.
const RETURN_FREE_DIVISOR: u64 = 16;

/// The copies that a slab must have to be filled.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum CopyGoal {
    /// Replicas in memory, this many, and a backup if that is set.
    Complete { replicas: usize, with_backup: bool },
    /// A backup.
    Backup,
    /// Any.
    Any,
}

impl CopyGoal {
    /// Whether a slab with these replicas may be filled.
    pub(super) fn is_met_by(self, replicas: SlabReplicas) -> bool {
        let has_backup = replicas.backup().is_some();
        match self {
            Self::Complete { replicas: wanted, with_backup } => {
                replicas.in_memory() >= wanted && (has_backup || !with_backup)
            }
            Self::Backup => has_backup,
            Self::Any => !replicas.is_empty(),
        }
    }
}

impl Filler {
    /// Whether each slab is to have a backup.
    pub(super) fn must_have_backup(&self) -> bool {
        self.slabs.policy().backup == Backup::Always
    }

    /// Whether a slab with these replicas lacks one in memory.
    fn lacks_memory(&self, replicas: SlabReplicas) -> bool {
        replicas.in_memory() < self.slabs.replicas_wanted()
    }

    /// Whether a slab lacks a replica in memory.
    #[must_use]
    pub fn lacks_replica(&self, slab: SlabId) -> bool {
        self.lacks_memory(self.slabs.replicas(slab))
    }

    /// Whether a slab is to have a backup and has none.
    #[must_use]
    pub fn lacks_backup(&self, slab: SlabId) -> bool {
        let replicas = self.slabs.replicas(slab);
        let is_wanted = match self.slabs.policy().backup {
            Backup::Never => false,
            Backup::IfNeeded => self.lacks_memory(replicas),
            Backup::Always => true,
        };
        is_wanted && replicas.backup().is_none()
    }

    /// The backup of a slab that would not be needed if the slab had one more replica in memory.
    #[must_use]
    pub fn replaceable_backup(&self, slab: SlabId) -> Option<Extent> {
        let replicas = self.slabs.replicas(slab);
        let is_needed = self.must_have_backup() || replicas.in_memory() + 1 < self.slabs.replicas_wanted();
        replicas.backup().filter(|_| !is_needed)
    }

    /// Updates the lists of slabs that lack copies after a change of a slab in use.
    pub(super) fn classify(&mut self, slab: SlabId) {
        let replicas = self.slabs.replicas(slab);
        let is_in_use = self.in_use.contains(slab);
        if is_in_use && replicas.len() < self.slabs.policy().copies() {
            self.degraded.insert(slab);
        } else {
            self.degraded.remove(slab);
        }
        if is_in_use && replicas.backup().is_some() && self.lacks_memory(replicas) {
            self.displaced_total += u64::from(!self.displaced.contains(slab));
            self.displaced.insert(slab);
        } else {
            self.displaced.remove(slab);
        }
    }

    /// Slabs with a backup that lack replicas in memory.
    pub fn displaced(&self) -> impl Iterator<Item = SlabId> {
        self.displaced.iter()
    }

    /// The number of slabs that were displaced so far.
    #[must_use]
    pub fn displaced_total(&self) -> u64 {
        self.displaced_total
    }

    /// The number of displaced slabs.
    #[must_use]
    pub fn displaced_count(&self) -> usize {
        self.displaced.len()
    }

    /// Whether memory nodes have enough room for slabs to return to them.
    #[must_use]
    pub fn has_room_to_return(&self, pool: &PoolClient) -> bool {
        let memory = || pool.nodes().filter(|node| !pool.is_disk(*node));
        let free: u64 = memory().map(|node| pool.usable_bytes(node)).sum();
        let lent: u64 = memory().map(|node| pool.total_bytes(node)).sum();
        free > 0 && free >= lent / RETURN_FREE_DIVISOR
    }

    /// Frees the displaced slabs that hold no pages.
    pub fn free_empty_displaced(&mut self, pool: &mut PoolClient) {
        let is_unused = |slab: &SlabId| {
            let is_open = self.open.as_ref().is_some_and(|open| open.slab == *slab);
            self.slabs.live_pages(*slab) == 0 && !is_open && self.copying != Some(*slab)
        };
        let unused: Vec<SlabId> = self.displaced.iter().filter(is_unused).collect();
        for slab in &unused {
            self.empty.remove(*slab);
        }
        self.free_slabs(pool, &unused);
    }

    /// Allocates an extent for the backup of a slab.
    pub fn allocate_backup(&mut self, pool: &mut PoolClient, slab: SlabId) -> Option<Extent> {
        let replicas = self.slabs.replicas(slab);
        let request = ExtentRequest { class: replicas.class()?, nodes: 1, each: 1, on: NodeClass::Disk };
        let may_be_on = |node: NodeId| replicas.on(node).is_none();
        self.allocate_on_nodes(pool, request, may_be_on, &mut NoRoom::NoNodes).pop()
    }

    /// Whether a disk node can be used for new backups.
    pub(super) fn has_disk_node(&self, pool: &PoolClient) -> bool {
        self.slabs.policy().backup != Backup::Never
            && pool.nodes().any(|node| pool.is_disk(node) && !self.is_suspended(node))
    }
}
