//! How long a state has lasted, as far as somebody watched it.
//!
//! A machine that stands still (suspended, or starved by its own host) lets the clock run on while nothing on it could have done
//! anything. Who ends a run for what has not changed in ten seconds must not count such time.

use std::time::{Duration, Instant};

/// Between two looks no more than this counts.
const STEP_MAX: Duration = Duration::from_millis(200);

/// Begun when the state is first seen, dropped when it is over.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Patience {
    watched: Duration,
    looked: Instant,
}

impl Patience {
    pub(crate) fn begin(now: Instant) -> Self {
        Self { watched: Duration::ZERO, looked: now }
    }

    /// The state lasts still. Returns for how long it has been watched.
    pub(crate) fn look(&mut self, now: Instant) -> Duration {
        self.watched += now.saturating_duration_since(self.looked).min(STEP_MAX);
        self.looked = now;
        self.watched
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_in_which_the_machine_stood_still_does_not_count() {
        let begun = Instant::now();
        let mut patience = Patience::begin(begun);
        assert_eq!(patience.look(begun + Duration::from_millis(50)), Duration::from_millis(50));
        assert_eq!(patience.look(begun + Duration::from_secs(60)), Duration::from_millis(50) + STEP_MAX);
        assert_eq!(
            patience.look(begun + Duration::from_millis(60_050)),
            Duration::from_millis(100) + STEP_MAX
        );
    }
}
