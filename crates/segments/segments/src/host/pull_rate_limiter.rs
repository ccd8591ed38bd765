//! The rate limiter of pages that are pulled ahead of programs.

use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// Limits bytes per second, for all segments together. Unused budget is not carried over.
#[derive(Debug)]
pub(super) struct PullRateLimiter {
    /// `None`: no limit.
    bytes_per_s: Option<u64>,
    /// The time from which the next bytes may be pulled.
    next: Mutex<Option<Instant>>,
}

impl PullRateLimiter {
    pub fn new(bytes_per_s: Option<u64>) -> Self {
        Self { bytes_per_s, next: Mutex::new(None) }
    }

    /// Charges bytes whose pull begins at `now`. Returns how long from `now` the next pull must
    /// wait.
    pub fn charge(&self, bytes: u64, now: Instant) -> Duration {
        let Some(bytes_per_s) = self.bytes_per_s else { return Duration::ZERO };
        let cost_ns = u128::from(bytes) * 1_000_000_000 / u128::from(bytes_per_s.max(1));
        let cost = Duration::from_nanos(u64::try_from(cost_ns).unwrap_or(u64::MAX));
        let mut next = self.next.lock();
        let until = next.map_or(now, |next| next.max(now)) + cost;
        *next = Some(until);
        until - now
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unused_budget_is_not_carried_over() {
        let (limiter, now) = (PullRateLimiter::new(Some(1_000_000)), Instant::now());
        let ms = Duration::from_millis;
        assert_eq!(limiter.charge(100_000, now), ms(100));
        assert_eq!(limiter.charge(50_000, now), ms(150));
        assert_eq!(limiter.charge(50_000, now + ms(150)), ms(50));
        assert_eq!(limiter.charge(1000, now + ms(10_000)), ms(1), "after an idle time");
        assert_eq!(PullRateLimiter::new(None).charge(1 << 40, now), Duration::ZERO);
    }
}
