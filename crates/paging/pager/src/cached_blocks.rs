//! The order of the cached blocks: which one is given away when the mempool needs a block.
//!
//! A block of the user with the most cached blocks for its weight is dropped, so that no user can
//! push out pages of others; within a user, one of the run with the most. If blocks of the run
//! have room for the pages of a sparse one, they are moved there (`merge`). Otherwise the run's
//! oldest or newest block is dropped: `duel`.

pub(crate) mod duel;
mod merge;
mod run_queue;

use std::sync::{Arc, Weak};

use aquifer_fabric::Memory;

use crate::cache_shares::CacheShares;
use crate::mempool::{BLOCK_PAGES, BlockId};
use crate::page::Location;
use crate::page_cache::{BlockStates, CacheIndex};
use duel::Group;
use run_queue::RunQueue;

/// A cached block.
#[derive(Debug)]
struct CachedBlock {
    uid: u32,
    index: Weak<CacheIndex>,
    group: Group,
    /// Number of blocks that were cached before this one.
    sequence: u64,
}

/// The cached blocks, by number.
#[derive(Debug)]
struct BlockTable {
    states: Arc<BlockStates>,
    list: Vec<Option<CachedBlock>>,
    /// For each slot the location and 1, or 0 if there was no entry.
    locations: Vec<u32>,
    /// The memory of the slots.
    memory: Arc<Memory>,
}

impl BlockTable {
    fn of(&self, block: BlockId) -> Option<&CachedBlock> {
        self.list[block.0 as usize].as_ref()
    }

    fn locations_of(&mut self, block: BlockId) -> &mut [u32] {
        &mut self.locations[block.0 as usize * BLOCK_PAGES..][..BLOCK_PAGES]
    }
}

/// The cached blocks of one user.
#[derive(Debug)]
struct UserQueues {
    uid: u32,
    /// Number of cached blocks.
    cached: usize,
    runs: Vec<RunQueue>,
}

/// All cached blocks.
#[derive(Debug)]
pub(crate) struct CachedBlocks {
    blocks: BlockTable,
    users: Vec<UserQueues>,
    shares: CacheShares,
    sequence: u64,
    cached: usize,
    /// The state of a xorshift generator.
    random: u64,
}

impl CachedBlocks {
    /// No cached blocks, of a mempool with `blocks` blocks in `memory`.
    pub fn new(blocks: usize, memory: Arc<Memory>) -> Self {
        let mut list = Vec::new();
        list.resize_with(blocks, || None);
        // Memory that is zero from the system, and used only where blocks are cached.
        let locations = vec![0; blocks * BLOCK_PAGES];
        Self {
            blocks: BlockTable { states: Arc::new(BlockStates::new(blocks)), list, locations, memory },
            users: Vec::new(),
            shares: CacheShares::default(),
            sequence: 0,
            cached: 0,
            random: 1,
        }
    }

    pub fn states(&self) -> &Arc<BlockStates> {
        &self.blocks.states
    }

    /// Sets how the users share the cache.
    pub fn set_shares(&mut self, shares: CacheShares) {
        self.shares = shares;
    }

    /// The number of cached blocks.
    pub fn len(&self) -> usize {
        self.cached
    }

    /// The number of cached blocks of a user.
    pub fn len_of(&self, uid: u32) -> usize {
        self.users.iter().find(|user| user.uid == uid).map_or(0, |user| user.cached)
    }

    /// The number of cached blocks of a run.
    pub fn len_of_run(&self, index: &Arc<CacheIndex>) -> usize {
        let mut runs = self.users.iter().flat_map(|user| &user.runs);
        runs.find(|run| run.is_of(index)).map_or(0, RunQueue::cached)
    }

    /// Whether a user has as many cached blocks as it may have.
    pub fn is_at_limit(&self, uid: u32) -> bool {
        self.shares.blocks_max().is_some_and(|max| self.len_of(uid) >= max)
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
        let (sequence, group) = (self.sequence, Group::of(self.sequence));
        let cached = CachedBlock { uid, index: Arc::downgrade(index), group, sequence };
        self.blocks.list[block.0 as usize] = Some(cached);
        let locations = self.blocks.locations_of(block);
        locations.fill(0);
        entries.iter().for_each(|(at, location)| locations[*at] = location.0 + 1);
        self.states().begin(block, entries.len(), group);
        entries.iter().for_each(|(at, location)| index.insert(*location, block.slot(*at)));
        self.states().finish(block);
        let run = queue_of(&mut self.users, uid, index);
        run.push(block, sequence, group, &self.blocks);
        let user = self.users.iter_mut().find(|user| user.uid == uid).expect("it has a queue");
        user.cached += 1;
        self.cached += 1;
    }

