//! The cached blocks of one run, in the order in which they were cached.

use std::collections::VecDeque;
use std::sync::{Arc, Weak};

use super::BlockTable;
use super::duel::{End, Group, SAMPLE_DIVISOR};
use crate::mempool::{BLOCK_PAGES, BlockId};
use crate::page_cache::CacheIndex;

/// Maximum number of pinned blocks that are passed over at one end of a queue.
const PASSED_OVER_MAX: usize = 8;
/// Number of blocks among which the emptiest is searched: half of them at the end at which blocks
/// are dropped, and half anywhere. Its pages are moved to the others.
const MERGE_CANDIDATES: usize = 16;
/// Most pages that are moved so that a block can be given away. To move more costs more than it
/// saves.
const MOVED_PAGES_MAX: usize = BLOCK_PAGES * 3 / 4;
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
    /// Removes the stale entries at both ends.
    fn remove_stale_ends(&mut self, blocks: &BlockTable) {
        let is_stale = |entry: Option<&(BlockId, u64)>| {
            entry.is_some_and(|(block, sequence)| is_stale(blocks, *block, *sequence))
        };
        while is_stale(self.entries.front()) {
            self.entries.pop_front();
        }
        while is_stale(self.entries.back()) {
            self.entries.pop_back();
        }
    }

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

    /// Moves the pages of a sparse block into others of its group, and removes it. Returns `None`
    /// if some blocks have too little room for that.
    pub fn merge(&mut self, blocks: &mut BlockTable, random: &mut u64) -> Option<BlockId> {
        let group = self.large_sample().unwrap_or(Group::Rest);
        self.groups[group as usize].remove_stale_ends(blocks);
        let mut candidates = [None; MERGE_CANDIDATES];
        self.merge_candidates(group, blocks, random, &mut candidates);
        candidates.sort_unstable_by_key(|candidate| candidate.map_or(usize::MAX, |(pages, _)| pages));
        let mut found = candidates.into_iter().flatten();
        let (pages, source) = found.next().filter(|(pages, _)| *pages <= MOVED_PAGES_MAX)?;
        let room: usize = found.clone().map(|(pages, _)| BLOCK_PAGES.saturating_sub(pages)).sum();
        (room >= pages && blocks.move_pages(source, found.map(|(_, block)| block))).then_some(source)
    }

    /// Finds blocks of a group, and the numbers of their pages.
    fn merge_candidates(
        &self,
        group: Group,
        blocks: &BlockTable,
        random: &mut u64,
        candidates: &mut [Option<(usize, BlockId)>; MERGE_CANDIDATES],
    ) {
        let entries = &self.groups[group as usize].entries;
        let Some(last) = entries.len().checked_sub(1) else { return };
        let end = self.end_of(group);
        for at in 0..MERGE_CANDIDATES {
            let place = match end {
                _ if at >= MERGE_CANDIDATES / 2 => random_below(random, entries.len()),
                End::Oldest => at.min(last),
                End::Newest => last - at.min(last),
            };
            let (block, sequence) = entries[place];
            let pages = blocks.states.entries(block);
            let is_found = candidates[..at].iter().flatten().any(|(_, other)| *other == block);
            if !is_found && !is_stale(blocks, block, sequence) {
                candidates[at] = Some((pages, block));
            }
        }
    }

    /// The end at which blocks of a group are dropped.
    fn end_of(&self, group: Group) -> End {
        match group {
            Group::Oldest => End::Oldest,
            Group::Newest => End::Newest,
            Group::Rest => self.index.upgrade().map_or(End::Oldest, |index| index.duel().end()),
        }
    }

    /// A sample with more than its part of the blocks.
    fn large_sample(&self) -> Option<Group> {
        let is_large = |group: &Group| self.groups[*group as usize].cached * SAMPLE_DIVISOR > self.cached();
        [Group::Oldest, Group::Newest].into_iter().find(is_large)
    }

    /// Removes a block that is not pinned: of a sample that is too large, or else of the rest, by
    /// the order of the better sample.
    pub fn remove(&mut self, blocks: &BlockTable) -> Option<BlockId> {
        let first = self.large_sample();
        let others = [Group::Rest, Group::Oldest, Group::Newest];
        first.into_iter().chain(others).find_map(|group| {
            let end = self.end_of(group);
            self.groups[group as usize].remove_first(end, blocks)
        })
    }
}

/// A number below `below`, by a xorshift generator.
fn random_below(random: &mut u64, below: usize) -> usize {
    *random ^= *random << 13;
    *random ^= *random >> 7;
    *random ^= *random << 17;
    usize::try_from(*random >> 33).expect("31 bits") % below
}
