//! The replicas of one slab.

use aquifer_fabric::RemoteAddr;
use aquifer_pool::{Extent, NodeId, SizeClass};

use super::{BACKUP_PLACES, PLACES, is_backup_place};
use crate::page::PAGE_BYTES;

/// The complete replicas of a slab: each holds all pages of the slab.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct SlabReplicas {
    /// Indexed by the place in the slab's record. A replica keeps its place while it exists.
    pub(super) list: [Option<Extent>; PLACES],
}

impl SlabReplicas {
    /// The number of replicas in memory.
    #[must_use]
    pub fn in_memory(self) -> usize {
        self.placed().filter(|(place, _)| !is_backup_place(*place)).count()
    }

    /// The backup on a disk, if there is one.
    #[must_use]
    pub fn backup(self) -> Option<Extent> {
        self.list[BACKUP_PLACES].iter().flatten().copied().next()
    }

    /// The replicas with their places in the slab's record.
    pub fn placed(self) -> impl Iterator<Item = (usize, Extent)> {
        self.list
            .into_iter()
            .enumerate()
            .filter_map(|(place, replica)| replica.map(|replica| (place, replica)))
    }

    /// The replicas.
    pub fn iter(self) -> impl Iterator<Item = Extent> {
        self.list.into_iter().flatten()
    }

    /// The number of replicas.
    #[must_use]
    pub fn len(self) -> usize {
        self.iter().count()
    }

    /// Whether there is no replica: the slab is not in use.
    #[must_use]
    pub fn is_empty(self) -> bool {
        self.len() == 0
    }

    /// The replica on a node.
    #[must_use]
    pub fn on(self, node: NodeId) -> Option<Extent> {
        self.iter().find(|replica| replica.node == node)
    }

    /// The replica at a place of the slab's record.
    #[must_use]
    pub fn at(self, place: usize) -> Option<Extent> {
        self.list[place]
    }

    /// The size class of the replicas, which is the same for all.
    #[must_use]
    pub fn class(self) -> Option<SizeClass> {
        self.iter().next().map(|replica| replica.class)
    }
}

/// The remote address of page `index` of a replica.
#[must_use]
pub fn page_of(replica: &Extent, index: u32) -> RemoteAddr {
    RemoteAddr { addr: replica.addr + u64::from(index) * PAGE_BYTES as u64, key: replica.key }
}
