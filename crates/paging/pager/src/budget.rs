//! The limit on a run's resident memory, shared by the processes of the run.
//!
//! The limit covers resident pages and the run's share of the mempool. Memory that is resident but
//! cannot be evicted (stacks, small areas, private data of libraries) is sampled and counts, too.
//! An elastic run may have idle memory of its host beyond its limit, which is taken back when
//! others need it.

use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering::Relaxed};

use crate::mempool::{BLOCK_PAGES, MempoolUser};
use crate::mempool_share::MempoolShare;
use crate::mutation::Mutation;
use crate::page::PAGE_BYTES;

/// The smallest limit: below it a dynamically linked program cannot even start.
pub const LIMIT_BYTES_MIN: u64 = 8 << 20;
/// Number of blocks of the smallest share. With fewer, eviction and write-back would wait for each
/// other.
const SHARE_BLOCKS_MIN: u64 = 4;
/// The mempool share is 1/`SHARE_DIVISOR` of the limit.
const SHARE_DIVISOR: u64 = 32;
/// Number of blocks of the largest share. Write-back does not get faster with more.
const SHARE_BLOCKS_MAX: u64 = 256;
/// Part of the evicted pages by which a run that returns memory may grow: 1/`REGROWTH_DIVISOR`.
const REGROWTH_DIVISOR: u64 = 8;

/// The resident pages and mempool blocks that one run may have. All counts are in pages.
#[derive(Debug)]
pub struct Budget {
    /// Pages that are always allowed: the limit less the share.
    guaranteed: AtomicU64,
    /// Pages of idle memory of the host that may be resident as well.
    borrowed_max: AtomicU64,
    /// Pages of idle memory to which the run is being taken back; at most `borrowed_max`.
    borrowed_target: AtomicU64,
    /// The largest number of pages that were allowed so far.
    allowed_peak: AtomicU64,
    held: AtomicI64,
    uncounted: AtomicI64,
    peak: AtomicU64,
    share: MempoolShare,
    granted: AtomicU64,
    mempool_user: Arc<MempoolUser>,
}

impl Budget {
    /// A budget of `limit_bytes` for resident pages and mempool blocks together. No other user has
    /// blocks of the mempool.
    #[must_use]
    pub fn new(limit_bytes: u64) -> Self {
        Self::of_user(limit_bytes, Arc::default())
    }

    /// The budget of a run of a user.
    #[must_use]
    pub fn of_user(limit_bytes: u64, mempool_user: Arc<MempoolUser>) -> Self {
        let budget = Self {
            guaranteed: AtomicU64::new(0),
            borrowed_max: AtomicU64::new(0),
            borrowed_target: AtomicU64::new(0),
            allowed_peak: AtomicU64::new(0),
            held: AtomicI64::new(0),
            uncounted: AtomicI64::new(0),
            peak: AtomicU64::new(0),
            share: MempoolShare::default(),
            granted: AtomicU64::new(0),
            mempool_user,
        };
        budget.set_limit(limit_bytes);
        budget
    }

    /// The user to whose blocks of the mempool the budget counts.
    #[must_use]
    pub fn mempool_user(&self) -> &Arc<MempoolUser> {
        &self.mempool_user
    }

    /// Sets the limit, also of a run whose programs are running.
    pub fn set_limit(&self, limit_bytes: u64) {
        let pages = limit_bytes / PAGE_BYTES as u64;
        let share = (pages / SHARE_DIVISOR / BLOCK_PAGES as u64).clamp(SHARE_BLOCKS_MIN, SHARE_BLOCKS_MAX);
        self.share.set_max(share);
        self.guaranteed.store(pages.saturating_sub(share * BLOCK_PAGES as u64), Relaxed);
        self.note_allowed();
    }

    /// Sets how many pages of idle memory of the host the run may have beyond its limit: `max`, and
    /// fewer soon if `target` is less. Pages above the target are evicted, and no thread waits for
    /// that unless the run grows beyond `max`.
    pub fn set_borrowed(&self, max: u64, target: u64) {
        self.borrowed_target.store(target.min(max), Relaxed);
        self.borrowed_max.store(max, Relaxed);
        self.note_allowed();
    }

