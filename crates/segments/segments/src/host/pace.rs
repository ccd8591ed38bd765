//! The rate of pages that are pulled ahead of programs.

use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// Bytes for a time.
#[derive(Debug)]
pub(super) struct Pace {
    /// `None`: as fast as possible.
    bytes_per_s: Option<u64>,
    /// When the next bytes may come.
    next: Mutex<Option<Instant>>,
}

impl Pace {
    pub fn new(bytes_per_s: Option<u64>) -> Self {
        Self { bytes_per_s, next: Mutex::new(None) }
    }

    /// Bytes are pulled from `now` on. Returns for how long from then no others may be.
    pub fn charge(&self, bytes: u64, now: Instant) -> Duration {
        let Some(bytes_per_s) = self.bytes_per_s else { return Duration::ZERO };
        let cost_ns = u128::from(bytes) * 1_000_000_000 / u128::from(bytes_per_s.max(1));
        let cost = Duration::from_nanos(u64::try_from(cost_ns).unwrap_or(u64::MAX));
        let mut next = self.next.lock();
        // What was not used is not made up for.
        let until = next.map_or(now, |next| next.max(now)) + cost;
        *next = Some(until);
        until - now
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_take_their_time_for_all_segments_together() {
        let (pace, now) = (Pace::new(Some(1_000_000)), Instant::now());
        let ms = Duration::from_millis;
        assert_eq!(pace.charge(100_000, now), ms(100));
        assert_eq!(pace.charge(50_000, now), ms(150));
        assert_eq!(pace.charge(50_000, now + ms(150)), ms(50));
        assert_eq!(pace.charge(1000, now + ms(10_000)), ms(1), "nothing is made up for");
        assert_eq!(Pace::new(None).charge(1 << 40, now), Duration::ZERO);
    }
}
