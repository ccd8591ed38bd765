//! Something that takes its time, done by a thread of its own, for whoever must not wait.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Mutex, PoisonError};

use crate::wake::WakeFd;

/// What a thread of its own is at.
#[derive(Debug)]
pub struct BackgroundTask<T> {
    found: Arc<Mutex<Option<T>>>,
    /// Readable when there is an outcome.
    bell: Arc<WakeFd>,
}

impl<T: Send + 'static> BackgroundTask<T> {
    /// Begin. `work` is given a question: does anybody still wait for its outcome?
    ///
    /// # Errors
    /// If there is no thread.
    pub fn start(name: &str, work: impl FnOnce(&dyn Fn() -> bool) -> T + Send + 'static) -> io::Result<Self> {
        let found = Arc::new(Mutex::new(None));
        let bell = Arc::new(WakeFd::new()?);
        let rescue = Self { found: Arc::clone(&found), bell: Arc::clone(&bell) };
        std::thread::Builder::new().name(name.into()).spawn(move || {
            let outcome = work(&|| Arc::strong_count(&bell) > 1);
            *found.lock().unwrap_or_else(PoisonError::into_inner) = Some(outcome);
            bell.wake();
        })?;
        Ok(rescue)
    }

    /// A descriptor that is readable once there is an outcome.
    pub fn bell(&self) -> BorrowedFd<'_> {
        (*self.bell).as_fd()
    }

    /// What came of it, once.
    pub fn outcome(&self) -> Option<T> {
        self.found.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}