    /// Counts pages that were evicted. While the run is above its target, its maximum falls by most
    /// of them: a run whose threads always want more would otherwise return nothing.
    pub fn note_evicted(&self, pages: u64) {
        let less = |max: u64| {
            let target = self.borrowed_target.load(Relaxed);
            let less = max.saturating_sub(pages - pages / REGROWTH_DIVISOR).max(target);
            (less < max).then_some(less)
        };
        if !Mutation::LetGrow.is_active() {
            // It fails if the run is at its target.
            let _at_target = self.borrowed_max.fetch_update(Relaxed, Relaxed, less);
        }
    }

    fn note_allowed(&self) {
        self.allowed_peak.fetch_max(self.resident_max(), Relaxed);
    }

    /// Pages that may be resident whatever other programs need: the limit less the run's share of
    /// the mempool.
    #[must_use]
    pub fn guaranteed(&self) -> u64 {
        self.guaranteed.load(Relaxed)
    }

    /// Pages of idle memory that may be resident as well, see [`Self::set_borrowed`].
    #[must_use]
    pub fn borrowed_max(&self) -> u64 {
        self.borrowed_max.load(Relaxed)
    }

    /// Pages that are resident beyond [`Self::guaranteed`].
    #[must_use]
    pub fn borrowed(&self) -> u64 {
        self.resident().saturating_sub(self.guaranteed())
    }

    /// Pages that may be resident.
    #[must_use]
    pub fn resident_max(&self) -> u64 {
        self.guaranteed().saturating_add(self.borrowed_max())
    }

    /// Pages above which pages are evicted; at most [`Self::resident_max`].
    #[must_use]
    pub fn resident_target(&self) -> u64 {
        self.guaranteed().saturating_add(self.borrowed_target.load(Relaxed))
    }

    /// The largest value of [`Self::resident_max`] so far.
    #[must_use]
    pub fn allowed_peak(&self) -> u64 {
        self.allowed_peak.load(Relaxed)
    }

    /// Pages that are resident, as far as known: held pages and those of the last sample.
    #[must_use]
    pub fn resident(&self) -> u64 {
        u64::try_from(self.held.load(Relaxed).max(0) + self.uncounted.load(Relaxed).max(0))
            .expect("not negative")
    }

    /// Pages that must be evicted before more may become resident; 0 if more fit.
    #[must_use]
    pub fn excess(&self) -> u64 {
        self.resident().saturating_sub(self.resident_max())
    }

    /// Pages that are to be evicted so that `spare` more pages fit; 0 if they fit.
    #[must_use]
    pub fn surplus(&self, spare: u64) -> u64 {
        (self.resident() + spare).saturating_sub(self.resident_target())
    }

    /// Adds pages that became resident, or subtracts (negative) pages that were evicted.
    pub fn add_held(&self, pages: i64) {
        self.held.fetch_add(pages, Relaxed);
    }

    /// Pages counted by [`Self::add_held`].
    #[must_use]
    pub fn held(&self) -> u64 {
        u64::try_from(self.held.load(Relaxed).max(0)).expect("not negative")
    }

    /// Stores a sample: resident pages that are not counted as held, and all resident pages.
    pub fn set_sample(&self, uncounted: u64, resident: u64) {
        self.uncounted.store(i64::try_from(uncounted).unwrap_or(i64::MAX), Relaxed);
        self.peak.fetch_max(resident, Relaxed);
    }

    /// Counts pages that a process of a fork family may write from now on.
    ///
    /// A write copies the page, so each page may become one more resident page. The next sample
    /// replaces this count.
    pub fn grant(&self, pages: u64) {
        if self.share.members() > 1 {
            self.granted.fetch_add(pages, Relaxed);
            self.uncounted.fetch_add(i64::try_from(pages).expect("few"), Relaxed);
        }
    }

    /// Pages that were counted by [`Self::grant`] since the run began.
    #[must_use]
    pub fn granted(&self) -> u64 {
        self.granted.load(Relaxed)
    }

    /// The largest number of resident pages in any sample.
    #[must_use]
    pub fn peak(&self) -> u64 {
        self.peak.load(Relaxed)
    }

    /// Returns true once after a block was released while volumes of the run waited for one.
    ///
    /// The caller must then notify the run's other volumes.
    #[must_use]
    pub fn consume_block_notification(&self) -> bool {
        self.share.consume_notification()
    }

    /// Bytes of the mempool that the run owns or has reserved.
    #[must_use]
    pub fn mempool_bytes(&self) -> u64 {
        self.share.blocks() * (BLOCK_PAGES * PAGE_BYTES) as u64
    }
}

