//! The clock of the cache, in seconds since its start, and the expiry times of clients.

use std::time::{SystemTime, UNIX_EPOCH};

use rustix::time::ClockId;

/// Longest expiry that is relative to now, in seconds: 30 days. A greater one is a time since
/// 1970.
const RELATIVE_MAX_S: i64 = 60 * 60 * 24 * 30;
/// The second in which the cache starts.
const FIRST_S: u32 = 2;
/// The expiry second of an item that has already expired.
const EXPIRED_S: u32 = 1;

/// A clock that counts seconds.
#[derive(Clone, Copy, Debug)]
pub struct Clock {
    started_monotonic_s: i64,
    started_unix_s: i64,
}

impl Clock {
    /// A clock that starts now.
    #[must_use]
    pub fn start() -> Self {
        let unix = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        Self {
            started_monotonic_s: monotonic_s() - i64::from(FIRST_S),
            started_unix_s: i64::try_from(unix).unwrap_or(i64::MAX) - i64::from(FIRST_S),
        }
    }

    /// Continues an earlier clock, which has shown `now_s` at second `unix_s` since 1970.
    #[must_use]
    pub fn resume(now_s: u32, unix_s: i64) -> Self {
        let mut clock = Self::start();
        // The time since then has passed for items, too, unless the system's clock was set back.
        let passed_s = (clock.started_unix_s + i64::from(FIRST_S) - unix_s).max(0);
        let seconds = i64::from(now_s) + passed_s - i64::from(FIRST_S);
        clock.started_monotonic_s -= seconds;
        clock.started_unix_s -= seconds;
        clock
    }

    /// The current second.
    #[must_use]
    pub fn now_s(&self) -> u32 {
        u32::try_from(monotonic_s() - self.started_monotonic_s).unwrap_or(u32::MAX)
    }

    /// The second since 1970 that corresponds to `now_s`.
    #[must_use]
    pub fn unix_s(&self, now_s: u32) -> i64 {
        self.started_unix_s + i64::from(now_s)
    }

    /// Converts the expiry of a client to the second in which the item expires, or to 0 if it does
    /// not expire.
    #[must_use]
    pub fn expires_s(&self, exptime: i32, now_s: u32) -> u32 {
        let exptime = i64::from(exptime);
        if exptime == 0 {
            return 0;
        }
        let second = if (0..=RELATIVE_MAX_S).contains(&exptime) {
            exptime + i64::from(now_s)
        } else if exptime < 0 {
            0
        } else {
            exptime - self.started_unix_s
        };
        u32::try_from(second).unwrap_or(0).max(EXPIRED_S)
    }
}

/// The time since the start of the machine, in microseconds, including the time in which the
/// machine was suspended.
#[must_use]
pub fn boot_us() -> u64 {
    let now = rustix::time::clock_gettime(ClockId::Boottime);
    now.tv_sec.unsigned_abs() * 1_000_000 + now.tv_nsec.unsigned_abs() / 1000
}

fn monotonic_s() -> i64 {
    rustix::time::clock_gettime(ClockId::Monotonic).tv_sec
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clock_continues_an_earlier_one() {
        let unix = Clock::start();
        let unix_s = unix.unix_s(unix.now_s());
        let clock = Clock::resume(1000, unix_s - 50);
        assert!((1050..1060).contains(&clock.now_s()), "{}", clock.now_s());
        assert!((0..10).contains(&(clock.unix_s(clock.now_s()) - unix_s)));
        assert!((1000..1010).contains(&Clock::resume(1000, unix_s + 50).now_s()));
    }

    #[test]
    fn expiry_is_relative_or_absolute() {
        let clock = Clock::start();
        let now_s = clock.now_s();
        let unix = i32::try_from(clock.unix_s(now_s)).unwrap();
        assert_eq!(clock.expires_s(0, now_s), 0);
        assert_eq!(clock.expires_s(100, now_s), now_s + 100);
        assert_eq!(clock.expires_s(unix + 50, now_s), now_s + 50);
        assert_eq!(clock.expires_s(unix - 50, now_s), EXPIRED_S);
        assert_eq!(clock.expires_s(-1, now_s), EXPIRED_S);
    }
}
