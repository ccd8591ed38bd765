//! The rate at which a host moves pages off memory that nodes recall. All runs of the host share
//! it, so that programs keep most of the processors and of the network.

use std::time::Duration;

use parking_lot::Mutex;

/// Most bytes a second that a host moves by default.
const BYTES_PER_SECOND_MAX: u64 = 100 << 20;
/// Bytes a second that a host moves by default for each of its processors. Moving 1 MiB takes the
/// sender some 3 ms of processor time, and both nodes more.
const BYTES_PER_SECOND_AND_PROCESSOR: u64 = 10 << 20;
/// Longest time for which an unused rate is saved up.
const SAVED_MAX: Duration = Duration::from_millis(50);

/// A number of bytes per second, and the time from which on more may be moved.
#[derive(Debug)]
pub struct MoveRate {
    state: Mutex<RateState>,
}

#[derive(Debug)]
struct RateState {
    /// Bytes per second; `None` for no limit.
    bytes_per_second: Option<u64>,
    /// The time at which the next transfer may begin.
    next_at: Duration,
}

impl Default for MoveRate {
    fn default() -> Self {
        Self::new(Some(BYTES_PER_SECOND_MAX))
    }
}

impl MoveRate {
    /// Creates a rate; `None` for no limit.
    #[must_use]
    pub const fn new(bytes_per_second: Option<u64>) -> Self {
        Self { state: Mutex::new(RateState { bytes_per_second, next_at: Duration::ZERO }) }
    }

    /// Creates the default rate of a host with as many processors as this process may use.
    #[must_use]
    pub fn of_this_host() -> Self {
        let processors = std::thread::available_parallelism().map_or(1, usize::from) as u64;
        Self::new(Some(BYTES_PER_SECOND_MAX.min(processors * BYTES_PER_SECOND_AND_PROCESSOR)))
    }

    /// Changes the rate.
    pub fn set(&self, bytes_per_second: Option<u64>) {
        self.state.lock().bytes_per_second = bytes_per_second;
    }

    /// Whether `bytes` may be moved at the time `now`. Then they count as moved.
    pub(crate) fn spend(&self, bytes: u64, now: Duration) -> bool {
        let mut state = self.state.lock();
        let Some(rate) = state.bytes_per_second else { return true };
        if now < state.next_at {
            return false;
        }
        let nanoseconds = u128::from(bytes) * 1_000_000_000 / u128::from(rate.max(1));
        let time = Duration::from_nanos(u64::try_from(nanoseconds).unwrap_or(u64::MAX));
        state.next_at = state.next_at.max(now.saturating_sub(SAVED_MAX)).saturating_add(time);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CHUNK: u64 = 256 << 10;

    /// Bytes that are spent in a second of calls every `step`.
    fn spent_in_a_second(rate: &MoveRate, step: Duration) -> u64 {
        let (mut now, mut spent) = (Duration::from_secs(1), 0);
        while now < Duration::from_secs(2) {
            while rate.spend(CHUNK, now) {
                spent += CHUNK;
            }
            now += step;
        }
        spent
    }

    #[test]
    fn a_second_moves_what_the_rate_says_however_often_it_is_asked() {
        for bytes in [1 << 20, 10 << 20, 100 << 20] {
            for step in [1, 7, 10, 40] {
                let rate = MoveRate::new(Some(bytes));
                let spent = spent_in_a_second(&rate, Duration::from_millis(step));
                let expected = bytes - bytes / 10 - CHUNK..=bytes + bytes / 10 + CHUNK;
                assert!(expected.contains(&spent), "{bytes} at {step} ms: {spent}");
            }
        }
    }

    #[test]
    fn nothing_is_saved_up_while_there_is_nothing_to_move() {
        let rate = MoveRate::new(Some(100 << 20));
        let now = Duration::from_secs(1000);
        let mut spent = 0;
        while rate.spend(CHUNK, now) {
            spent += CHUNK;
        }
        assert!(spent <= (100 << 20) / 10, "{spent} bytes at once");
        assert!(MoveRate::new(None).spend(u64::MAX, now));
    }
}
