//! The clock of leases: milliseconds that never decrease.

use std::fmt::Debug;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

/// A source of time.
pub trait Clock: Send + Sync + Debug {
    /// Milliseconds since a fixed moment. Never decreases.
    fn now_ms(&self) -> u64;
}

/// Interval between the ticks of a [`RunningClock`].
const TICK_INTERVAL: Duration = Duration::from_millis(200);
/// Most milliseconds that a tick adds. A longer pause means that the process did not run.
const TICK_MS_MAX: u64 = 1000;

/// A clock that runs while this process does.
///
/// While the process is stopped (SIGSTOP, a paused virtual machine, a stalled processor), it
/// receives no keep-alives, so no lease may expire. A thread ticks, and a tick adds at most a
/// second.
#[derive(Debug)]
pub struct RunningClock {
    time: Arc<RunningTime>,
}

/// The time of a [`RunningClock`].
#[derive(Debug)]
struct RunningTime {
    start: Instant,
    ticks: Mutex<Ticks>,
    is_dropped: Condvar,
}

/// The times of the last tick.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
struct Ticks {
    /// The system's time at the last tick.
    last_ms: u64,
    /// The time of the clock at the last tick.
    now_ms: u64,
    is_dropped: bool,
}

impl Ticks {
    fn tick(&mut self, system_ms: u64) -> u64 {
        self.now_ms += system_ms.saturating_sub(self.last_ms).min(TICK_MS_MAX);
        self.last_ms = system_ms.max(self.last_ms);
        self.now_ms
    }
}

impl RunningClock {
    /// Starts a clock and its thread, which ends with the clock.
    ///
    /// # Errors
    /// If the thread cannot be started.
    pub fn start() -> std::io::Result<Self> {
        let (ticks, is_dropped) = (Mutex::default(), Condvar::new());
        let time = Arc::new(RunningTime { start: Instant::now(), ticks, is_dropped });
        let ticking = Arc::clone(&time);
        std::thread::Builder::new().name("lease-clock".into()).spawn(move || ticking.tick_until_dropped())?;
        Ok(Self { time })
    }
}

impl RunningTime {
    fn tick_until_dropped(&self) {
        let mut ticks = self.ticks.lock();
        while !ticks.is_dropped {
            self.is_dropped.wait_for(&mut ticks, TICK_INTERVAL);
            ticks.tick(saturating_ms(self.start.elapsed()));
        }
    }
}

impl Clock for RunningClock {
    fn now_ms(&self) -> u64 {
        let mut ticks = self.time.ticks.lock();
        ticks.tick(saturating_ms(self.time.start.elapsed()))
    }
}

impl Drop for RunningClock {
    fn drop(&mut self) {
        self.time.ticks.lock().is_dropped = true;
        self.time.is_dropped.notify_all();
    }
}

/// A clock that only [`ManualClock::advance`] changes.
#[derive(Debug, Default)]
pub struct ManualClock {
    now_ms: AtomicU64,
}

impl ManualClock {
    /// Advances the clock.
    pub fn advance(&self, by: Duration) {
        self.now_ms.fetch_add(saturating_ms(by), Ordering::SeqCst);
    }
}

impl Clock for ManualClock {
    fn now_ms(&self) -> u64 {
        self.now_ms.load(Ordering::SeqCst)
    }
}

/// The whole milliseconds of a duration, at most `u64::MAX`.
#[must_use]
pub fn saturating_ms(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pause_adds_no_more_than_a_tick() {
        let mut ticks = Ticks::default();
        let times = [200, 400, 30_400, 30_600, 30_500, 31_601].map(|system_ms| ticks.tick(system_ms));
        assert_eq!(times, [200, 400, 1400, 1600, 1600, 2600]);
    }

    #[test]
    fn the_thread_ends_with_the_clock() {
        let clock = RunningClock::start().unwrap();
        let time = Arc::downgrade(&clock.time);
        assert!(clock.now_ms() <= clock.now_ms());
        drop(clock);
        while time.strong_count() > 0 {
            std::thread::yield_now();
        }
    }
}
