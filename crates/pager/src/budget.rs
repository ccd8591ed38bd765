//! How much of a run's memory may be resident, shared by the processes of the run.
//!
//! A run's limit covers its resident pages *and* its share of the mempool. What is resident but cannot be taken (stacks,
//! small areas, code's private data) is sampled and subtracted.

use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering::Relaxed};

use crate::mempool::BLOCK_PAGES;
use crate::page::PAGE_BYTES;
use crate::share::Share;

/// The smallest limit: below it a dynamically linked program cannot even start.
pub const LIMIT_BYTES_MIN: u64 = 8 << 20;
/// Blocks that a run may always have: fewer would make eviction and write-back wait for each other.
const SHARE_BLOCKS_MIN: u64 = 4;
/// The mempool's share of the limit is one part in this many.
const SHARE_DIVISOR: u64 = 32;
/// A larger share than this buys nothing for write-back.
const SHARE_BLOCKS_MAX: u64 = 256;

/// The budget of one run; all counts in pages.
#[derive(Debug)]
pub struct Budget {
    limit: AtomicU64,
    held: AtomicI64,
    overhead: AtomicI64,
    peak: AtomicU64,
    share: Share,
    granted: AtomicU64,
}

impl Budget {
    /// A budget of `limit_bytes` for resident pages and mempool together.
    #[must_use]
    pub fn new(limit_bytes: u64) -> Self {
        let budget = Self {
            limit: AtomicU64::new(0),
            held: AtomicI64::new(0),
            overhead: AtomicI64::new(0),
            peak: AtomicU64::new(0),
            share: Share::default(),
            granted: AtomicU64::new(0),
        };
        budget.set_limit(limit_bytes);
        budget
    }

    /// Change the limit of a running program.
    pub fn set_limit(&self, limit_bytes: u64) {
        let pages = limit_bytes / PAGE_BYTES as u64;
        let share = (pages / SHARE_DIVISOR / BLOCK_PAGES as u64).clamp(SHARE_BLOCKS_MIN, SHARE_BLOCKS_MAX);
        self.share.set_max(share);
        self.limit.store(pages.saturating_sub(share * BLOCK_PAGES as u64), Relaxed);
    }

    /// Pages that may be resident.
    #[must_use]
    pub fn resident_max(&self) -> u64 {
        self.limit.load(Relaxed)
    }

    /// Pages that are resident, as far as is known: those counted and those sampled.
    #[must_use]
    pub fn resident(&self) -> u64 {
        u64::try_from(self.held.load(Relaxed).max(0) + self.overhead.load(Relaxed).max(0))
            .expect("not negative")
    }

    /// How many pages would have to go for `spare` pages to be free; 0 if they are.
    #[must_use]
    pub fn excess(&self, spare: u64) -> u64 {
        (self.resident() + spare).saturating_sub(self.resident_max())
    }

    /// Count pages that became resident (or, negative, that left).
    pub fn add_held(&self, pages: i64) {
        self.held.fetch_add(pages, Relaxed);
    }

    /// Pages counted by [`Self::add_held`].
    #[must_use]
    pub fn held(&self) -> u64 {
        u64::try_from(self.held.load(Relaxed).max(0)).expect("not negative")
    }

    /// Note what was sampled from outside: pages resident beyond the counted ones, and the whole.
    pub fn set_sample(&self, overhead: u64, resident: u64) {
        self.overhead.store(i64::try_from(overhead).unwrap_or(i64::MAX), Relaxed);
        self.peak.fetch_max(resident, Relaxed);
    }

    /// A member may write so many pages that it shared with relatives: those become more, by so many. The next sample that was taken after
    /// that counts them.
    pub fn grant(&self, pages: u64) {
        if self.share.members() > 1 {
            self.granted.fetch_add(pages, Relaxed);
            self.overhead.fetch_add(i64::try_from(pages).expect("few"), Relaxed);
        }
    }

    /// Pages that were ever granted.
    #[must_use]
    pub fn granted(&self) -> u64 {
        self.granted.load(Relaxed)
    }

    /// Most pages that were ever seen resident.
    #[must_use]
    pub fn peak(&self) -> u64 {
        self.peak.load(Relaxed)
    }

    /// Whether a block was given back for one that lacks it, and nobody has told it. The caller does.
    #[must_use]
    pub fn is_block_to_tell(&self) -> bool {
        self.share.is_to_tell()
    }

    /// Bytes of the mempool that the run has now.
    #[must_use]
    pub fn mempool_bytes(&self) -> u64 {
        self.share.blocks() * (BLOCK_PAGES * PAGE_BYTES) as u64
    }
}

/// A volume's part in a budget.
#[derive(Debug)]
pub(crate) struct Member {
    budget: Arc<Budget>,
    number: u64,
}

impl Member {
    pub fn new(budget: Arc<Budget>) -> Self {
        let number = budget.share.join();
        Self { budget, number }
    }

    pub fn budget(&self) -> &Arc<Budget> {
        &self.budget
    }

    /// Reserve one more block of the mempool, if the share allows it.
    #[must_use]
    pub fn try_add_block(&self) -> bool {
        self.budget.share.take(self.number)
    }

    /// Count a block that this one has had since before a restart.
    pub fn recover_block(&self) {
        self.budget.share.recover();
    }

    /// Whether the run has more blocks than its share: the limit was lowered.
    #[must_use]
    pub fn has_surplus_blocks(&self) -> bool {
        self.budget.share.has_surplus()
    }

    /// Give a block's reservation back.
    pub fn remove_block(&self) {
        self.budget.share.give();
    }

    /// Give a reservation back that came to nothing, and to nobody.
    pub fn forgo_block(&self) {
        self.budget.share.forgo();
    }

    /// This one has so many blocks and gets no other. It waits for one from now on, if that is less than its part; whether it did not before.
    #[must_use]
    pub fn ask_for_block(&self, has: u64) -> bool {
        self.budget.share.ask(self.number, has)
    }

    /// This one needs no block just now, nor one that it was promised.
    pub fn need_no_block(&self) {
        self.budget.share.withdraw(self.number);
    }

    /// Whether members have all blocks of the share. Whoever gives one back after this was seen also sees what was asked before it.
    #[must_use]
    pub fn is_share_used(&self) -> bool {
        self.budget.share.is_used()
    }

    /// Whether a member lacks a block and one that has so many should pass one on.
    #[must_use]
    pub fn is_block_asked_of(&self, has: u64) -> bool {
        self.budget.share.is_asked_of(has)
    }
}

impl Deref for Member {
    type Target = Budget;

    fn deref(&self) -> &Budget {
        &self.budget
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        self.budget.share.leave(self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mempools_share_comes_out_of_the_limit() {
        let budget = Budget::new(64 << 20);
        assert_eq!(budget.resident_max() * 4096, (64 << 20) - 8 * 256 * 1024);
        let member = Member::new(Arc::new(budget));
        for _ in 0..8 {
            assert!(member.try_add_block());
        }
        assert!(!member.try_add_block(), "the share is a bound");
        member.remove_block();
        assert!(member.try_add_block());
    }

    #[test]
    fn excess_counts_what_was_sampled() {
        let budget = Budget::new(16 << 20);
        let max = budget.resident_max();
        budget.add_held(i64::try_from(max).unwrap() - 10);
        assert_eq!(budget.excess(0), 0);
        assert_eq!(budget.excess(12), 2);
        budget.set_sample(30, max + 20);
        assert_eq!(budget.excess(0), 20);
        assert_eq!(budget.peak(), max + 20);
    }
}
