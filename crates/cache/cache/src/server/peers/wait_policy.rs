//! The policy by which requests that wait for a server of their partition end.

use std::time::{Duration, Instant};

/// The time for which requests of a connection fail fast after one has waited for the timeout.
pub const FAIL_FAST_TIME: Duration = Duration::from_secs(1);

/// The policy by which the requests of a connection wait for a server of their partition.
///
/// The first request waits for the timeout. After that, requests that would wait end at once for
/// [`FAIL_FAST_TIME`]: a pipeline for a lost partition does not wait once for each request.
#[derive(Clone, Copy, Debug)]
pub struct WaitPolicy {
    timeout: Duration,
    /// The time since which the next request waits, if it waits.
    began: Option<Instant>,
    /// The time until which requests that would wait end at once.
    fail_fast_until: Option<Instant>,
}

impl WaitPolicy {
    /// A policy by which a request waits for at most `timeout`.
    pub fn new(timeout: Duration) -> Self {
        Self { timeout, began: None, fail_fast_until: None }
    }

    /// Returns the time until which the next request may wait. The wait begins `now`, unless it has
    /// begun before.
    pub fn wait(&mut self, now: Instant) -> Instant {
        *self.began.get_or_insert(now) + self.timeout
    }

    /// Whether requests that would wait end at once.
    pub fn fails_fast(&self, now: Instant) -> bool {
        self.fail_fast_until.is_some_and(|until| now < until)
    }

    /// Whether the next request has waited for the timeout.
    pub fn has_waited(&self, now: Instant) -> bool {
        self.began.is_some_and(|began| now >= began + self.timeout)
    }

    /// Whether the next request, which would wait, ends.
    pub fn is_over(&self, now: Instant) -> bool {
        self.fails_fast(now) || self.has_waited(now)
    }

    /// Notes that the next request was served: the following one has not waited.
    #[inline]
    pub fn note_served(&mut self) {
        self.began = None;
    }

    /// Notes that the next request has ended without being served.
    pub fn note_ended(&mut self, now: Instant) {
        self.began = None;
        if !self.fails_fast(now) {
            self.fail_fast_until = Some(now + FAIL_FAST_TIME);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TIMEOUT: Duration = Duration::from_millis(100);
    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn a_request_waits_for_the_timeout() {
        let (start, mut policy) = (Instant::now(), WaitPolicy::new(TIMEOUT));
        assert!(!policy.is_over(start), "the request has not begun to wait");
        assert_eq!(policy.wait(start), start + TIMEOUT);
        assert_eq!(policy.wait(start + 50 * MS), start + TIMEOUT, "the wait has begun before");
        assert!(!policy.is_over(start + 99 * MS) && policy.is_over(start + TIMEOUT));
        policy.note_served();
        assert!(!policy.is_over(start + TIMEOUT), "the next request has not waited");
        assert_eq!(policy.wait(start + TIMEOUT), start + 2 * TIMEOUT);
    }

    #[test]
    fn requests_end_at_once_for_a_second_after_one_has_waited() {
        let (start, mut policy) = (Instant::now(), WaitPolicy::new(TIMEOUT));
        policy.wait(start);
        policy.note_ended(start + TIMEOUT);
        let end = start + TIMEOUT + FAIL_FAST_TIME;
        for now in [start + TIMEOUT, start + 2 * TIMEOUT, end - MS] {
            assert!(policy.fails_fast(now) && policy.is_over(now));
            // Requests that end at once, and requests that are served, do not change the end.
            policy.note_ended(now);
            policy.note_served();
        }
        assert!(!policy.fails_fast(end) && !policy.is_over(end));
        assert_eq!(policy.wait(end), end + TIMEOUT);
        assert!(policy.is_over(end + TIMEOUT));
    }
}
