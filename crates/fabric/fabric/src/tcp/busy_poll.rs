//! Polls for a short time before a thread sleeps (decision 5).
//!
//! Waking a thread costs more than an answer from memory takes, above all if the processor has gone
//! idle. So a thread that expects an event soon polls for it. After polls that found nothing, the
//! next ones are skipped, and more of them the more polls failed. Polling stops when another thread
//! needs the processor.

use std::time::{Duration, Instant};

/// Longest yield after which polling continues. After a longer one, another thread needs the
/// processor. The thread that serves the request often runs during the yield, and takes less.
const YIELD_TIME_MAX: Duration = Duration::from_micros(50);
/// Bound of the counted failed polls. At the bound, one wait in 2^`MISSES_MAX` polls.
const MISSES_MAX: u32 = 6;

/// The state of polling of one thread. The default never polls.
#[derive(Debug, Default)]
pub(super) struct BusyPoll {
    limit: Duration,
    misses: u32,
    /// Number of following waits that do not poll.
    skips_left: u32,
}

impl BusyPoll {
    /// Creates a state that polls for at most `limit` in each wait; never if `limit` is zero.
    pub fn new(limit: Duration) -> Self {
        Self { limit, misses: 0, skips_left: 0 }
    }

    /// Whether the next wait polls.
    pub fn is_on(&self) -> bool {
        !self.limit.is_zero() && self.skips_left == 0
    }

    /// Polls until `is_there` returns true. Returns false when it is time to sleep.
    pub fn poll(&mut self, mut is_there: impl FnMut() -> bool) -> bool {
        if self.limit.is_zero() {
            return false;
        }
        if self.skips_left > 0 {
            self.skips_left -= 1;
            return false;
        }
        let found = self.poll_now(&mut is_there);
        self.misses = if found { 0 } else { MISSES_MAX.min(self.misses + 1) };
        self.skips_left = (1 << self.misses) - 1;
        found
    }

    fn poll_now(&self, is_there: &mut impl FnMut() -> bool) -> bool {
        let start = Instant::now();
        let mut now = start;
        loop {
            // Yields first, because the caller has just polled.
            std::thread::yield_now();
            if is_there() {
                return true;
            }
            let before = std::mem::replace(&mut now, Instant::now());
            if now - start >= self.limit || now - before >= YIELD_TIME_MAX {
                return false;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tries(busy_poll: &mut BusyPoll, is_there: bool, waits: usize) -> usize {
        let looked = (0..waits).filter(|_| {
            let mut has_looked = false;
            assert_eq!(
                busy_poll.poll(|| {
                    has_looked = true;
                    is_there
                }),
                is_there && has_looked
            );
            has_looked
        });
        looked.count()
    }

    #[test]
    fn failed_polls_become_rare_and_one_success_restores_polling() {
        let mut busy_poll = BusyPoll::new(Duration::from_nanos(1));
        assert_eq!(tries(&mut busy_poll, false, 1 + 2 + 4 + 8 + 16 + 32 + 64), 7);
        assert_eq!(tries(&mut busy_poll, false, 640), 10);
        assert_eq!(tries(&mut busy_poll, true, 64), 1, "the other waits are still skipped");
        assert_eq!(tries(&mut busy_poll, true, 100), 100);
    }

    #[test]
    fn a_limit_of_zero_disables_polling() {
        assert_eq!(tries(&mut BusyPoll::new(Duration::ZERO), false, 100), 0);
    }
}
