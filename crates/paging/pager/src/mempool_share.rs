//! The mempool share of a run: the number of blocks that all its volumes together may own.
//!
//! A volume that lacks a block queues for one, and the next block that any volume of the run
//! releases is reserved for the volume at the head of the queue. A volume that releases a block
//! cannot reserve it again before the queued volumes. Without this rule a program that always
//! evicts keeps all blocks, and a program that cannot continue without a block waits for ever.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed, Ordering::SeqCst};

use parking_lot::Mutex;

/// The blocks of a run's share, and the members that wait for one.
#[derive(Debug, Default)]
pub(crate) struct MempoolShare {
    /// Number of blocks that members own or that are reserved for a member of the queue.
    blocks: AtomicU64,
    max: AtomicU64,
    next_member: AtomicU64,
    members: AtomicU64,
    /// Must be locked to change `blocks` or the queue.
    queue: Mutex<BlockQueue>,
    /// Whether `queue` has an entry or a reservation, so that a check needs no lock.
    has_waiting: AtomicBool,
    /// Set when a reservation was made or a block became free, and waiting members are not
    /// notified yet.
    needs_notification: AtomicBool,
}

/// Members that wait for a block, by number, in the order in which they queued.
#[derive(Debug, Default)]
struct BlockQueue {
    waiting: VecDeque<u64>,
    /// Members for each of which one block is reserved.
    reserved: Vec<u64>,
}

impl BlockQueue {
    fn remove_reservation(&mut self, member: u64) -> bool {
        let at = self.reserved.iter().position(|other| *other == member);
        at.map(|at| self.reserved.swap_remove(at)).is_some()
    }
}

impl MempoolShare {
    pub fn set_max(&self, blocks: u64) {
        self.max.store(blocks, Relaxed);
    }

    pub fn blocks(&self) -> u64 {
        self.blocks.load(Relaxed)
    }

    pub fn members(&self) -> u64 {
        self.members.load(Relaxed)
    }

    fn update_has_waiting(&self, queue: &BlockQueue) {
        self.has_waiting.store(!queue.waiting.is_empty() || !queue.reserved.is_empty(), SeqCst);
    }

    /// Adds a member and returns its number.
    pub fn join(&self) -> u64 {
        self.members.fetch_add(1, Relaxed);
        self.next_member.fetch_add(1, Relaxed)
    }

    /// Removes a member, which must have released its blocks.
    pub fn leave(&self, member: u64) {
        self.members.fetch_sub(1, Relaxed);
        self.leave_queue(member);
    }

    /// Assigns a block to a member: the one that is reserved for it, or a free one.
    ///
    /// On success the member leaves the queue. Returns false if the share has no block for it.
    pub fn try_reserve(&self, member: u64) -> bool {
        let mut queue = self.queue.lock();
        if !queue.remove_reservation(member) {
            if self.is_exhausted() {
                return false;
            }
            self.blocks.fetch_add(1, Relaxed);
        }
        queue.waiting.retain(|other| *other != member);
        self.update_has_waiting(&queue);
        true
    }

    /// Removes a member from the queue; a block that is reserved for it goes to the next member.
    pub fn leave_queue(&self, member: u64) {
        if self.has_waiting.load(SeqCst) {
            let mut queue = self.queue.lock();
            queue.waiting.retain(|other| *other != member);
            if queue.remove_reservation(member) {
                self.reserve_for_next(&mut queue);
            }
            self.update_has_waiting(&queue);
        }
    }

    /// Counts a block that a member owned before the restart of the agent.
    pub fn count_recovered(&self) {
        let _changing = self.queue.lock();
        self.blocks.fetch_add(1, Relaxed);
    }

    /// Whether members own more blocks than the share has, because the share was made smaller.
    pub fn has_surplus(&self) -> bool {
        self.blocks.load(Relaxed) > self.max.load(Relaxed)
    }

    /// Releases a member's block: reserves it for the head of the queue, or makes it free.
    pub fn release(&self) {
        let mut queue = self.queue.lock();
        self.reserve_for_next(&mut queue);
        self.update_has_waiting(&queue);
    }

    fn reserve_for_next(&self, queue: &mut BlockQueue) {
        if !self.has_surplus()
            && let Some(member) = queue.waiting.pop_front()
        {
            queue.reserved.push(member);
            self.needs_notification.store(true, SeqCst);
        } else {
            self.make_free(queue);
        }
    }

