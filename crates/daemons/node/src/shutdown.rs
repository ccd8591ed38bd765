//! Requests to stop a daemon or a thread.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

/// A request to stop. Clones are handles of the same request.
#[derive(Clone, Debug, Default)]
pub struct Shutdown {
    /// The number of requests.
    shared: Arc<(Mutex<u32>, Condvar)>,
    when_unused: Arc<AtomicBool>,
}

impl Shutdown {
    /// Creates a handle of a request that is not made yet.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Makes the request.
    pub fn request(&self) {
        *self.shared.0.lock() += 1;
        self.shared.1.notify_all();
    }

    /// Requests that a node ends when no host uses its memory.
    pub fn request_when_unused(&self) {
        self.when_unused.store(true, Relaxed);
    }

    /// True if [`Self::request_when_unused`] was called.
    #[must_use]
    pub fn is_requested_when_unused(&self) -> bool {
        self.when_unused.load(Relaxed)
    }

    /// True if the request was made.
    #[must_use]
    pub fn is_requested(&self) -> bool {
        *self.shared.0.lock() > 0
    }

    /// True if the request was made more than once: there is no time to wait.
    #[must_use]
    pub fn is_repeated(&self) -> bool {
        *self.shared.0.lock() > 1
    }

    /// Waits until the request is made, for at most `timeout`. Returns true if it was made.
    #[must_use]
    pub fn wait(&self, timeout: Duration) -> bool {
        let mut requested = self.shared.0.lock();
        let _late = self.shared.1.wait_while_for(&mut requested, |requested| *requested == 0, timeout);
        *requested > 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_is_seen_by_all_handles() {
        let shutdown = Shutdown::new();
        assert!(!shutdown.is_requested());
        assert!(!shutdown.wait(Duration::ZERO));
        let waiter = shutdown.clone();
        let thread = std::thread::spawn(move || waiter.wait(Duration::MAX));
        shutdown.request();
        assert!(thread.join().expect("no panic"));
        assert!(shutdown.is_requested() && !shutdown.is_repeated());
        shutdown.request();
        assert!(shutdown.is_repeated());
    }
}
