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
pub(super) struct SharedDrain(Arc<Mutex<Left>>);

#[derive(Debug)]
struct Left {
    late: Box<dyn DrainHandle>,
    is_ended: bool,
}

impl SharedDrain {
    pub fn new(late: Box<dyn DrainHandle>) -> Self {
        Self(Arc::new(Mutex::new(Left { late, is_ended: false })))
    }

    pub fn is_ended(&self) -> bool {
        // Whoever is at it holds the lock for long, and has not ended it.
        self.0.try_lock().is_ok_and(|left| left.is_ended)
    }

    fn lock(&self) -> MutexGuard<'_, Left> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl DrainHandle for SharedDrain {
    fn drain(&mut self) -> Result<(), EndpointError> {
        let mut left = self.lock();
        if !left.is_ended {
            left.late.drain()?;
            left.is_ended = true;
        }
        Ok(())
    }
}

/// A target is looked for.
#[derive(Debug)]
pub(super) struct Reconnector {
    by: By,
    late: Option<SharedDrain>,
}

#[derive(Debug)]
enum By {
    Thread(BackgroundTask<Option<Box<dyn Endpoint>>>),
    WhoeverPolls(Arc<dyn Reconnect>),
}

impl Reconnector {
    /// Begin. What is `late` is ended first.
    ///
    /// # Errors
    /// If there is no thread.
    pub fn start(reconnect: &Arc<dyn Reconnect>, late: Option<SharedDrain>) -> io::Result<Self> {
        let reconnect = Arc::clone(reconnect);
        if !reconnect.is_blocking() {
            return Ok(Self { by: By::WhoeverPolls(reconnect), late });
        }
        let mut left = late.clone();
        let rescue = BackgroundTask::start("fabric-reconnecting", move |is_awaited| {
            seek(&*reconnect, left.as_mut(), is_awaited)
        })?;
        Ok(Self { by: By::Thread(rescue), late })
    }

    /// What came of it: an endpoint, or nothing for good. `None`: it goes on.
    pub fn outcome(&mut self) -> Option<Option<Box<dyn Endpoint>>> {
        match &self.by {
            By::Thread(rescue) => rescue.outcome(),
            By::WhoeverPolls(reconnect) => match attempt(&**reconnect, self.late.as_mut()) {
                ReconnectOutcome::Connected(endpoint) => Some(Some(endpoint)),
                ReconnectOutcome::Retry => None,
                ReconnectOutcome::Gone => Some(None),
            },
        }
    }

    /// What of the endpoint before may take effect yet.
    pub fn drain_handle(&self) -> Option<SharedDrain> {
        self.late.clone().filter(|late| !late.is_ended())
    }

    /// Readable when there is an outcome.
    pub fn bell(&self) -> Option<BorrowedFd<'_>> {
        match &self.by {
            By::Thread(rescue) => Some(rescue.bell()),
            By::WhoeverPolls(_) => None,
        }
    }

    /// Wait for the outcome, at most so long.
    pub fn wait(&self, patience: Duration) {
        if let Some(bell) = self.bell() {
            let timeout = Timespec::try_from(patience).unwrap_or(Timespec { tv_sec: 1, tv_nsec: 0 });
            // Any outcome means: look.
            let _ = rustix::event::poll(&mut [PollFd::from_borrowed_fd(bell, PollFlags::IN)], Some(&timeout));
        }
    }
}

fn attempt(reconnect: &dyn Reconnect, late: Option<&mut SharedDrain>) -> ReconnectOutcome {
    // What is done once more must not be followed by what was sent before.
    if late.is_some_and(|late| late.drain().is_err()) { ReconnectOutcome::Retry } else { reconnect.attempt() }
}

fn seek(
    reconnect: &dyn Reconnect,
    mut late: Option<&mut SharedDrain>,
    is_awaited: &dyn Fn() -> bool,
) -> Option<Box<dyn Endpoint>> {
    let begun = Instant::now();
    while is_awaited() && begun.elapsed() < reconnect.timeout() {
        match attempt(reconnect, late.as_deref_mut()) {
            ReconnectOutcome::Connected(endpoint) => return Some(endpoint),
            ReconnectOutcome::Retry => std::thread::sleep(RETRY_EVERY),
            ReconnectOutcome::Gone => return None,
        }
    }
    None
}
