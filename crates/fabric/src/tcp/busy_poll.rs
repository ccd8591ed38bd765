//! Looking again and again for a short while before going to sleep.
//!
//! To be woken costs more than an answer from memory takes, by far so where the processor has gone idle meanwhile. So whoever has reason
//! to expect something soon goes on looking. It does so only as long as that pays: after a look in vain the next ones are left out, the more
//! the more often; and only while nobody else wants the processor.

use std::time::{Duration, Instant};

/// Somebody else wants the processor for more than a moment, if letting others run took so long. Who serves us is often one of them, and
/// takes less.
const YIELD_TIME_MAX: Duration = Duration::from_micros(50);
/// After many in vain, one in two to this power is tried.
const MISSES_MAX: u32 = 6;

/// When to go on looking, as one waiting thread has found. By default, never.
#[derive(Debug, Default)]
pub(super) struct BusyPoll {
    limit: Duration,
    misses: u32,
    /// So many are left out.
    skips_left: u32,
}

impl BusyPoll {
    /// Look for so long at most; never, if that is nothing.
    pub fn new(limit: Duration) -> Self {
        Self { limit, misses: 0, skips_left: 0 }
    }

    /// Whether it looks at all, next time.
    pub fn is_on(&self) -> bool {
        !self.limit.is_zero() && self.skips_left == 0
    }

    /// Look until there is something; false if it is time to sleep.
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
            // First, for whoever comes here has just looked.
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
    fn looks_in_vain_become_rare_and_one_that_pays_brings_them_back() {
        let mut busy_poll = BusyPoll::new(Duration::from_nanos(1));
        assert_eq!(tries(&mut busy_poll, false, 1 + 2 + 4 + 8 + 16 + 32 + 64), 7);
        assert_eq!(tries(&mut busy_poll, false, 640), 10);
        assert_eq!(tries(&mut busy_poll, true, 64), 1, "it is not yet its turn");
        assert_eq!(tries(&mut busy_poll, true, 100), 100);
    }

    #[test]
    fn without_time_nobody_looks() {
        assert_eq!(tries(&mut BusyPoll::new(Duration::ZERO), false, 100), 0);
    }
}
