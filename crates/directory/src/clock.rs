//! Time as the directory sees it: milliseconds that only grow.

use std::fmt::Debug;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Where the time of leases comes from.
pub trait Clock: Send + Sync + Debug {
    /// Milliseconds since some fixed moment. Never goes back.
    fn now_ms(&self) -> u64;
}

/// The system's monotonic clock.
#[derive(Debug)]
pub struct SystemClock {
    start: Instant,
}

impl Default for SystemClock {
    fn default() -> Self {
        Self { start: Instant::now() }
    }
}

impl Clock for SystemClock {
    fn now_ms(&self) -> u64 {
        saturating_ms(self.start.elapsed())
    }
}

/// A clock that stands still until it is advanced.
#[derive(Debug, Default)]
pub struct ManualClock {
    now_ms: AtomicU64,
}

impl ManualClock {
    /// Let time pass.
    pub fn advance(&self, by: Duration) {
        self.now_ms.fetch_add(saturating_ms(by), Ordering::SeqCst);
    }
}

impl Clock for ManualClock {
    fn now_ms(&self) -> u64 {
        self.now_ms.load(Ordering::SeqCst)
    }
}

/// Whole milliseconds of a duration.
#[must_use]
pub fn saturating_ms(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}
