//! Segments: memory at fixed addresses that moves to another process with the data structures in
//! it (RAMP).
//!
//! A process of a user has a name, under which other processes of the user hand segments over to
//! it, on this host or on another one of the cluster. Pointers within a segment stay valid. The
//! owner works on plain memory; after a hand-over the pages follow on touch and ahead of it.
//!
//! ```no_run
//! # use aquifer_client::segments::{Process, Pulling};
//! # use std::time::Duration;
//! # fn main() -> Result<(), aquifer_client::segments::Error> {
//! let process = Process::open("counter")?;
//! let segment = process.allocate(7, 1 << 20)?;
//! segment.words()[5].store(42, std::sync::atomic::Ordering::Relaxed);
//! segment.connect("other")?;
//! segment.transfer().map_err(|failure| failure.error)?;
//! if let Some(segment) = process.receive(Pulling::Ahead, Duration::from_secs(10))? {
//!     println!("{:?} is back", segment.words()[5]);
//! }
//! # Ok(())
//! # }
//! ```
//!
//! A forked child has no access to the segments of its parent.
//! A process keeps no descriptor of a segment. One that maps it by other means could go on writing
//! to it after a hand-over to a process of the same host: processes of one user trust each other.

mod connections;
mod copies;
mod link;

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

pub use aquifer_arena::calls::SegmentStatus;
use aquifer_arena::calls::{Answer, Call, LISTED_MAX};
use aquifer_arena::{Arena, ArenaError, Mapping, Touch, report_touches};
use aquifer_channel::ReceiveError;
use aquifer_channel::paths::agent_socket;
pub use aquifer_copies::{CopyError, Synced};
use copies::SyncState;
pub use copies::free_copies;
use link::{Line, Link};

use crate::error::NoAgent;

