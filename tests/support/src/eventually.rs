//! Waiting for a condition, with a deadline.

use std::time::{Duration, Instant};

/// Pause between two checks of a condition.
const PAUSE: Duration = Duration::from_millis(5);
/// Time after which a condition that does not hold fails the test.
pub const TIMEOUT: Duration = Duration::from_secs(120);

/// Calls `check` until it returns a value.
///
/// # Panics
/// After [`TIMEOUT`], with `what` the test waited for.
pub fn eventually<T>(what: &str, check: impl FnMut() -> Option<T>) -> T {
    eventually_within(TIMEOUT, check).unwrap_or_else(|| panic!("did not happen within {TIMEOUT:?}: {what}"))
}

/// Calls `check` until it returns a value; returns `None` after the timeout.
pub fn eventually_within<T>(timeout: Duration, mut check: impl FnMut() -> Option<T>) -> Option<T> {
    let deadline = Instant::now() + timeout;
    loop {
        let found = check();
        if found.is_some() || Instant::now() >= deadline {
            return found;
        }
        std::thread::sleep(PAUSE);
    }
}
