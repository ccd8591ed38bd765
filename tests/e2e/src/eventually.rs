//! Waiting for a condition, with a deadline.

use std::time::{Duration, Instant};

/// Between two looks.
const PAUSE: Duration = Duration::from_millis(5);
/// Long enough for the slowest machine; a condition that holds is noticed at once.
pub const PATIENCE: Duration = Duration::from_secs(120);

/// Look until there is something; fails with `what` was waited for if there is nothing within
/// [`PATIENCE`].
///
/// # Panics
/// At the deadline.
pub fn eventually<T>(what: &str, look: impl FnMut() -> Option<T>) -> T {
    eventually_within(PATIENCE, look).unwrap_or_else(|| panic!("waited {PATIENCE:?} in vain for: {what}"))
}

/// Look until there is something; `None` if there is nothing within `patience`.
pub fn eventually_within<T>(patience: Duration, mut look: impl FnMut() -> Option<T>) -> Option<T> {
    let deadline = Instant::now() + patience;
    loop {
        let found = look();
        if found.is_some() || Instant::now() >= deadline {
            return found;
        }
        std::thread::sleep(PAUSE);
    }
}
