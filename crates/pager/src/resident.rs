//! Which resident page leaves first.
//!
//! Nobody tells us when a program touches a page that it has; only its return after it left shows that it was wanted. So pages begin in a
//! queue on probation. One that comes back sooner than as many others as are resident have left would have been
//! kept by a memory twice as large: it goes to the protected queue. Walks through much memory return too late for that, and pass through
//! probation without driving the others out (S3-FIFO's idea, with its ghosts kept in the page table).

use std::collections::VecDeque;

use crate::page::PageNumber;

/// Probation keeps at least this part of all resident pages, so that new pages have time to prove themselves.
const PROBATION_DIVISOR: u64 = 8;

/// The two queues, oldest first. An entry counts only while its page is held; others are passed over by the owner.
#[derive(Debug, Default)]
pub(crate) struct ResidentQueue {
    probation: VecDeque<PageNumber>,
    protected: VecDeque<PageNumber>,
}

impl ResidentQueue {
    /// A page has become resident; `is_warm` if it came back soon.
    pub(crate) fn push(&mut self, page: PageNumber, is_warm: bool) {
        if is_warm { &mut self.protected } else { &mut self.probation }.push_back(page);
    }

    /// The page to leave next, when `held` pages are resident.
    pub(crate) fn pop(&mut self, held: u64) -> Option<PageNumber> {
        let is_rich = self.probation.len() as u64 > held / PROBATION_DIVISOR;
        let (first, second) = if is_rich {
            (&mut self.probation, &mut self.protected)
        } else {
            (&mut self.protected, &mut self.probation)
        };
        first.pop_front().or_else(|| second.pop_front())
    }

    /// Entries, those without a resident page included.
    pub(crate) fn len(&self) -> usize {
        self.probation.len() + self.protected.len()
    }

    /// All entries, those to leave first in front.
    pub(crate) fn iter(&self) -> impl Iterator<Item = PageNumber> + '_ {
        self.probation.iter().chain(&self.protected).copied()
    }

    /// Forget all.
    pub(crate) fn clear(&mut self) {
        self.probation.clear();
        self.protected.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_walk_does_not_drive_warm_pages_out() {
        let mut queue = ResidentQueue::default();
        (0..80).for_each(|page| queue.push(page, true));
        (1000..1020).for_each(|page| queue.push(page, false));
        for page in 2000..3000 {
            let left = queue.pop(100).unwrap();
            assert!(left >= 1000, "{left} was warm");
            queue.push(page, false);
        }
    }

    #[test]
    fn warm_pages_leave_in_their_turn_when_probation_is_small() {
        let mut queue = ResidentQueue::default();
        (0..100).for_each(|page| queue.push(page, true));
        assert_eq!(queue.pop(100), Some(0));
        queue.push(500, false);
        assert_eq!(queue.pop(100), Some(1));
        assert_eq!(queue.len(), 99);
        queue.clear();
        assert_eq!(queue.pop(0), None);
    }
}
