//! Segments: memory at fixed addresses that moves to another process with the data structures in
//! it (RaMP).
//!
//! A process of a user has a name. Other processes of the user, on this host or on another one of
//! the cluster, hand segments over to that name. Pointers within a segment stay valid. The owner
//! works on plain memory; after a hand-over its agent pulls the pages on touch and ahead of it.
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
//! A forked child has no access to the segments of its parent. A process keeps no descriptor of a
//! segment. A process that maps a segment by other means could still write to it after a hand-over
//! to a process of the same host. This is not prevented, because processes of one user trust each
//! other.

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
use link::{AgentLink, AgentSocket};

use crate::error::NoAgent;

/// The error of a call on segments.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// No agent listens at the socket.
    #[error(transparent)]
    NoAgent(#[from] NoAgent),
    /// The process is a forked child of the process that opened the name.
    #[error("the segments belong to the process that this one was forked from: open another name")]
    Forked,
    /// The call failed for this reason.
    #[error("{0}")]
    Failed(String),
    /// The agent has ended, or is of another build.
    #[error("the agent does not answer: {0}")]
    Agent(#[from] ReceiveError),
    /// The agent has ended.
    #[error("the agent has ended: {0}")]
    Gone(io::Error),
    /// A system call on the connections to the agent failed.
    #[error("cannot set up the connections to the agent: {0}")]
    System(io::Error),
    /// The agent's answer does not fit the call.
    #[error("the agent's answer is not valid: the agent is of another build")]
    Answer,
    /// The segment cannot be mapped.
    #[error(transparent)]
    Arena(#[from] ArenaError),
    /// The segment cannot be copied to memory nodes, or not be restored.
    #[error(transparent)]
    Copies(#[from] CopyError),
    /// A host has the segment, or the grace time of its last host has not ended.
    #[error(
        "segment {0} cannot be restored: a host has it, or the grace time of its last host has not ended"
    )]
    Owned(u64),
    /// The restored bytes cannot be written to the memory of the segment.
    #[error("cannot write restored bytes to the memory of a segment: {0}")]
    Memory(io::Error),
}

/// Selects when the missing pages of a segment are pulled from other hosts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Pulling {
    /// On touch, and ahead of it.
    Ahead,
    /// On touch only: pages that are never touched stay at the other hosts.
    OnTouch,
    /// By [`Segment::pull`] only. A touch of a missing page raises SIGBUS.
    Explicit,
}

/// The registration of this process under a name, with which it owns and receives segments.
///
/// If the agent is restarted, calls wait for the next agent. If no agent answers within the grace
/// time, the segments are lost, and a touch of them raises SIGSEGV.
#[derive(Debug)]
pub struct Process {
    /// The id of the process that opened the name. A forked child has another id.
    owner: u32,
    arena: Arena,
    link: Arc<AgentLink>,
}

impl Process {
    /// Registers this process at the agent of this host, under a name that no other process of the
    /// user has. A process can have only one name.
    ///
    /// # Errors
    /// If no agent answers, the name is in use, or the addresses for segments are in use.
    pub fn open(name: &str) -> Result<Self, Error> {
        Self::open_at(&agent_socket(), name)
    }

    /// Registers this process like [`Self::open`], at the agent with the socket `agent`.
    ///
    /// # Errors
    /// The errors of [`Self::open`].
    pub fn open_at(agent: &Path, name: &str) -> Result<Self, Error> {
        let arena = Arena::reserve()?;
        report_touches();
        let link = AgentLink::open(agent, name)?;
        Ok(Self { owner: std::process::id(), arena, link })
    }

