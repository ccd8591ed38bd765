//! Waiting for a program's thread that is in the kernel.

use std::time::{Duration, Instant};

/// Waits in a row that only yield the processor.
const YIELDS_MAX: u32 = 64;
const PAUSE_MIN: Duration = Duration::from_micros(50);
const PAUSE_MAX: Duration = Duration::from_millis(1);
/// Waits that are further apart are not in a row.
const ROW_INTERVAL_MAX: Duration = Duration::from_millis(5);

/// Yields the processor at first, and sleeps if that does not help: the thread may be throttled by
/// its control group.
#[derive(Debug)]
pub(super) struct Backoff {
    waits: u32,
    pause: Duration,
    last: Instant,
}

impl Backoff {
    pub fn new() -> Self {
        Self { waits: 0, pause: PAUSE_MIN, last: Instant::now() }
    }

    /// Waits once.
    pub fn wait(&mut self) {
        if self.last.elapsed() > ROW_INTERVAL_MAX {
            (self.waits, self.pause) = (0, PAUSE_MIN);
        }
        if self.waits < YIELDS_MAX {
            self.waits += 1;
            std::thread::yield_now();
        } else {
            std::thread::sleep(self.pause);
            self.pause = (self.pause * 2).min(PAUSE_MAX);
        }
        self.last = Instant::now();
    }
}
