//! Waiting for a condition, with a deadline.

use std::time::{Duration, Instant};

/// Between two looks.
const PAUSE: Duration = Duration::from_millis(5);
/// Long enough for the slowest machine; a condition that holds is noticed at once.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// Look until there is something; fails with `what` was waited for if there is nothing within [`PATIENCE`].
///
/// # Panics
/// At the deadline.
pub fn eventually<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(Instant::now() < deadline, "waited {PATIENCE:?} in vain for: {what}");
        std::thread::sleep(PAUSE);
    }
}
