//! A run's share of the mempool: so many blocks, for all its volumes together.
//!
//! A volume that lacks a block asks for one, and gets the next that any of them gives back: whoever gives one up that others wait for does not
//! come by it again before them. Without that a program that always needs room keeps all blocks, and one that cannot go on without a block waits
//! for ever.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed, Ordering::SeqCst};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The share, and who has asked for a part of it.
#[derive(Debug, Default)]
pub(crate) struct Share {
    /// Blocks that its members have, or were promised.
    blocks: AtomicU64,
    max: AtomicU64,
    next_member: AtomicU64,
    members: AtomicU64,
    /// Held by whoever changes `blocks` or who waits.
    waiting: Mutex<Waiting>,
    /// Whether anybody is in `waiting`: who only looks in passing needs no lock.
    has_waiting: AtomicBool,
    /// A promise was made of which nobody was told.
    is_untold: AtomicBool,
}

/// Members, by number, in the order of asking.
#[derive(Debug, Default)]
struct Waiting {
    asked: VecDeque<u64>,
    /// Each has one block to take.
    promised: Vec<u64>,
}

impl Waiting {
    fn forget_promise(&mut self, member: u64) -> bool {
        let at = self.promised.iter().position(|other| *other == member);
        at.map(|at| self.promised.swap_remove(at)).is_some()
    }
}

impl Share {
    pub fn set_max(&self, blocks: u64) {
        self.max.store(blocks, Relaxed);
    }

    pub fn blocks(&self) -> u64 {
        self.blocks.load(Relaxed)
    }

    pub fn members(&self) -> u64 {
        self.members.load(Relaxed)
    }