    /// Allocates a segment of `bytes` zero bytes, whole pages. No other segment of the user may
    /// have the number `id`.
    ///
    /// # Errors
    /// If the number is in use, the length is invalid, or the user has too many segments.
    pub fn allocate(&self, id: u64, bytes: u64) -> Result<Segment<'_>, Error> {
        self.check_owner()?;
        self.link.ask_then(
            AgentSocket::Calls,
            |_| Call::Allocate { id, bytes },
            |answer, fds, _| self.map(&answer, fds.into_iter().next()),
        )
    }

    /// Waits for a segment that is handed over to this process, or that an earlier process of this
    /// name has left. Returns `None` after `timeout`.
    ///
    /// # Errors
    /// If the agent has ended, or the segment cannot be mapped.
    pub fn receive(&self, pulling: Pulling, timeout: Duration) -> Result<Option<Segment<'_>>, Error> {
        Ok(self.wait_for_event(pulling, timeout, false)?.and_then(|event| match event {
            Event::Arrived(segment) => Some(segment),
            Event::Asked { .. } => None,
        }))
    }

    /// Waits for a segment, like [`Self::receive`], or for a request to hand one over
    /// (`aquifer segment move`). Returns `None` after `timeout`.
    ///
    /// # Errors
    /// The errors of [`Self::receive`].
    pub fn next_event(&self, pulling: Pulling, timeout: Duration) -> Result<Option<Event<'_>>, Error> {
        self.wait_for_event(pulling, timeout, true)
    }

    fn wait_for_event(
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
        self.link.ask_then(AgentSocket::Arrivals, call, |answer, fds, arrivals| {
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

    /// Lists the segments of the user that processes of this host own.
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

    /// Maps the segment of an [`Answer::Segment`].
    fn map(&self, answer: &Answer, file: Option<OwnedFd>) -> Result<Segment<'_>, Error> {
        let Answer::Segment { id, address, bytes, tenure, .. } = *answer else {
            return Err(error_of(answer.clone()));
        };
        let file = file.ok_or(Error::Answer)?;
        let as_size = |value: u64| usize::try_from(value).map_err(|_| Error::Answer);
        self.link.reserve(id, as_size(address)?, as_size(bytes)?, tenure)?;
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

    /// Returns an error in a forked child. Must be called before any lock is taken, because another
    /// thread may have held the lock at the time of the fork.
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

/// An event for a process.
#[derive(Debug)]
pub enum Event<'a> {
    /// A segment was handed over to the process.
    Arrived(Segment<'a>),
    /// A request to hand a segment over. The process calls [`Segment::connect`] and
    /// [`Segment::transfer`] when it can.
    Asked {
        /// The number of the segment.
        id: u64,
        /// The name of the process that is to receive it.
        process: String,
    },
}

/// A segment that this process owns.
///
/// Dropping it unmaps the segment. This process, or the next one of its name, can receive it again.
#[derive(Debug)]
pub struct Segment<'a> {
    process: &'a Process,
    /// The state of syncs; `None` before the first one. Must be dropped before the mapping.
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

/// The error of a hand-over.
#[derive(Debug)]
pub struct TransferFailure<'a> {
    /// The segment, if this process still owns it. If `None`, the agent finds out whether the
    /// segment has arrived; if it has not, this process receives it again.
    pub segment: Option<Segment<'a>>,
    /// The reason of the failure.
    pub error: Error,
}

impl<'a> Segment<'a> {
    /// The number of the segment.
    #[must_use]
    pub const fn id(&self) -> u64 {
        self.id
    }

    /// The memory of the segment as words. A touch of a missing page waits, or raises SIGBUS with
    /// [`Pulling::Explicit`].
    #[must_use]
    pub fn words(&self) -> &[AtomicU64] {
        self.mapping.words()
    }

    /// The first address of the segment, the same in every process that owns it.
    #[must_use]
    pub fn address(&self) -> usize {
        self.mapping.address()
    }

    /// The length of the segment in bytes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.mapping.words().len() * 8
    }

    /// Prepares a hand-over to another process of the user, so that [`Self::transfer`] is fast.
    ///
    /// # Errors
    /// If there is no such process, or it cannot be prepared.
    pub fn connect(&self, process: &str) -> Result<(), Error> {
        self.process.check_owner()?;
        if let Some(state) = &mut *self.sync.lock() {
            state.stop_tracking();
        }
        self.call(&Call::Connect { id: self.id, process: process.to_owned() })
    }

    /// Cancels [`Self::connect`].
    ///
    /// # Errors
    /// If the agent has ended.
    pub fn abort(&self) -> Result<(), Error> {
        self.call(&Call::Abort { id: self.id })
    }

    /// Hands the segment over to the process of [`Self::connect`]. From the call on, each touch by
    /// this process raises SIGSEGV.
    ///
    /// # Errors
    /// The reason of the failure, and the segment if this process still owns it.
    pub fn transfer(mut self) -> Result<(), TransferFailure<'a>> {
        // The kernel moves a mapping with tracked writes page by page, which is slow.
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

    /// Pulls the missing pages of a range of bytes.
    ///
    /// # Errors
    /// If the range is not inside the segment, or a page is lost.
    pub fn pull(&self, offset: u64, bytes: u64) -> Result<(), Error> {
        self.call(&Call::Pull { id: self.id, offset, bytes })
    }

    /// Pulls all missing pages, and waits for them. Afterwards the segment needs no other host, and
    /// a touch does not fault any more.
    ///
    /// # Errors
    /// If a page is lost.
    pub fn close(&self) -> Result<(), Error> {
        self.call(&Call::Close { id: self.id })
    }

    /// Discards all missing pages, so that the segment needs no other host. From now on a touch of
    /// such a page raises SIGBUS, at later owners as well.
    ///
    /// # Errors
    /// If the agent has ended.
    pub fn discard(&self) -> Result<(), Error> {
        self.call(&Call::Discard { id: self.id })
    }

    /// Frees the segment with its copies.
    ///
    /// # Errors
    /// If the agent or a node fails. The segment is unmapped in any case; the agent may still have
    /// it.
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
