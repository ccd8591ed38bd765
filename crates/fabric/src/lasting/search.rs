//! The way back to a target that is away, looked for by a thread of its own.

use std::fmt::Debug;
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};

use crate::rescue::Rescue;
use crate::work::{Endpoint, EndpointError, Late};

/// Between attempts.
const RETRY_EVERY: Duration = Duration::from_millis(10);

/// What an attempt to get back to a target came to.
#[derive(Debug)]
pub enum Attempt {
    /// An endpoint to the same memory.
    Here(Box<dyn Endpoint>),
    /// It is not back.
    NotYet,
    /// It will not come back, or without its memory.
    Never,
}

/// How to get back to a target that is away.
pub trait Again: Send + Sync + Debug {
    /// Try it, once.
    fn attempt(&self) -> Attempt;

    /// After so long it is not tried any more.
    fn patience(&self) -> Duration;

    /// Whether an attempt may take a while: then a thread of its own makes it, and otherwise whoever polls.
    fn takes_time(&self) -> bool {
        true
    }
}

/// What an endpoint that broke may have left under way, for all who must see to its end.
#[derive(Clone, Debug)]
pub(super) struct SharedLate(Arc<Mutex<Left>>);

#[derive(Debug)]
struct Left {
    late: Box<dyn Late>,
    is_ended: bool,
}

impl SharedLate {
    pub fn new(late: Box<dyn Late>) -> Self {
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

impl Late for SharedLate {
    fn end(&mut self) -> Result<(), EndpointError> {
        let mut left = self.lock();
        if !left.is_ended {
            left.late.end()?;
            left.is_ended = true;
        }
        Ok(())
    }
}

/// A target is looked for.
#[derive(Debug)]
pub(super) struct Search {
    by: By,
    late: Option<SharedLate>,
}

#[derive(Debug)]
enum By {
    Thread(Rescue<Option<Box<dyn Endpoint>>>),
    WhoeverPolls(Arc<dyn Again>),
}

impl Search {
    /// Begin. What is `late` is ended first.
    ///
    /// # Errors
    /// If there is no thread.
    pub fn start(again: &Arc<dyn Again>, late: Option<SharedLate>) -> io::Result<Self> {
        let again = Arc::clone(again);
        if !again.takes_time() {
            return Ok(Self { by: By::WhoeverPolls(again), late });
        }
        let mut left = late.clone();
        let rescue =
            Rescue::start("fabric-lasting", move |is_awaited| seek(&*again, left.as_mut(), is_awaited))?;
        Ok(Self { by: By::Thread(rescue), late })
    }

    /// What came of it: an endpoint, or nothing for good. `None`: it goes on.
    pub fn outcome(&mut self) -> Option<Option<Box<dyn Endpoint>>> {
        match &self.by {
            By::Thread(rescue) => rescue.outcome(),
            By::WhoeverPolls(again) => match attempt(&**again, self.late.as_mut()) {
                Attempt::Here(endpoint) => Some(Some(endpoint)),
                Attempt::NotYet => None,
                Attempt::Never => Some(None),
            },
        }
    }

    /// What of the endpoint before may take effect yet.
    pub fn late(&self) -> Option<SharedLate> {
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

fn attempt(again: &dyn Again, late: Option<&mut SharedLate>) -> Attempt {
    // What is done once more must not be followed by what was sent before.
    if late.is_some_and(|late| late.end().is_err()) { Attempt::NotYet } else { again.attempt() }
}

fn seek(
    again: &dyn Again,
    mut late: Option<&mut SharedLate>,
    is_awaited: &dyn Fn() -> bool,
) -> Option<Box<dyn Endpoint>> {
    let begun = Instant::now();
    while is_awaited() && begun.elapsed() < again.patience() {
        match attempt(again, late.as_deref_mut()) {
            Attempt::Here(endpoint) => return Some(endpoint),
            Attempt::NotYet => std::thread::sleep(RETRY_EVERY),
            Attempt::Never => return None,
        }
    }
    None
}