    fn lock(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn note_waiting(&self, waiting: &Waiting) {
        self.has_waiting.store(!waiting.asked.is_empty() || !waiting.promised.is_empty(), SeqCst);
    }

    pub fn join(&self) -> u64 {
        self.members.fetch_add(1, Relaxed);
        self.next_member.fetch_add(1, Relaxed)
    }

    pub fn leave(&self, member: u64) {
        self.members.fetch_sub(1, Relaxed);
        self.withdraw(member);
    }

    /// Reserve a block for a member: what it was promised, or one that nobody has. It waits for none any more then.
    pub fn take(&self, member: u64) -> bool {
        let mut waiting = self.lock();
        if !waiting.forget_promise(member) {
            if self.is_used() {
                return false;
            }
            self.blocks.fetch_add(1, Relaxed);
        }
        waiting.asked.retain(|other| *other != member);
        self.note_waiting(&waiting);
        true
    }

    /// A member needs no block just now: it waits for none, and whoever comes next gets what it was promised.
    pub fn withdraw(&self, member: u64) {
        if self.has_waiting.load(SeqCst) {
            let mut waiting = self.lock();
            waiting.asked.retain(|other| *other != member);
            if waiting.forget_promise(member) {
                self.hand_on(&mut waiting);
            }
            self.note_waiting(&waiting);
        }
    }

    /// Count a block that a member has had since before a restart.
    pub fn recover(&self) {
        let _changing = self.lock();
        self.blocks.fetch_add(1, Relaxed);
    }

    /// Whether members have more than the share: it was made smaller.
    pub fn has_surplus(&self) -> bool {
        self.blocks.load(Relaxed) > self.max.load(Relaxed)
    }

    /// Give a reservation back: to whoever has waited longest.
    pub fn give(&self) {
        let mut waiting = self.lock();
        self.hand_on(&mut waiting);
        self.note_waiting(&waiting);
    }

    fn hand_on(&self, waiting: &mut Waiting) {
        if !self.has_surplus()
            && let Some(member) = waiting.asked.pop_front()
        {
            waiting.promised.push(member);
            self.is_untold.store(true, SeqCst);
        } else {
            self.drop_one(waiting);
        }
    }

    /// Give a reservation back, to nobody in particular.
    pub fn forgo(&self) {
        self.drop_one(&self.lock());
    }

    fn drop_one(&self, waiting: &Waiting) {
        let before = self.blocks.fetch_sub(1, Relaxed);
        assert!(before > 0, "a block was given back that was never reserved");
        // Whoever found the share used up is to look again.
        if !waiting.asked.is_empty() {
            self.is_untold.store(true, SeqCst);
        }
    }

    /// Blocks that each member may count on; 0 if there are more members than blocks.
    fn each(&self) -> u64 {
        self.max.load(Relaxed) / self.members.load(Relaxed).max(1)
    }

    /// A member that has so many blocks gets no other. If others have them, and that is less than its part, it waits for one from now on; whether it
    /// did not before.
    pub fn ask(&self, member: u64, has: u64) -> bool {
        let mut waiting = self.lock();
        let has_its_part = has >= self.each().max(1) || !self.is_used();
        if has_its_part || waiting.asked.contains(&member) || waiting.promised.contains(&member) {
            return false;
        }
        waiting.asked.push_back(member);
        self.note_waiting(&waiting);
        true
    }

    /// Whether all blocks are taken or promised.
    pub fn is_used(&self) -> bool {
        self.blocks.load(Relaxed) >= self.max.load(Relaxed)
    }

    /// Whether a member lacks a block, and one that has so many should pass one on.
    pub fn is_asked_of(&self, has: u64) -> bool {
        self.has_waiting.load(Relaxed) && has > self.each() && !self.lock().asked.is_empty()
    }

    /// Whether something was given back for those who wait, and nobody has told them yet. The caller does.
    pub fn is_to_tell(&self) -> bool {
        self.is_untold.load(SeqCst) && self.is_untold.swap(false, SeqCst)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn share(max: u64, members: u64) -> Share {
        let share = Share::default();
        share.set_max(max);
        (0..members).for_each(|member| assert_eq!(share.join(), member));
        share
    }

    #[test]
    fn whoever_gives_a_block_up_gets_it_back_only_after_those_who_waited() {
        let share = share(2, 4);
        assert!(share.take(0) && share.take(0));
        for member in [1, 2] {
            assert!(!share.take(member) && share.ask(member, 0) && !share.ask(member, 0));
        }
        assert!(share.is_asked_of(2) && share.is_asked_of(1), "there are more members than blocks");
        share.give();
        assert!(share.is_to_tell() && !share.is_to_tell());
        assert!(!share.take(0) && share.ask(0, 0), "it is not its turn");
        assert!(!share.take(2), "nor 2's");
        assert!(share.take(1) && !share.take(1), "one was promised");
        share.give();
        assert!(!share.take(0) && share.take(2));
        share.give();
        assert!(share.take(0));
        assert!(!share.is_asked_of(9), "nobody waits");
        assert_eq!(share.blocks(), 2);
    }

    #[test]
    fn who_leaves_waits_no_more_and_what_it_was_promised_goes_on() {
        let share = share(1, 4);
        assert!(share.take(0));
        (1..4).for_each(|member| assert!(share.ask(member, 0)));
        share.leave(2);
        share.give();
        share.leave(1);
        assert!(share.is_to_tell());
        assert!(share.take(3));
        share.give();
        assert_eq!(share.blocks(), 0);
        assert!(share.take(0) && share.is_used());
    }

    #[test]
    fn a_share_that_was_made_smaller_promises_nothing() {
        let share = share(3, 2);
        (0..3).for_each(|_| assert!(share.take(0)));
        share.set_max(1);
        assert!(share.has_surplus() && share.ask(1, 0));
        share.give();
        assert!(!share.take(1), "there is still one too many");
        share.give();
        share.give();
        assert!(share.take(1) && !share.take(0));
    }

    #[test]
    fn who_needs_none_any_more_keeps_nobody_waiting() {
        let share = share(1, 3);
        assert!(share.take(0) && share.ask(1, 0) && share.ask(2, 0));
        share.give();
        share.withdraw(1);
        assert!(!share.take(0) && share.take(2));
    }
}
