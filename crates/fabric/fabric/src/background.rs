//! Work that a background thread does for a thread that must not block.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use parking_lot::Mutex;

use crate::wake::WakeFd;

/// A task on a thread of its own, which produces one result.
#[derive(Debug)]
pub struct BackgroundTask<T> {
    result: Arc<Mutex<Option<T>>>,
    /// Readable once there is a result.
    ready: Arc<WakeFd>,
}

impl<T: Send + 'static> BackgroundTask<T> {
    /// Starts the task. `work` gets a function that returns whether the result is still awaited.
    ///
    /// # Errors
    /// If the thread cannot be started.
    pub fn start(name: &str, work: impl FnOnce(&dyn Fn() -> bool) -> T + Send + 'static) -> io::Result<Self> {
        let result = Arc::new(Mutex::new(None));
        let ready = Arc::new(WakeFd::new()?);
        let task = Self { result: Arc::clone(&result), ready: Arc::clone(&ready) };
        std::thread::Builder::new().name(name.into()).spawn(move || {
            let outcome = work(&|| Arc::strong_count(&ready) > 1);
            *result.lock() = Some(outcome);
            ready.wake();
        })?;
        Ok(task)
    }

    /// A descriptor that is readable once there is a result.
    pub fn ready_fd(&self) -> BorrowedFd<'_> {
        (*self.ready).as_fd()
    }

    /// Takes the result, once.
    pub fn poll_result(&self) -> Option<T> {
        self.result.lock().take()
    }
}
