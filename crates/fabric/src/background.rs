//! Something that takes its time, done by a thread of its own, for whoever must not wait.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Mutex, PoisonError};

use crate::wake::WakeFd;

/// What a thread of its own is at.
#[derive(Debug)]
pub struct BackgroundTask<T> {
    result: Arc<Mutex<Option<T>>>,
    /// Readable when there is an outcome.
    ready: Arc<WakeFd>,
}

impl<T: Send + 'static> BackgroundTask<T> {
    /// Begin. `work` is given a question: does anybody still wait for its outcome?
    ///
    /// # Errors
    /// If there is no thread.
    pub fn start(name: &str, work: impl FnOnce(&dyn Fn() -> bool) -> T + Send + 'static) -> io::Result<Self> {
        let result = Arc::new(Mutex::new(None));
        let ready = Arc::new(WakeFd::new()?);
        let task = Self { result: Arc::clone(&result), ready: Arc::clone(&ready) };
        std::thread::Builder::new().name(name.into()).spawn(move || {
            let outcome = work(&|| Arc::strong_count(&ready) > 1);
            *result.lock().unwrap_or_else(PoisonError::into_inner) = Some(outcome);
            ready.wake();
        })?;
        Ok(task)
    }

    /// A descriptor that is readable once there is an outcome.
    pub fn ready_fd(&self) -> BorrowedFd<'_> {
        (*self.ready).as_fd()
    }

    /// What came of it, once.
    pub fn take_result(&self) -> Option<T> {
        self.result.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}
