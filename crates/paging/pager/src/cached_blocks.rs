//! The order of the cached blocks: which one is given away when the mempool needs a block.
//!
//! The user with the most cached blocks gives up one, so that no user can push out what others
//! have cached.

use std::collections::VecDeque;
use std::sync::{Arc, Weak};

use crate::mempool::{BLOCK_PAGES, BlockId};
use crate::page::Location;
use crate::page_cache::{BlockStates, CacheIndex};

/// Maximum number of pinned blocks that are passed over in one queue.
const PASSED_OVER_MAX: usize = 8;

/// The run that a cached block is of.
#[derive(Debug)]
struct CachedBlock {
    uid: u32,
    index: Weak<CacheIndex>,
    /// Number of blocks that were cached before this one.
    sequence: u64,
}

/// The cached blocks of one user, the oldest first.
#[derive(Debug)]
struct UserQueue {
    uid: u32,
    /// Blocks with their sequence numbers. An entry with another number than the block has is
    /// stale.
    blocks: VecDeque<(BlockId, u64)>,
    /// Number of entries that are not stale.
    cached: usize,
}

/// All cached blocks.
#[derive(Debug)]
pub(crate) struct CachedBlocks {
    states: Arc<BlockStates>,
    /// Indexed by block number.
    blocks: Vec<Option<CachedBlock>>,
    /// For each slot the location and 1, or 0 if there was no entry.
    locations: Vec<u32>,
    queues: Vec<UserQueue>,
    sequence: u64,
    cached: usize,
}

impl CachedBlocks {
    pub fn new(blocks: usize) -> Self {
        let mut list = Vec::new();
        list.resize_with(blocks, || None);
        Self {
            states: Arc::new(BlockStates::new(blocks)),
            blocks: list,
            // Memory that is zero from the system, and used only where blocks are cached.
            locations: vec![0; blocks * BLOCK_PAGES],
            queues: Vec::new(),
            sequence: 0,
            cached: 0,
        }
    }

    pub fn states(&self) -> &Arc<BlockStates> {
        &self.states
    }

    /// The number of cached blocks.
    pub fn len(&self) -> usize {
        self.cached
    }

    /// Caches a block of a user: page `i` of `entries` is in the slot with its index.
    ///
    /// The caller must hold references to the locations, and owns the block no more.
    pub fn insert(
        &mut self,
        uid: u32,
        block: BlockId,
        index: &Arc<CacheIndex>,
        entries: &[(usize, Location)],
    ) {
        self.sequence += 1;
        let cached = CachedBlock { uid, index: Arc::downgrade(index), sequence: self.sequence };
        self.blocks[block.0 as usize] = Some(cached);
        let locations = self.locations_of(block);
        locations.fill(0);
        entries.iter().for_each(|(at, location)| locations[*at] = location.0 + 1);
        self.states.begin(block, entries.len());
        entries.iter().for_each(|(at, location)| index.insert(*location, block.slot(*at)));
        self.states.finish(block);
        let place = self.queues.iter().position(|queue| queue.uid == uid);
        let place = place.unwrap_or_else(|| {
            self.queues.push(UserQueue { uid, blocks: VecDeque::new(), cached: 0 });
            self.queues.len() - 1
        });
        self.queues[place].blocks.push_back((block, self.sequence));
        self.queues[place].cached += 1;
        self.cached += 1;
    }

    /// Takes a block out of the cache. Its slots belong to the caller from then on. Returns `None`
    /// if all are pinned.
    pub fn take(&mut self) -> Option<BlockId> {
        self.take_emptied().or_else(|| self.take_oldest())
    }

    /// Takes a block whose pages have all left the cache.
    fn take_emptied(&mut self) -> Option<BlockId> {
        while let Some(block) = self.states.pop_emptied() {
            // The block may have been taken meanwhile, and even cached again. A pinned one is taken
            // in its turn.
            if self.blocks[block.0 as usize].is_some()
                && !self.states.has_entries(block)
                && self.states.try_take(block)
            {
                self.forget(block);
                return Some(block);
            }
        }
        None
    }

    /// Takes the oldest block of the user with the most.
    fn take_oldest(&mut self) -> Option<BlockId> {
        let mut passed_over = Vec::new();
        loop {
            let of_user = |queue: &&mut UserQueue| queue.cached > 0 && !passed_over.contains(&queue.uid);
            let queue = self.queues.iter_mut().filter(of_user).max_by_key(|queue| queue.cached)?;
            let mut pinned = 0;
            let mut at = 0;
            while let Some((block, sequence)) =
                queue.blocks.get(at).copied().filter(|_| pinned < PASSED_OVER_MAX)
            {
                let is_stale =
                    self.blocks[block.0 as usize].as_ref().is_none_or(|cached| cached.sequence != sequence);
                if is_stale {
                    queue.blocks.remove(at);
                } else if self.states.try_take(block) {
                    queue.blocks.remove(at);
                    self.forget(block);
                    return Some(block);
                } else {
                    pinned += 1;
                    at += 1;
                }
            }
            passed_over.push(queue.uid);
        }
    }

    /// Takes a block of a run.
    pub fn take_of(&mut self, uid: u32, index: &Arc<CacheIndex>) -> Option<BlockId> {
        let queue = self.queues.iter_mut().find(|queue| queue.uid == uid)?;
        let is_of_run = |(block, sequence): &(BlockId, u64)| {
            self.blocks[block.0 as usize].as_ref().is_some_and(|cached| {
                cached.sequence == *sequence && std::ptr::eq(cached.index.as_ptr(), Arc::as_ptr(index))
            })
        };
        let at = queue.blocks.iter().position(|entry| is_of_run(entry) && self.states.try_take(entry.0))?;
        let (block, _) = queue.blocks.remove(at).expect("it was found");
        self.forget(block);
        Some(block)
    }

    /// Removes the entries of a block that was taken.
    fn forget(&mut self, block: BlockId) {
        let cached = self.blocks[block.0 as usize].take().expect("it was cached");
        if let Some(index) = cached.index.upgrade() {
            for at in 0..BLOCK_PAGES {
                if let Some(location) = self.locations_of(block)[at].checked_sub(1) {
                    index.remove_from(Location(location), block.slot(at));
                }
            }
        }
        self.cached -= 1;
        let queue = self.queues.iter_mut().find(|queue| queue.uid == cached.uid).expect("it has a block");
        queue.cached -= 1;
    }

    fn locations_of(&mut self, block: BlockId) -> &mut [u32] {
        &mut self.locations[block.0 as usize * BLOCK_PAGES..][..BLOCK_PAGES]
    }
}

#[cfg(test)]
mod tests;
