//! How long a state has lasted, as far as somebody observed it.
//!
//! A machine that stands still (suspended, or starved by its own host) lets the clock run on while nothing on it could have done
//! anything. Who ends a run for what has not changed in ten seconds must not count such time.

use std::time::{Duration, Instant};

/// Between two looks no more than this counts.
const STEP_MAX: Duration = Duration::from_millis(200);

/// Begun when the state is first seen, dropped when it is over.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ObservedDuration {
    observed: Duration,
    last_seen: Instant,
}

impl ObservedDuration {
    pub(crate) fn begin(now: Instant) -> Self {
        Self { observed: Duration::ZERO, last_seen: now }
    }

    /// The state lasts still. Returns for how long it has been observed.
    pub(crate) fn observe(&mut self, now: Instant) -> Duration {
        self.observed += now.saturating_duration_since(self.last_seen).min(STEP_MAX);
        self.last_seen = now;
        self.observed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_in_which_the_machine_stood_still_does_not_count() {
        let begun = Instant::now();
        let mut duration = ObservedDuration::begin(begun);
        assert_eq!(duration.observe(begun + Duration::from_millis(50)), Duration::from_millis(50));
        assert_eq!(duration.observe(begun + Duration::from_secs(60)), Duration::from_millis(50) + STEP_MAX);
        assert_eq!(
            duration.observe(begun + Duration::from_millis(60_050)),
            Duration::from_millis(100) + STEP_MAX
        );
    }
}
