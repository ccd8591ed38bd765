//! Backoff while a thread of a program is in the kernel.

use std::time::{Duration, Instant};

/// Number of consecutive waits that only yield the processor.
const YIELDS_MAX: u32 = 64;
const PAUSE_MIN: Duration = Duration::from_micros(50);
const PAUSE_MAX: Duration = Duration::from_millis(1);
/// Maximum time between two consecutive waits. After a longer time the backoff begins anew.
const ROW_INTERVAL_MAX: Duration = Duration::from_millis(5);

/// A backoff that first yields the processor, and later sleeps for increasing times: the thread may
/// be throttled by its control group.
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
