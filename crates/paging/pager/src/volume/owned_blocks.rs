//! The blocks of the mempool that a volume owns.

use super::{Batch, BlockPhase};
use crate::mempool::BlockId;
use crate::page::Location;

/// A block of the mempool that a volume owns.
#[derive(Debug)]
pub(super) struct VolumeBlock {
    pub id: BlockId,
    pub pages: Batch,
    pub locations: Vec<Option<Location>>,
    pub phase: BlockPhase,
}

/// The blocks of one volume, sorted by number: at most those of its run's share, however many the
/// mempool has.
#[derive(Debug, Default)]
pub(super) struct OwnedBlocks {
    list: Vec<VolumeBlock>,
}

impl OwnedBlocks {
    fn find(&self, id: BlockId) -> Result<usize, usize> {
        self.list.binary_search_by_key(&id.0, |block| block.id.0)
    }

    pub fn get(&self, id: BlockId) -> Option<&VolumeBlock> {
        self.find(id).ok().map(|at| &self.list[at])
    }

    /// The block with this number.
    ///
    /// # Panics
    /// If the volume does not own it.
    pub fn owned(&self, id: BlockId) -> &VolumeBlock {
        self.get(id).expect("the volume owns the block")
    }

    /// As [`Self::owned`].
    pub fn owned_mut(&mut self, id: BlockId) -> &mut VolumeBlock {
        let at = self.find(id).expect("the volume owns the block");
        &mut self.list[at]
    }

    /// Adds a block.
    ///
    /// # Panics
    /// If the volume owns it already.
    pub fn insert(&mut self, block: VolumeBlock) {
        let Err(at) = self.find(block.id) else { panic!("{:?} is in use", block.id) };
        self.list.insert(at, block);
    }

    /// Removes the block with this number.
    ///
    /// # Panics
    /// If the volume does not own it.
    pub fn remove(&mut self, id: BlockId) -> VolumeBlock {
        let at = self.find(id).expect("the volume owns the block");
        self.list.remove(at)
    }

    pub fn iter(&self) -> impl Iterator<Item = &VolumeBlock> {
        self.list.iter()
    }

    /// Removes all blocks.
    pub fn drain(&mut self) -> impl Iterator<Item = VolumeBlock> {
        self.list.drain(..)
    }
}
