//! Limits the log lines of a failure that repeats.

use std::time::{Duration, Instant};

/// Minimum interval between two log lines of one failure.
const LOG_INTERVAL: Duration = Duration::from_secs(60);

/// Decides which occurrences of a repeated failure are logged: the first, then one a minute.
///
/// A success in between changes nothing, so that the log of an intermittent failure is bounded,
/// too. Pure: time is an argument.
#[derive(Debug, Default)]
pub struct FailureLog {
    logged_at: Option<Instant>,
    /// Failures since the last log line.
    count: u64,
}

impl FailureLog {
    /// Counts a failure. If it is to be logged, returns the number of failures since the last log
    /// line, this one included.
    pub fn record(&mut self, now: Instant) -> Option<u64> {
        self.count += 1;
        if self.logged_at.is_some_and(|at| now.saturating_duration_since(at) < LOG_INTERVAL) {
            return None;
        }
        self.logged_at = Some(now);
        Some(std::mem::take(&mut self.count))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_failure_is_logged_and_then_one_a_minute_with_the_count() {
        let start = Instant::now();
        let mut log = FailureLog::default();
        assert_eq!(log.record(start), Some(1));
        for tenth in 1..600 {
            assert_eq!(log.record(start + Duration::from_millis(100 * tenth)), None);
        }
        assert_eq!(log.record(start + LOG_INTERVAL), Some(600));
        assert_eq!(log.record(start + LOG_INTERVAL), None);
        assert_eq!(log.record(start + 3 * LOG_INTERVAL), Some(2));
    }
}