/// Why a call failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// No agent listens.
    #[error(transparent)]
    NoAgent(#[from] NoAgent),
    /// The process is a forked child of the process that opened the name.
    #[error("the segments belong to the process that this one was forked from: open another name")]
    Forked,
    /// The agent cannot do it, for this reason.
    #[error("{0}")]
    Failed(String),
    /// The agent has ended, or is of another build.
    #[error("the agent does not answer: {0}")]
    Agent(#[from] ReceiveError),
    /// The agent has ended.
    #[error("the agent has ended: {0}")]
    Gone(io::Error),
    /// The system refused.
    #[error("cannot watch over the agent: {0}")]
    System(io::Error),
    /// The agent answered something else.
    #[error("the agent's answer is not valid: it is of another build")]
    Answer,
    /// The segment cannot be mapped.
    #[error(transparent)]
    Arena(#[from] ArenaError),
    /// It cannot be copied to memory nodes, or restored.
    #[error(transparent)]
    Copies(#[from] CopyError),
    /// A host has the segment, or had it a short time ago.
    #[error("segment {0} cannot be restored: a host has it, or it was not away for its grace time yet")]
    Owned(u64),
    /// There is no memory for what is restored.
    #[error("no memory for a segment: {0}")]
    Memory(io::Error),
}

/// How the pages of a segment come that are elsewhere.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Pulling {
    /// On touch, and ahead of it.
    Ahead,
    /// On touch only: what is never touched stays where it is.
    OnTouch,
    /// By [`Segment::pull`] only. A touch of a page that is not here is SIGBUS.
    Explicit,
}

/// This process, as others hand segments over to it.
///
/// If the agent ends, its next process takes over, and calls wait for it. If none comes in time,
/// the segments are lost, and touches of them are SIGSEGV.
#[derive(Debug)]
pub struct Process {
    /// The process that opened the name, and not one that was forked from it.
    owner: u32,
    arena: Arena,
    link: Arc<Link>,
}

impl Process {
    /// Opens this process under a name, which no other process of the user has, at the agent of
    /// this host. A process has one name.
    ///
    /// # Errors
    /// If no agent answers, the name is taken, or the addresses for segments are in use.
    pub fn open(name: &str) -> Result<Self, Error> {
        Self::open_at(&agent_socket(), name)
    }

    /// As [`Self::open`], at the agent with this socket.
    ///
    /// # Errors
    /// Those of [`Self::open`].
    pub fn open_at(agent: &Path, name: &str) -> Result<Self, Error> {
        let arena = Arena::reserve()?;
        report_touches();
        let link = Link::open(agent, name)?;
        Ok(Self { owner: std::process::id(), arena, link })
    }

    /// Allocates a segment of `bytes` bytes, whole pages, all zeros. Its number is new among the
    /// user's segments.
    ///
    /// # Errors
    /// If there is one of this number, the length is not possible, or the user has too much.
    pub fn allocate(&self, id: u64, bytes: u64) -> Result<Segment<'_>, Error> {
        self.check_owner()?;
        self.link.ask_and(
            Line::Calls,
            |_| Call::Allocate { id, bytes },
            |answer, fds, _| self.map(&answer, fds.into_iter().next()),
        )
    }

    /// Waits for a segment that is handed over to this process, or that an earlier process of this
    /// name has left. `None` if there is none in time.
    ///
    /// # Errors
    /// If the agent has ended, or the segment cannot be mapped.
    pub fn receive(&self, pulling: Pulling, timeout: Duration) -> Result<Option<Segment<'_>>, Error> {
        Ok(self.await_event(pulling, timeout, false)?.and_then(|event| match event {
            Event::Arrived(segment) => Some(segment),
            Event::Asked { .. } => None,
        }))
    }

    /// Waits for a segment, as [`Self::receive`] does, or for a request to hand one over
    /// (`aquifer segment move`). `None` if there is neither in time.
    ///
    /// # Errors
    /// Those of [`Self::receive`].
    pub fn next_event(&self, pulling: Pulling, timeout: Duration) -> Result<Option<Event<'_>>, Error> {
        self.await_event(pulling, timeout, true)
    }

    fn await_event(
        &self,
        pulling: Pulling,
        timeout: Duration,
        requests: bool,
    ) -> Result<Option<Event<'_>>, Error> {
        self.check_owner()?;
        let began = Instant::now();
        let call = |_| {
            let left = timeout.saturating_sub(began.elapsed());
            Call::Receive { timeout_ms: u64::try_from(left.as_millis()).unwrap_or(u64::MAX), requests }
        };
        self.link.ask_and(Line::Arrivals, call, |answer, fds, arrivals| {
            let (id, is_partial) = match answer {
                Answer::Segment { id, is_partial, .. } => (id, is_partial),
                Answer::Nothing => return Ok(None),
                Answer::Asked { id, process } => return Ok(Some(Event::Asked { id, process })),
                answer => return Err(error_of(answer)),
            };
            let mut fds = fds.into_iter();
            let segment = self.map(&answer, fds.next())?;
            if is_partial {
                let touch = if pulling == Pulling::Explicit { Touch::RaisesSigbus } else { Touch::Waits };
                let device = fds.next();
                let uffd = segment.mapping.arm(touch, device.as_ref().map(AsFd::as_fd))?;
                self.link.serve(id, uffd, pulling == Pulling::Ahead, arrivals)?;
            }
            Ok(Some(Event::Arrived(segment)))
        })
    }

    /// The segments of the user that processes of this host own.
    ///
    /// # Errors
    /// If the agent has ended.
    pub fn list(&self) -> Result<Vec<SegmentStatus>, Error> {
        let mut all: Vec<SegmentStatus> = Vec::new();
        loop {
            let above = all.last().map(|last| last.id);
            match self.ask(&Call::List { above })? {
                Answer::List(more) => {
                    let is_last = more.len() < LISTED_MAX;
                    all.extend(more);
                    if is_last {
                        return Ok(all);
                    }
                }
                answer => return Err(error_of(answer)),
            }
        }
    }

    fn map(&self, answer: &Answer, file: Option<OwnedFd>) -> Result<Segment<'_>, Error> {
        let Answer::Segment { id, address, bytes, tenure, .. } = *answer else {
            return Err(error_of(answer.clone()));
        };
        let file = file.ok_or(Error::Answer)?;
        let as_size = |value: u64| usize::try_from(value).map_err(|_| Error::Answer);
        self.link.hold(id, as_size(address)?, as_size(bytes)?, tenure)?;
        let mapping = Mapping::new(&self.arena, as_size(address)?, as_size(bytes)?, &file)
            .map_err(Error::from)
            .and_then(|mapping| self.link.confirm(id).map(|()| mapping));
        let mapping = mapping.inspect_err(|_| self.link.release(id))?;
        Ok(Segment { process: self, sync: Mutex::default(), mapping, id })
    }

    fn ask(&self, call: &Call) -> Result<Answer, Error> {
        self.check_owner()?;
        Ok(self.link.ask(|_| call.clone())?.0)
    }

    /// To be called before a lock: another thread may have held it when a child was forked.
    fn check_owner(&self) -> Result<(), Error> {
        if self.owner == std::process::id() { Ok(()) } else { Err(Error::Forked) }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if self.owner == std::process::id() {
            self.link.close();
        }
    }
}

/// What happens to a process.
#[derive(Debug)]
pub enum Event<'a> {
    /// A segment was handed over to it.
    Arrived(Segment<'a>),
    /// It is wanted to hand a segment over: to connect and to transfer when it can.
    Asked {
        /// The number of the segment.
        id: u64,
        /// The process that is to have it.
        process: String,
    },
}

/// A segment that this process owns.
///
/// Dropping it unmaps it; this process, or the next one of its name, gets it again when it opens.
#[derive(Debug)]
pub struct Segment<'a> {
    process: &'a Process,
    /// After the first sync. It ends before the mapping.
    sync: Mutex<Option<Box<SyncState>>>,
    mapping: Mapping<'a>,
    id: u64,
}

