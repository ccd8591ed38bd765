//! Retries of operations while the directory is unavailable.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use crate::{Directory, DirectoryError};

/// Interval between attempts.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);

/// Whether a daemon that starts repeats an operation for which the directory was unavailable.
///
/// The first daemon of its kind reports the failure to the terminal at once. A daemon that takes
/// over from a previous one retries, because the users of the previous daemon wait until their
/// grace time has passed.
#[derive(Clone, Debug)]
pub struct DirectoryRetries {
    deadline: Option<Instant>,
    stop: Arc<AtomicBool>,
}

impl DirectoryRetries {
    /// Creates the policy of no retries.
    #[must_use]
    pub fn none() -> Self {
        Self { deadline: None, stop: Arc::default() }
    }

    /// Creates the policy of retries for `grace` from now on, until `stop` is set.
    #[must_use]
    pub fn during(grace: Duration, stop: &Arc<AtomicBool>) -> Self {
        Self::until(Instant::now() + grace, stop)
    }

    /// Creates the policy of retries before `deadline`, until `stop` is set.
    #[must_use]
    pub fn until(deadline: Instant, stop: &Arc<AtomicBool>) -> Self {
        Self { deadline: Some(deadline), stop: Arc::clone(stop) }
    }

    /// Whether an operation that has failed with `error` is to be repeated.
    #[must_use]
    pub fn repeats(&self, error: &DirectoryError, now: Instant) -> bool {
        let is_in_time = self.deadline.is_some_and(|deadline| now < deadline);
        matches!(error, DirectoryError::Unavailable { .. }) && is_in_time && !self.stop.load(Relaxed)
    }

    /// Whether to repeat an operation that has failed with `error`. If so, waits for the retry
    /// interval before the return.
    #[must_use]
    pub fn wait_to_repeat(&self, error: &DirectoryError) -> bool {
        if !self.repeats(error, Instant::now()) {
            return false;
        }
        tracing::warn!(%error, "cannot take over from the previous daemon yet; retrying every second");
        std::thread::sleep(RETRY_INTERVAL);
        true
    }

    /// Calls `operation` until it succeeds or is not to be repeated. A failed operation may have
    /// made its change, so the operation must be idempotent.
    ///
    /// # Errors
    /// The last error of `operation`.
    pub fn repeat<T>(
        &self,
        mut operation: impl FnMut() -> Result<T, DirectoryError>,
    ) -> Result<T, DirectoryError> {
        loop {
            match operation() {
                Err(error) if self.wait_to_repeat(&error) => {}
                outcome => return outcome,
            }
        }
    }
}

/// A function that connects to the directory. Called again when the connection is lost.
pub type ConnectDirectory = Box<dyn Fn() -> Result<Arc<dyn Directory>, DirectoryError> + Send>;

#[cfg(test)]
mod tests {
    use super::*;

    fn unavailable() -> DirectoryError {
        DirectoryError::Unavailable { address: "a".into(), cause: "b".into() }
    }

    #[test]
    fn an_operation_is_repeated_while_the_directory_is_unavailable() {
        let mut times = 0;
        let retries = DirectoryRetries::during(Duration::MAX / 4, &Arc::default());
        let outcome = retries.repeat(|| {
            times += 1;
            if times == 1 { Err(unavailable()) } else { Ok(times) }
        });
        assert_eq!(outcome.ok(), Some(2));
    }

    #[test]
    fn other_errors_and_the_first_daemon_are_not_repeated() {
        let stop = Arc::new(AtomicBool::new(false));
        let retries = DirectoryRetries::during(Duration::from_secs(3600), &stop);
        assert!(!retries.wait_to_repeat(&DirectoryError::LeaseGone(crate::LeaseId(1))));
        assert!(!DirectoryRetries::none().wait_to_repeat(&unavailable()));
        assert!(!DirectoryRetries::during(Duration::ZERO, &stop).wait_to_repeat(&unavailable()));
        stop.store(true, Relaxed);
        assert!(!retries.wait_to_repeat(&unavailable()), "the daemon stops");
    }
}