    /// Removes a block from the cache. Its slots belong to the caller from then on. Returns `None`
    /// if all are pinned.
    pub fn remove(&mut self) -> Option<BlockId> {
        self.remove_emptied().or_else(|| self.remove_from_users(|_| true))
    }

    /// Removes a block of a user from the cache.
    pub fn remove_of_user(&mut self, uid: u32) -> Option<BlockId> {
        self.remove_from_users(|user| user.uid == uid)
    }

    /// Removes a block whose pages have all left the cache.
    pub fn remove_emptied(&mut self) -> Option<BlockId> {
        while let Some(block) = self.states().pop_emptied() {
            // The block may have been taken meanwhile, and even cached again. A pinned one is taken
            // in its turn.
            if self.blocks.of(block).is_some()
                && self.states().entries(block) == 0
                && self.states().try_remove(block)
            {
                self.forget(block);
                return Some(block);
            }
        }
        None
    }

    /// Removes a block of the user with the most for its weight, of those that are accepted, and of
    /// this user's run with the most.
    fn remove_from_users(&mut self, is_accepted: impl Fn(&UserQueues) -> bool) -> Option<BlockId> {
        self.users.iter_mut().flat_map(|user| &mut user.runs).for_each(|run| run.is_passed_over = false);
        loop {
            let Self { users, shares, blocks, random, .. } = self;
            let users = users.iter_mut().filter(|user| is_accepted(user));
            let runs = users.flat_map(|user| {
                let of_user = shares.weighed(user.uid, user.cached);
                user.runs.iter_mut().map(move |run| (of_user, run))
            });
            let (_, run) = runs
                .filter(|(_, run)| run.cached() > 0 && !run.is_passed_over)
                .max_by_key(|(of_user, run)| (*of_user, run.cached()))?;
            if let Some(block) = run.merge(blocks, random).or_else(|| run.remove(blocks)) {
                self.forget(block);
                return Some(block);
            }
            run.is_passed_over = true;
        }
    }

    /// Removes a block of a run that has ended.
    pub fn remove_of_run(&mut self, uid: u32, index: &Arc<CacheIndex>) -> Option<BlockId> {
        let user = self.users.iter_mut().find(|user| user.uid == uid)?;
        let run = user.runs.iter_mut().find(|run| run.is_of(index))?;
        let block = run.remove(&self.blocks)?;
        self.forget(block);
        Some(block)
    }

    /// Removes the entries of a block that was taken.
    fn forget(&mut self, block: BlockId) {
        let cached = self.blocks.list[block.0 as usize].take().expect("it was cached");
        if let Some(index) = cached.index.upgrade() {
            for at in 0..BLOCK_PAGES {
                if let Some(location) = self.blocks.locations_of(block)[at].checked_sub(1) {
                    index.remove_from(Location(location), block.slot(at));
                }
            }
        }
        self.cached -= 1;
        let user = self.users.iter_mut().find(|user| user.uid == cached.uid).expect("it has a block");
        user.cached -= 1;
        let at = user.runs.iter().position(|run| run.is_of_weak(&cached.index)).expect("it has a block");
        user.runs[at].removed(cached.group);
        if user.runs[at].cached() == 0 {
            user.runs.swap_remove(at);
        }
        if user.cached == 0 {
            self.users.retain(|user| user.cached > 0);
        }
    }
}

/// The queue of a run of a user, which is made if there is none.
fn queue_of<'a>(users: &'a mut Vec<UserQueues>, uid: u32, index: &Arc<CacheIndex>) -> &'a mut RunQueue {
    let at = users.iter().position(|user| user.uid == uid).unwrap_or_else(|| {
        users.push(UserQueues { uid, cached: 0, runs: Vec::new() });
        users.len() - 1
    });
    let runs = &mut users[at].runs;
    let at = runs.iter().position(|run| run.is_of(index)).unwrap_or_else(|| {
        runs.push(RunQueue::new(index));
        runs.len() - 1
    });
    &mut runs[at]
}

#[cfg(test)]
mod tests;