impl Drop for Segment<'_> {
    fn drop(&mut self) {
        if self.process.check_owner().is_ok() {
            self.process.link.release(self.id);
        }
    }
}

/// A hand-over that did not take place.
#[derive(Debug)]
pub struct TransferFailure<'a> {
    /// The segment, if this process still owns it. Otherwise the agent finds out whether it has
    /// arrived; if it has not, this process receives it again.
    pub segment: Option<Segment<'a>>,
    /// Why.
    pub error: Error,
}

impl<'a> Segment<'a> {
    /// Its number.
    #[must_use]
    pub const fn id(&self) -> u64 {
        self.id
    }

    /// Its bytes as words. A touch of a page that is elsewhere waits, or is SIGBUS with
    /// [`Pulling::Explicit`].
    #[must_use]
    pub fn words(&self) -> &[AtomicU64] {
        self.mapping.words()
    }

    /// Its first address, the same in every process that owns it.
    #[must_use]
    pub fn address(&self) -> usize {
        self.mapping.address()
    }

    /// Its length in bytes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.mapping.words().len() * 8
    }

    /// Prepares a hand-over to another process of the user: all that is slow.
    ///
    /// # Errors
    /// If there is no such process, or it is not prepared.
    pub fn connect(&self, process: &str) -> Result<(), Error> {
        if let Some(state) = &mut *self.sync.lock() {
            state.end_watch();
        }
        self.call(&Call::Connect { id: self.id, process: process.to_owned() })
    }

    /// Takes [`Self::connect`] back.
    ///
    /// # Errors
    /// If the agent has ended.
    pub fn abort(&self) -> Result<(), Error> {
        self.call(&Call::Abort { id: self.id })
    }

    /// Hands the segment over to the process to which it is connected. From the call on, each touch
    /// by this process is SIGSEGV.
    ///
    /// # Errors
    /// The segment if it is still this process's, and why.
    pub fn transfer(mut self) -> Result<(), TransferFailure<'a>> {
        // A mapping that is watched over moves page by page.
        self.sync.get_mut().take();
        if let Err(error) = self.mapping.withdraw() {
            return Err(TransferFailure { segment: Some(self), error: error.into() });
        }
        let (id, link) = (self.id, &self.process.link);
        let asked = self.process.check_owner().and_then(|()| {
            let tenure = link.tenure(id);
            Ok(link.ask(|is_repeated| Call::Transfer { id, tenure, is_repeated })?.0)
        });
        let error = match asked {
            Ok(Answer::Done) => return Ok(()),
            Ok(Answer::Kept(reason)) => match self.mapping.restore() {
                Ok(()) => return Err(TransferFailure { segment: Some(self), error: Error::Failed(reason) }),
                Err(error) => error.into(),
            },
            Ok(answer) => error_of(answer),
            Err(error) => error,
        };
        Err(TransferFailure { segment: None, error })
    }

    /// Pulls the pages with these bytes, if they are elsewhere.
    ///
    /// # Errors
    /// If the range is not inside the segment, or a page is lost.
    pub fn pull(&self, offset: u64, bytes: u64) -> Result<(), Error> {
        self.call(&Call::Pull { id: self.id, offset, bytes })
    }

    /// Waits until all pages are here. Then no other host has a part in the segment, and each touch
    /// is one of plain memory.
    ///
    /// # Errors
    /// If a page is lost.
    pub fn close(&self) -> Result<(), Error> {
        self.call(&Call::Close { id: self.id })
    }

    /// Gives up what is elsewhere: from now on, touches of pages that are not here are SIGBUS, at
    /// any later owner as well. Then no other host has a part in the segment.
    ///
    /// # Errors
    /// If the agent has ended.
    pub fn discard(&self) -> Result<(), Error> {
        self.call(&Call::Discard { id: self.id })
    }

    /// Frees the segment, with its copies.
    ///
    /// # Errors
    /// The segment is unmapped in any case; the agent may still have it.
    pub fn deallocate(self) -> Result<(), Error> {
        let (process, id) = (self.process, self.id);
        drop(self);
        process.discard_copies(id)?;
        done(process.link.ask(|is_repeated| Call::Deallocate { id, is_repeated })?)
    }

    fn call(&self, call: &Call) -> Result<(), Error> {
        done((self.process.ask(call)?, Vec::new()))
    }
}

fn done((answer, _): (Answer, Vec<OwnedFd>)) -> Result<(), Error> {
    match answer {
        Answer::Done => Ok(()),
        answer => Err(error_of(answer)),
    }
}

fn error_of(answer: Answer) -> Error {
    match answer {
        Answer::Failed(reason) | Answer::Kept(reason) => Error::Failed(reason),
        _ => Error::Answer,
    }
}