    /// Releases a block without reserving it for the head of the queue.
    pub fn cancel_reservation(&self) {
        self.make_free(&self.queue.lock());
    }

    fn make_free(&self, queue: &BlockQueue) {
        let before = self.blocks.fetch_sub(1, Relaxed);
        assert!(before > 0, "more blocks were released than reserved");
        // Members that found the share exhausted must try again.
        if !queue.waiting.is_empty() {
            self.needs_notification.store(true, SeqCst);
        }
    }

    /// Blocks that each member may count on; 0 if there are more members than blocks.
    fn fair_share(&self) -> u64 {
        self.max.load(Relaxed) / self.members.load(Relaxed).max(1)
    }

    /// Queues a member that owns `owned` blocks, if that is less than its fair share and the share
    /// is exhausted. Returns true if newly queued.
    pub fn enqueue(&self, member: u64, owned: u64) -> bool {
        let mut queue = self.queue.lock();
        let needs_none = owned >= self.fair_share().max(1) || !self.is_exhausted();
        if needs_none || queue.waiting.contains(&member) || queue.reserved.contains(&member) {
            return false;
        }
        queue.waiting.push_back(member);
        self.update_has_waiting(&queue);
        true
    }

    /// Whether all blocks are owned or reserved.
    pub fn is_exhausted(&self) -> bool {
        self.blocks.load(Relaxed) >= self.max.load(Relaxed)
    }

    /// Whether a member is queued, and a member that owns `owned` blocks must release one for it.
    pub fn should_pass_block(&self, owned: u64) -> bool {
        self.has_waiting.load(Relaxed) && owned > self.fair_share() && !self.queue.lock().waiting.is_empty()
    }

    /// Returns true once after a block was released while members waited.
    ///
    /// The caller must then notify the other members.
    pub fn consume_notification(&self) -> bool {
        self.needs_notification.load(SeqCst) && self.needs_notification.swap(false, SeqCst)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn share(max: u64, members: u64) -> MempoolShare {
        let share = MempoolShare::default();
        share.set_max(max);
        (0..members).for_each(|member| assert_eq!(share.join(), member));
        share
    }

    #[test]
    fn a_released_block_goes_to_the_queued_members_first() {
        let share = share(2, 4);
        assert!(share.try_reserve(0) && share.try_reserve(0));
        for member in [1, 2] {
            assert!(!share.try_reserve(member) && share.enqueue(member, 0) && !share.enqueue(member, 0));
        }
        assert!(
            share.should_pass_block(2) && share.should_pass_block(1),
            "there are more members than blocks"
        );
        share.release();
        assert!(share.consume_notification() && !share.consume_notification());
        assert!(!share.try_reserve(0) && share.enqueue(0, 0), "the block is reserved for member 1");
        assert!(!share.try_reserve(2), "the block is reserved for member 1");
        assert!(share.try_reserve(1) && !share.try_reserve(1), "one block is reserved");
        share.release();
        assert!(!share.try_reserve(0) && share.try_reserve(2));
        share.release();
        assert!(share.try_reserve(0));
        assert!(!share.should_pass_block(9), "the queue is empty");
        assert_eq!(share.blocks(), 2);
    }

    #[test]
    fn the_reservation_of_a_member_that_leaves_goes_to_the_next_member() {
        let share = share(1, 4);
        assert!(share.try_reserve(0));
        (1..4).for_each(|member| assert!(share.enqueue(member, 0)));
        share.leave(2);
        share.release();
        share.leave(1);
        assert!(share.consume_notification());
        assert!(share.try_reserve(3));
        share.release();
        assert_eq!(share.blocks(), 0);
        assert!(share.try_reserve(0) && share.is_exhausted());
    }

    #[test]
    fn a_share_that_was_made_smaller_reserves_no_surplus_block() {
        let share = share(3, 2);
        (0..3).for_each(|_| assert!(share.try_reserve(0)));
        share.set_max(1);
        assert!(share.has_surplus() && share.enqueue(1, 0));
        share.release();
        assert!(!share.try_reserve(1), "one surplus block is left");
        share.release();
        share.release();
        assert!(share.try_reserve(1) && !share.try_reserve(0));
    }

    #[test]
    fn a_member_that_leaves_the_queue_does_not_block_it() {
        let share = share(1, 3);
        assert!(share.try_reserve(0) && share.enqueue(1, 0) && share.enqueue(2, 0));
        share.release();
        share.leave_queue(1);
        assert!(!share.try_reserve(0) && share.try_reserve(2));
    }
}
