//! The way back to a target that is away, looked for by a thread of its own.

use std::fmt::Debug;
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};

use crate::background::BackgroundTask;
use crate::work::{DrainHandle, Endpoint, EndpointError};

/// Between attempts.
const RETRY_EVERY: Duration = Duration::from_millis(10);

/// What an attempt to get back to a target came to.
#[derive(Debug)]
pub enum ReconnectOutcome {
    /// An endpoint to the same memory.
    Connected(Box<dyn Endpoint>),
    /// It is not back.
    Retry,
    /// It will not come back, or without its memory.
    Gone,
}

/// How to get back to a target that is away.
pub trait Reconnect: Send + Sync + Debug {
    /// Try it, once.
    fn attempt(&self) -> ReconnectOutcome;

    /// After so long it is not tried any more.
    fn timeout(&self) -> Duration;

    /// Whether an attempt may take a while: then a thread of its own makes it, and otherwise whoever polls.
    fn is_blocking(&self) -> bool {
        true
    }
}

/// What an endpoint that broke may have left under way, for all who must see to its end.
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
        // Whoever is at it holds the lock for long, and has not ended it.
        self.0.try_lock().is_ok_and(|left| left.is_drained)
    }

    fn lock(&self) -> MutexGuard<'_, DrainState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl DrainHandle for SharedDrain {
    fn drain(&mut self) -> Result<(), EndpointError> {
        let mut left = self.lock();
        if !left.is_drained {
            left.drain.drain()?;
            left.is_drained = true;
        }
        Ok(())
    }
}

/// A target is looked for.
#[derive(Debug)]
pub(super) struct Reconnector {
    mode: SearchMode,
    drain: Option<SharedDrain>,
}

#[derive(Debug)]
enum SearchMode {
    Thread(BackgroundTask<Option<Box<dyn Endpoint>>>),
    InPoll(Arc<dyn Reconnect>),
}

impl Reconnector {
    /// Begin. What is `drain` is ended first.
    ///
    /// # Errors
    /// If there is no thread.
    pub fn start(reconnect: &Arc<dyn Reconnect>, drain: Option<SharedDrain>) -> io::Result<Self> {
        let reconnect = Arc::clone(reconnect);
        if !reconnect.is_blocking() {
            return Ok(Self { mode: SearchMode::InPoll(reconnect), drain });
        }
        let mut left = drain.clone();
        let task = BackgroundTask::start("fabric-reconn", move |is_awaited| {
            reconnect_until(&*reconnect, left.as_mut(), is_awaited)
        })?;
        Ok(Self { mode: SearchMode::Thread(task), drain })
    }

    /// What came of it: an endpoint, or nothing for good. `None`: it goes on.
    pub fn take_result(&mut self) -> Option<Option<Box<dyn Endpoint>>> {
        match &self.mode {
            SearchMode::Thread(task) => task.take_result(),
            SearchMode::InPoll(reconnect) => match try_reconnect(&**reconnect, self.drain.as_mut()) {
                ReconnectOutcome::Connected(endpoint) => Some(Some(endpoint)),
                ReconnectOutcome::Retry => None,
                ReconnectOutcome::Gone => Some(None),
            },
        }
    }

    /// What of the endpoint before may take effect yet.
    pub fn drain_handle(&self) -> Option<SharedDrain> {
        self.drain.clone().filter(|drain| !drain.is_drained())
    }

    /// Readable when there is an outcome.
    pub fn ready_fd(&self) -> Option<BorrowedFd<'_>> {
        match &self.mode {
            SearchMode::Thread(task) => Some(task.ready_fd()),
            SearchMode::InPoll(_) => None,
        }
    }

    /// Wait for the outcome, at most so long.
    pub fn wait(&self, timeout: Duration) {
        if let Some(ready) = self.ready_fd() {
            let timeout = Timespec::try_from(timeout).unwrap_or(Timespec { tv_sec: 1, tv_nsec: 0 });
            // Any outcome means: look.
            let _ =
                rustix::event::poll(&mut [PollFd::from_borrowed_fd(ready, PollFlags::IN)], Some(&timeout));
        }
    }
}

fn try_reconnect(reconnect: &dyn Reconnect, drain: Option<&mut SharedDrain>) -> ReconnectOutcome {
    // What is done once more must not be followed by what was sent before.
    if drain.is_some_and(|drain| drain.drain().is_err()) {
        ReconnectOutcome::Retry
    } else {
        reconnect.attempt()
    }
}

fn reconnect_until(
    reconnect: &dyn Reconnect,
    mut drain: Option<&mut SharedDrain>,
    is_awaited: &dyn Fn() -> bool,
) -> Option<Box<dyn Endpoint>> {
    let begun = Instant::now();
    while is_awaited() && begun.elapsed() < reconnect.timeout() {
        match try_reconnect(reconnect, drain.as_deref_mut()) {
            ReconnectOutcome::Connected(endpoint) => return Some(endpoint),
            ReconnectOutcome::Retry => std::thread::sleep(RETRY_EVERY),
            ReconnectOutcome::Gone => return None,
        }
    }
    None
}
