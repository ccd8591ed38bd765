//! Measurement of the time for which a state has lasted while this process was running.
//!
//! When a machine stalls (it is suspended, or its hypervisor starves it), its clock advances
//! although no program can run. A run must not be ended for a state that lasted only because of
//! a stall.

use std::time::{Duration, Instant};

/// Maximum time that counts between two observations.
const STEP_MAX: Duration = Duration::from_millis(200);

/// Duration of a state: created when the state is first seen, dropped when it has ended.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ObservedDuration {
    observed: Duration,
    last_seen: Instant,
}

impl ObservedDuration {
    pub(crate) fn begin(now: Instant) -> Self {
        Self { observed: Duration::ZERO, last_seen: now }
    }

    /// Records that the state still lasts. Returns the observed duration.
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
    fn time_of_a_stall_does_not_count() {
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
