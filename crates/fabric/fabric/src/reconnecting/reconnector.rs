//! Reconnects to a target that is away, on a thread of its own.

use std::fmt::Debug;
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, Timespec};

use crate::background::BackgroundTask;
use crate::work::{DrainHandle, Endpoint, EndpointError, WorkError};

/// Interval between attempts to reconnect.
const RETRY_INTERVAL: Duration = Duration::from_millis(10);

/// The outcome of one attempt to reconnect.
#[derive(Debug)]
pub enum ReconnectOutcome {
    /// An endpoint to the same memory.
    Connected(Box<dyn Endpoint>),
    /// The target is not back yet.
    Retry,
    /// The target will not return, or has returned without its memory.
    Gone,
    /// The target has fenced this host.
    Fenced,
}

impl ReconnectOutcome {
    /// The final result; `None` if another attempt follows.
    fn into_result(self) -> Option<Reconnected> {
        match self {
            Self::Connected(endpoint) => Some(Ok(endpoint)),
            Self::Retry => None,
            Self::Gone => Some(Err(WorkError::PeerGone)),
            Self::Fenced => Some(Err(WorkError::Fenced)),
        }
    }
}

/// Reconnects to a target that is away.
pub trait Reconnect: Send + Sync + Debug {
    /// Tries once to connect. Only its outcome ends the attempts: there is no timeout.
    fn attempt(&self) -> ReconnectOutcome;

    /// Whether an attempt may block. If so a background thread makes it, otherwise the polling
    /// thread.
    fn is_blocking(&self) -> bool {
        true
    }
}

/// The drain handle of a broken endpoint, shared by the parts that may have to drain it.
#[derive(Clone, Debug)]
pub(super) struct SharedDrain(Arc<Mutex<DrainState>>);

#[derive(Debug)]
struct DrainState {
    drain: Box<dyn DrainHandle>,
    is_drained: bool,
}

impl SharedDrain {
    pub fn new(drain: Box<dyn DrainHandle>) -> Self {
        Self(Arc::new(Mutex::new(DrainState { drain, is_drained: false })))
    }

    pub fn is_drained(&self) -> bool {
        // A thread that is draining holds the lock, and has not finished.
        self.0.try_lock().is_some_and(|left| left.is_drained)
    }
}

impl DrainHandle for SharedDrain {
    fn drain(&mut self) -> Result<(), EndpointError> {
        let mut left = self.0.lock();
        if !left.is_drained {
            left.drain.drain()?;
            left.is_drained = true;
        }
        Ok(())
    }
}

/// The attempts to reconnect to one target.
#[derive(Debug)]
pub(super) struct ReconnectAttempts {
    mode: ReconnectMode,
    drain: Option<SharedDrain>,
}

/// The result of reconnecting: an endpoint, or the error of all further work.
type Reconnected = Result<Box<dyn Endpoint>, WorkError>;

#[derive(Debug)]
enum ReconnectMode {
    Thread(BackgroundTask<Reconnected>),
    InPoll(Arc<dyn Reconnect>),
}

impl ReconnectAttempts {
    /// Starts reconnecting. Operations in flight are drained first.
    ///
    /// # Errors
    /// If the thread cannot be started.
    pub fn start(reconnect: &Arc<dyn Reconnect>, drain: Option<SharedDrain>) -> io::Result<Self> {
        let reconnect = Arc::clone(reconnect);
        if !reconnect.is_blocking() {
            return Ok(Self { mode: ReconnectMode::InPoll(reconnect), drain });
        }
        let mut left = drain.clone();
        let task = BackgroundTask::start("fabric-reconn", move |is_awaited| {
            attempt_until_known(&*reconnect, left.as_mut(), is_awaited)
        })?;
        Ok(Self { mode: ReconnectMode::Thread(task), drain })
    }

    /// The result, once; `None` while attempts continue.
    pub fn poll_result(&mut self) -> Option<Reconnected> {
        match &self.mode {
            ReconnectMode::Thread(task) => task.poll_result(),
            ReconnectMode::InPoll(reconnect) => {
                try_reconnect(&**reconnect, self.drain.as_mut()).into_result()
            }
        }
    }

    /// The drain handle of the broken endpoint, if it was not drained yet.
    pub fn drain_handle(&self) -> Option<SharedDrain> {
        self.drain.clone().filter(|drain| !drain.is_drained())
    }

    /// A descriptor that is readable when there is a result. `None` if the polling thread makes the
    /// attempts.
    pub fn ready_fd(&self) -> Option<BorrowedFd<'_>> {
        match &self.mode {
            ReconnectMode::Thread(task) => Some(task.ready_fd()),
            ReconnectMode::InPoll(_) => None,
        }
    }

    /// Waits for the result, for at most `timeout`.
    pub fn wait(&self, timeout: Duration) {
        if let Some(ready) = self.ready_fd() {
            let timeout = Timespec::try_from(timeout).unwrap_or(Timespec { tv_sec: 1, tv_nsec: 0 });
            // The caller polls after any outcome.
            let _ =
                rustix::event::poll(&mut [PollFd::from_borrowed_fd(ready, PollFlags::IN)], Some(&timeout));
        }
    }
}

fn try_reconnect(reconnect: &dyn Reconnect, drain: Option<&mut SharedDrain>) -> ReconnectOutcome {
    let is_drained = drain.is_none_or(|drain| drain.drain().is_ok());
    match reconnect.attempt() {
        // Repeated work must not be followed by operations that were sent before it.
        ReconnectOutcome::Connected(_) if !is_drained => ReconnectOutcome::Retry,
        // A target that answers no drain may be gone.
        outcome => outcome,
    }
}

/// Attempts to reconnect until the outcome is known, or is no longer awaited.
fn attempt_until_known(
    reconnect: &dyn Reconnect,
    mut drain: Option<&mut SharedDrain>,
    is_awaited: &dyn Fn() -> bool,
) -> Reconnected {
    while is_awaited() {
        match try_reconnect(reconnect, drain.as_deref_mut()).into_result() {
            Some(result) => return result,
            None => std::thread::sleep(RETRY_INTERVAL),
        }
    }
    Err(WorkError::PeerGone)
}
