//! Time that advances while the machine is suspended.
//!
//! Other machines do not wait for a suspended machine: its leases end, and other hosts may own its
//! memory. [`std::time::Instant`] stops during the suspension, so no lease may depend on it.

use std::ops::Add;
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

/// A moment by the clock that runs since the machine was started, `CLOCK_BOOTTIME`.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct BootInstant(Duration);

impl BootInstant {
    /// The start of the machine.
    pub const START: Self = Self(Duration::ZERO);

    /// The present moment.
    #[must_use]
    pub fn now() -> Self {
        let now = clock_gettime(ClockId::Boottime);
        let nanoseconds = u32::try_from(now.tv_nsec).expect("less than a second");
        Self(Duration::new(now.tv_sec.unsigned_abs(), nanoseconds))
    }

    /// The time since this moment.
    #[must_use]
    pub fn elapsed(self) -> Duration {
        Self::now().saturating_duration_since(self)
    }

    /// The time since `earlier`; zero if that is later.
    #[must_use]
    pub const fn saturating_duration_since(self, earlier: Self) -> Duration {
        self.0.saturating_sub(earlier.0)
    }

    /// The time since the start of the machine.
    #[must_use]
    pub const fn since_start(self) -> Duration {
        self.0
    }
}

impl Add<Duration> for BootInstant {
    type Output = Self;

    fn add(self, duration: Duration) -> Self {
        Self(self.0.saturating_add(duration))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_passes() {
        let begun = BootInstant::now();
        assert!(begun > BootInstant::START && begun.elapsed() < Duration::from_secs(3600));
        let later = begun + Duration::from_secs(5);
        assert_eq!(later.saturating_duration_since(begun), Duration::from_secs(5));
        assert_eq!(begun.saturating_duration_since(later), Duration::ZERO);
        assert_eq!((begun + Duration::MAX).since_start(), Duration::MAX);
    }
}