/// A volume's membership in its run's budget.
#[derive(Debug)]
pub(crate) struct BudgetMember {
    budget: Arc<Budget>,
    number: u64,
}

impl BudgetMember {
    pub fn new(budget: Arc<Budget>) -> Self {
        let number = budget.share.join();
        Self { budget, number }
    }

    pub fn budget(&self) -> &Arc<Budget> {
        &self.budget
    }

    /// Reserves one more block of the mempool, if the share allows it.
    #[must_use]
    pub fn try_reserve_block(&self) -> bool {
        self.budget.share.try_reserve(self.number)
    }

    /// Counts a block that this volume owned before the restart of the agent.
    pub fn count_recovered_block(&self) {
        self.budget.share.count_recovered();
    }

    /// Whether the run owns more blocks than its share, because the limit was lowered.
    #[must_use]
    pub fn has_surplus_blocks(&self) -> bool {
        self.budget.share.has_surplus()
    }

    /// Releases a block to the member that has waited longest.
    pub fn release_block(&self) {
        self.budget.share.release();
    }

    /// Cancels a reservation for which the mempool had no block.
    ///
    /// Unlike [`Self::release_block`] this reserves nothing for the next member: the mempool has
    /// no block for it either.
    pub fn cancel_block(&self) {
        self.budget.share.cancel_reservation();
    }

    /// Queues this member for a block if `owned` blocks are less than its fair share. Returns true
    /// if newly queued.
    #[must_use]
    pub fn queue_for_block(&self, owned: u64) -> bool {
        self.budget.share.enqueue(self.number, owned)
    }

    /// Leaves the queue for blocks; a block that is reserved for this member goes to the next.
    pub fn leave_block_queue(&self) {
        self.budget.share.leave_queue(self.number);
    }

    /// Whether all blocks of the share are owned or reserved.
    ///
    /// If a member queues before it calls this, then a member that releases a block after the call
    /// sees the queue entry.
    #[must_use]
    pub fn is_share_exhausted(&self) -> bool {
        self.budget.share.is_exhausted()
    }

    /// Whether a member is queued and a member that owns `owned` blocks must release one for it.
    #[must_use]
    pub fn should_pass_block(&self, owned: u64) -> bool {
        self.budget.share.should_pass_block(owned)
    }
}

impl Deref for BudgetMember {
    type Target = Budget;

    fn deref(&self) -> &Budget {
        &self.budget
    }
}

impl Drop for BudgetMember {
    fn drop(&mut self) {
        self.budget.share.leave(self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mempool_share_counts_against_the_limit() {
        let budget = Budget::new(64 << 20);
        assert_eq!(budget.resident_max() * 4096, (64 << 20) - 8 * 256 * 1024);
        let member = BudgetMember::new(Arc::new(budget));
        for _ in 0..8 {
            assert!(member.try_reserve_block());
        }
        assert!(!member.try_reserve_block(), "the share is a bound");
        member.release_block();
        assert!(member.try_reserve_block());
    }

    #[test]
    fn excess_counts_sampled_pages() {
        let budget = Budget::new(16 << 20);
        let max = budget.resident_max();
        budget.add_held(i64::try_from(max).unwrap() - 10);
        assert_eq!(budget.excess(), 0);
        assert_eq!(budget.surplus(12), 2);
        budget.set_sample(30, max + 20);
        assert_eq!(budget.excess(), 20);
        assert_eq!(budget.peak(), max + 20);
    }

    #[test]
    fn borrowed_pages_are_taken_back_without_a_wait() {
        let budget = Budget::new(16 << 20);
        let guaranteed = budget.guaranteed();
        budget.set_borrowed(1000, 1000);
        budget.add_held(i64::try_from(guaranteed + 900).unwrap());
        assert_eq!((budget.excess(), budget.surplus(100), budget.borrowed()), (0, 0, 900));
        budget.set_borrowed(950, 100);
        assert_eq!((budget.excess(), budget.surplus(0)), (0, 800));
        assert_eq!((budget.resident_max(), budget.resident_target()), (guaranteed + 950, guaranteed + 100));
        budget.note_evicted(64);
        assert_eq!(budget.resident_max(), guaranteed + 950 - 56, "an eighth may return");
        budget.note_evicted(5000);
        assert_eq!(budget.resident_max(), guaranteed + 100);
        budget.set_borrowed(0, 0);
        assert_eq!(budget.excess(), 900);
        assert_eq!(budget.allowed_peak(), guaranteed + 1000);
    }
}
