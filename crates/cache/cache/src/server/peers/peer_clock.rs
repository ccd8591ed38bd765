//! An estimate of another server's clock, from the times in its answers.
//!
//! A request that has ended without an answer must not take effect later: a newer change may have
//! been acknowledged by then. So a frame has the time until which it may be served, by the
//! *receiver's* clock, and the sender ends the request after that time. Each answer has the
//! receiver's time.
//!
//! The receiver's clock has shown the time in an answer before the answer arrived. If both clocks
//! run equally fast, the receiver's clock has therefore passed that time plus `d` when the sender's
//! clock is at the arrival plus `d`. So a frame is never served after the sender has ended its
//! requests, whatever the delay of the frame or of the answer. A delay only shortens the time for
//! which the receiver serves the frame.

use std::time::{Duration, Instant};

/// The rates of two machines' clocks differ by less than 1/`DRIFT_DIVISOR`: a wrong clock is
/// corrected at up to such a rate. The leases of servers have the same margin.
const DRIFT_DIVISOR: u32 = 10;

/// An estimate of another server's clock.
#[derive(Clone, Copy, Default, Debug)]
pub struct PeerClock {
    /// The best time in an answer, and the time at which the answer arrived.
    sample: Option<(u64, Instant)>,
}

impl PeerClock {
    /// Notes the time in an answer that was received.
    pub fn note(&mut self, clock_us: u64, arrived: Instant) {
        // An answer with a long delay gives a lower bound than an older one.
        if clock_us > self.at_least(arrived) {
            self.sample = Some((clock_us, arrived));
        }
    }

    /// A time that the other server's clock will have passed when this server's clock is at `end`,
    /// as known at `now`. 0 if no answer was received.
    pub fn serve_until(&self, end: Instant, now: Instant) -> u64 {
        if self.sample.is_none() {
            return 0;
        }
        self.at_least(now).saturating_add(us(at_least(end.saturating_duration_since(now))))
    }

    /// A time that the other server's clock has passed at `now`.
    fn at_least(&self, now: Instant) -> u64 {
        let Some((clock_us, arrived)) = self.sample else { return 0 };
        clock_us.saturating_add(us(at_least(now.saturating_duration_since(arrived))))
    }
}

/// The least time that passes at the other server while `passed` passes on this one.
fn at_least(passed: Duration) -> Duration {
    passed - passed / DRIFT_DIVISOR
}

fn us(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn nothing_is_served_before_the_clock_is_known() {
        let now = Instant::now();
        let clock = PeerClock::default();
        assert_eq!(clock.serve_until(now + 100 * MS, now), 0);
    }

    /// The other clock is ahead by `AHEAD_US`.
    #[test]
    fn a_frame_is_not_served_after_its_end() {
        const AHEAD_US: u64 = 5_000_000_000;
        let start = Instant::now();
        let true_us = |at: Instant| AHEAD_US + us(at - start);
        let mut clock = PeerClock::default();
        // Answers with these delays.
        for (at_ms, delay_ms) in [(1000, 1), (1010, 300), (1500, 2), (1600, 90), (9000, 5)] {
            let (at, delay) = (start + at_ms * MS, delay_ms * MS);
            clock.note(true_us(at - delay), at);
            for age_ms in [0, 1, 50, 400, 5000] {
                let now = at + age_ms * MS;
                for wait_ms in [0, 40, 100] {
                    let end = now + wait_ms * MS;
                    assert!(clock.serve_until(end, now) <= true_us(end));
                    // The best answer counts, less the drift of the clocks.
                    let lost_us = true_us(end) - clock.serve_until(end, now);
                    assert!(lost_us <= us(30 * MS + age_ms * MS / DRIFT_DIVISOR), "{lost_us} at {at_ms}");
                }
            }
        }
    }
}
