//! The cached blocks of one run, in the order in which they were cached.

use std::collections::VecDeque;
use std::sync::{Arc, Weak};

use super::BlockTable;
use super::duel::{End, Group, SAMPLE_DIVISOR};
use crate::mempool::BlockId;
use crate::page_cache::CacheIndex;

/// Maximum number of pinned blocks that are passed over at one end of a queue.
const PASSED_OVER_MAX: usize = 8;
/// Number of stale entries that a queue may have beside as many as there are others.
const STALE_MIN: usize = 64;

/// The blocks of one group, the oldest first.
#[derive(Debug, Default)]
struct GroupQueue {
    /// Blocks with their sequence numbers. An entry with another number than the block has is
    /// stale.
    entries: VecDeque<(BlockId, u64)>,
    /// Number of entries that are not stale.
    cached: usize,
}

impl GroupQueue {
    /// Removes the first block at an end that is not pinned.
    fn remove_first(&mut self, end: End, blocks: &BlockTable) -> Option<BlockId> {
        let mut pinned = 0;
        while pinned < PASSED_OVER_MAX {
            let at = match end {
                End::Oldest => pinned,
                End::Newest => self.entries.len().checked_sub(1 + pinned)?,
            };
            let (block, sequence) = *self.entries.get(at)?;
            if is_stale(blocks, block, sequence) {
                self.entries.remove(at);
            } else if blocks.states.try_remove(block) {
                self.entries.remove(at);
                return Some(block);
            } else {
                pinned += 1;
            }
        }
        None
    }
}

fn is_stale(blocks: &BlockTable, block: BlockId, sequence: u64) -> bool {
    blocks.of(block).is_none_or(|cached| cached.sequence != sequence)
}

/// The cached blocks of one run.
#[derive(Debug)]
pub(super) struct RunQueue {
    index: Weak<CacheIndex>,
    /// Indexed by group.
    groups: [GroupQueue; 3],
    /// Whether no block of the run could be removed in this search.
    pub is_passed_over: bool,
}

impl RunQueue {
    pub fn new(index: &Arc<CacheIndex>) -> Self {
        Self { index: Arc::downgrade(index), groups: Default::default(), is_passed_over: false }
    }

    /// Whether this is the queue of the run with this index.
    pub fn is_of(&self, index: &Arc<CacheIndex>) -> bool {
        std::ptr::eq(self.index.as_ptr(), Arc::as_ptr(index))
    }

    /// As [`Self::is_of`].
    pub fn is_of_weak(&self, index: &Weak<CacheIndex>) -> bool {
        self.index.ptr_eq(index)
    }

    /// The number of blocks.
    pub fn cached(&self) -> usize {
        self.groups.iter().map(|group| group.cached).sum()
    }

    /// Adds a block, which is the newest.
    pub fn push(&mut self, block: BlockId, sequence: u64, group: Group, blocks: &BlockTable) {
        let queue = &mut self.groups[group as usize];
        queue.entries.push_back((block, sequence));
        queue.cached += 1;
        if queue.entries.len() > 2 * queue.cached + STALE_MIN {
            queue.entries.retain(|(block, sequence)| !is_stale(blocks, *block, *sequence));
        }
    }

    /// Counts a block of a group less, which was removed.
    pub fn removed(&mut self, group: Group) {
        self.groups[group as usize].cached -= 1;
    }

    /// Removes a block that is not pinned: of a sample that is too large, or else of the rest, by
    /// the order of the better sample.
    pub fn remove(&mut self, blocks: &BlockTable) -> Option<BlockId> {
        let cached = self.cached();
        let end = self.index.upgrade().map_or(End::Oldest, |index| index.duel().end());
        let is_large = |group: Group| self.groups[group as usize].cached * SAMPLE_DIVISOR > cached;
        let first = [Group::Oldest, Group::Newest].into_iter().find(|group| is_large(*group));
        let others = [Group::Rest, Group::Oldest, Group::Newest];
        first.into_iter().chain(others).find_map(|group| {
            let end = match group {
                Group::Oldest => End::Oldest,
                Group::Newest => End::Newest,
                Group::Rest => end,
            };
            self.groups[group as usize].remove_first(end, blocks)
        })
    }
}
