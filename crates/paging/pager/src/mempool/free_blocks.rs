//! The blocks of the mempool that are neither owned nor cached.

use super::BlockId;

/// The free blocks.
#[derive(Debug, Default)]
pub(super) struct FreeBlocks {
    /// Blocks that may have memory of the system.
    pub backed: Vec<BlockId>,
    /// Blocks without memory, which get some when they are written.
    pub unbacked: Vec<BlockId>,
}

impl FreeBlocks {
    pub fn len(&self) -> usize {
        self.backed.len() + self.unbacked.len()
    }

    /// Removes a block, preferably one with memory, which is faster to write.
    pub fn pop(&mut self) -> Option<BlockId> {
        self.backed.pop().or_else(|| self.unbacked.pop())
    }

    pub fn push(&mut self, block: BlockId) {
        self.backed.push(block);
    }
}
