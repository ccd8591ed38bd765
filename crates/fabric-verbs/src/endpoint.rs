//! The initiator's end: work goes to the device in order, as soon as the keys that it names are known.

mod pump;
mod recovery;

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, epoll};

use self::recovery::Attempt;
use super::keys::Keys;
use super::letters::{Answer, Request};
use super::link::{Link, knock};
use super::locals::Locals;
use super::queue::Queue;
use super::slots::{CAME, Slots, WENT};
use super::sys::completions::{Ended, Outcome};
use super::sys::pair::Order;
use aquifer_fabric::ClusterKey;
use aquifer_fabric::Memory;
use aquifer_fabric::background::BackgroundTask;
use aquifer_fabric::handshake::HANDSHAKE_TIME;
use aquifer_fabric::handshake::hello::{Hello, SessionId};
use aquifer_fabric::memory::u64_from;
use aquifer_fabric::target::{Identity, Region};
use aquifer_fabric::wake::WakeFd;
use aquifer_fabric::work::{
    Completion, Endpoint, EndpointError, Limits, LocalKey, PostError, Verb, Work, WorkError,
};

/// Completions taken from the device at a time.
const POLL_MAX: usize = 64;
/// Empty looks at the device between two looks whether the other end is still there.
const LOOKS: u32 = 256;
/// The same where somebody waits for the bell, which librdmacm rings, too: it should not ring in vain for long.
const LOOKS_WATCHED: u32 = 8;

/// What became of an endpoint.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Life {
    Open,
    /// The first operation without an outcome is told the cause, if nobody was; the others that they were not done.
    Over(Option<WorkError>),
}

/// One connection to a [`super::VerbsTarget`].
#[derive(Debug)]
pub struct VerbsEndpoint {
    address: SocketAddr,
    cluster_key: ClusterKey,
    who: Identity,
    session: SessionId,
    limits: Limits,
    regions: Vec<Region>,
    life: Life,
    /// None while another connection is being made, and after the end.
    link: Option<Link>,
    rescue: Option<BackgroundTask<Attempt>>,
    keys: Keys,
    queue: Queue,
    locals: Locals,
    /// Where atomics put what they found, by the work's number.
    results: Slots,
    /// Letters that found no place yet.
    unsaid: VecDeque<Vec<u8>>,
    messages: VecDeque<Vec<u8>>,
    heard: u64,
    taken: u64,
    // Reused from call to call.
    orders: Vec<Order>,
    ended: Vec<Ended>,
    letter: Vec<u8>,
    looks: u32,
    /// The work that the device was refused for last, and how many times.
    refused: (u64, u32),
    /// Tells of the device, of librdmacm, of rescues, and of `kick`.
    bell: OwnedFd,
    kick: WakeFd,
    /// Somebody waits for the bell.
    is_watched: AtomicBool,
    /// `kick` is to be read.
    is_kicked: AtomicBool,
    is_armed: bool,
}

/// Connect to the target that listens at `address`, that of an RDMA device.
///
/// # Errors
/// If nobody listens there, the target refuses, or it does not have the cluster's key; or if this machine has no device for it.
pub fn connect(
    address: SocketAddr,
    key: &ClusterKey,
    who: Identity,
) -> Result<Box<dyn Endpoint>, EndpointError> {
    Ok(Box::new(VerbsEndpoint::connect(address, key, who)?))
}

impl VerbsEndpoint {
    /// As [`connect`], for callers that want static dispatch.
    ///
    /// # Errors
    /// As [`connect`].
    pub fn connect(address: SocketAddr, key: &ClusterKey, who: Identity) -> Result<Self, EndpointError> {
        let unreachable = |source| EndpointError::Unreachable { address: address.to_string(), source };
        let hello = Hello { who, encrypt: false, resume: None };
        let (link, welcome) = knock(address, key, &hello, HANDSHAKE_TIME)?;
        let limits = welcome.limits;
        let results = u32::try_from(limits.queue_depth).unwrap_or(u32::MAX);
        let results = Slots::new(link.device, "aquifer-verbs-results", results, 8).map_err(unreachable)?;
        let bell = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(|error| unreachable(error.into()))?;
        let endpoint = Self {
            address,
            cluster_key: key.clone(),
            who,
            session: welcome.session,
            limits,
            regions: welcome.regions,
            life: Life::Open,
            keys: Keys::new(super::WINDOWS_EACH),
            queue: Queue::default(),
            locals: Locals::new(link.device, limits),
            link: None,
            rescue: None,
            results,
            unsaid: VecDeque::new(),
            messages: VecDeque::new(),
            heard: 0,
            taken: 0,
            orders: Vec::with_capacity(limits.queue_depth),
            ended: Vec::with_capacity(POLL_MAX),
            letter: Vec::new(),
            looks: 0,
            refused: (0, 0),
            bell,
            kick: WakeFd::new().map_err(unreachable)?,
            is_watched: AtomicBool::new(false),
            is_kicked: AtomicBool::new(false),
            is_armed: false,
        };
        endpoint.watch(endpoint.kick.as_fd()).map_err(unreachable)?;
        endpoint.watch(link.completions().fd()).map_err(unreachable)?;
        endpoint.watch(link.events_fd()).map_err(unreachable)?;
        Ok(Self { link: Some(link), ..endpoint })
    }

    /// For who checks devices: from now on work is posted that is known to be beyond its window, or not among its rights, as an initiator might that is
    /// not honest. The target's device must refuse it. (Soft-RoCE does not look at the bounds of windows.)
    pub fn leave_refusals_to_the_device(&mut self) {
        self.keys.leave_to_the_device();
    }

    fn watch(&self, fd: BorrowedFd<'_>) -> std::io::Result<()> {
        Ok(epoll::add(&self.bell, fd, epoll::EventData::new_u64(0), epoll::EventFlags::IN)?)
    }

    /// Hear what the device has to tell, and give it what it can take.
    fn turn(&mut self) {
        self.look_after_rescue();
        if self.is_kicked.swap(false, Ordering::Relaxed) {
            // Only the first caller for the bell needed it.
            self.kick.clear();
        }
        let is_watched = self.is_watched.load(Ordering::Relaxed);
        let mut ended = std::mem::take(&mut self.ended);
        while let Some(link) = &self.link {
            ended.clear();
            let found = link.poll(&mut ended, POLL_MAX);
            if found > 0 && self.is_armed {
                link.completions().quiet();
                self.is_armed = false;
            }
            for end in &ended {
                self.heed(end);
            }
            if found > 0 {
                self.looks = 0;
                continue;
            }
            self.looks += 1;
            let Some(link) = &self.link else { break };
            if is_watched && !self.is_armed {
                link.completions().arm();
                self.is_armed = true;
                // What came before that is not told: look once more.
                continue;
            }
            let looks = if is_watched { LOOKS_WATCHED } else { LOOKS };
            if self.looks.is_multiple_of(looks) && link.is_over() {
                self.lose(None);
            }
            break;
        }
        self.ended = ended;
        self.pump();
    }

    fn heed(&mut self, end: &Ended) {
        let Some(link) = &mut self.link else { return };
        if end.id & WENT != 0 {
            link.went(end.id);
        } else if end.id & CAME != 0 && end.outcome == Outcome::Done {
            let mut letter = std::mem::take(&mut self.letter);
            match link.heard(end, &mut letter) {
                Ok(()) => self.hear(&letter),
                Err(_) => self.lose(None),
            }
            self.letter = letter;
            return;
        } else if end.id & CAME == 0 {
            match end.outcome {
                Outcome::Done => return self.done_through(end.id),
                Outcome::RemoteAccess => {
                    self.done_through_before(end.id);
                    return self.lose(Some(end.id));
                }
                _ => {}
            }
        }
        if end.outcome != Outcome::Done {
            self.lose(None);
        }
    }

    fn done_through(&mut self, number: u64) {
        let Self { queue, results, limits, letter, .. } = self;
        queue.done_through(number, |number, work| match work.verb {
            Verb::Read { local, .. } | Verb::Write { local, .. } => Some(u64::from(local.len)),
            Verb::CompareSwap { .. } | Verb::FetchAdd { .. } => {
                results.read(place_of(number, limits), 8, letter);
                Some(u64::from_ne_bytes(letter[..].try_into().expect("8 bytes")))
            }
            // It has gone; whether there was room, the target tells.
            Verb::Send { .. } => None,
        });
    }

    fn done_through_before(&mut self, number: u64) {
        if let Some(before) = number.checked_sub(1) {
            self.done_through(before);
        }
    }

    fn hear(&mut self, letter: &[u8]) {
        match Answer::parse(letter) {
            Some(Answer::Told(key, opened)) => {
                if self.keys.told(key, opened) && opened.is_none() {
                    self.queue.settle_next(Err(WorkError::RemoteAccess));
                }
            }
            Some(Answer::Full(key)) => {
                if !self.keys.full(key) {
                    tracing::warn!(address = %self.address, "a target opens nothing at all: its device has no windows left");
                    self.lose(None);
                }
            }
            Some(Answer::Delivered(number, had_room)) => self.queue.answered(number, had_room),
            // What was sent before the connection broke and arrived comes again.
            Some(Answer::Message(number, _)) if number < self.heard => {}
            Some(Answer::Message(_, message)) => {
                self.heard += 1;
                self.messages.push_back(message.to_vec());
            }
            None => {
                tracing::warn!(address = %self.address, "a target says what is not of the protocol");
                self.lose(None);
            }
        }
    }

    /// Send a letter, now or when there is a place.
    fn say(&mut self, request: Request<'_>) {
        request.write(&mut self.letter);
        let Some(link) = &mut self.link else { return };
        // None overtakes another.
        let outcome = if self.unsaid.is_empty() { link.say(&self.letter) } else { Ok(false) };
        match outcome {
            Ok(true) => {}
            Ok(false) => self.unsaid.push_back(self.letter.clone()),
            Err(_) => self.lose(None),
        }
    }
}

/// Where an atomic's result goes.
fn place_of(number: u64, limits: &Limits) -> u32 {
    u32::try_from(number % u64_from(limits.queue_depth)).expect("below the queue's depth")
}

impl Endpoint for VerbsEndpoint {
    fn post(&mut self, batch: &[Work]) -> Result<(), PostError> {
        let room = self.limits.queue_depth.saturating_sub(self.queue.len());
        let accepted = batch.len().min(room);
        batch[..accepted].iter().for_each(|work| self.queue.push(*work));
        if let Life::Over(cause) = &mut self.life {
            if accepted > 0 {
                self.queue.give_up(cause.take().unwrap_or(WorkError::Flushed));
            }
        } else {
            self.pump();
        }
        if accepted < batch.len() { Err(PostError::QueueFull { accepted }) } else { Ok(()) }
    }

    fn poll(&mut self, out: &mut Vec<Completion>, max: usize) -> usize {
        self.turn();
        self.queue.tell(out, max)
    }

    fn wait(&mut self, patience: Duration) {
        self.is_watched.store(true, Ordering::Relaxed);
        self.turn();
        if self.queue.has_news() || !self.messages.is_empty() || self.link.is_none() && self.rescue.is_none()
        {
            return;
        }
        let timeout = Timespec::try_from(patience).unwrap_or(Timespec { tv_sec: 1, tv_nsec: 0 });
        let _ready = rustix::event::poll(&mut [PollFd::new(&self.bell, PollFlags::IN)], Some(&timeout));
    }

    fn poll_fd(&self) -> Option<PollFd<'_>> {
        if !self.is_watched.swap(true, Ordering::Relaxed) {
            // Something may have come since the last look, and was not armed for: let the caller look.
            self.is_kicked.store(true, Ordering::Relaxed);
            self.kick.wake();
        }
        Some(PollFd::new(&self.bell, PollFlags::IN))
    }

    fn register_local(&mut self, memory: Arc<Memory>) -> Result<LocalKey, EndpointError> {
        self.locals.add(memory)
    }

    fn receive(&mut self, out: &mut Vec<u8>) -> bool {
        self.turn();
        let Some(message) = self.messages.pop_front() else { return false };
        out.extend_from_slice(&message);
        self.taken += 1;
        self.say(Request::Taken(self.taken));
        true
    }

    fn regions(&self) -> &[Region] {
        &self.regions
    }

    fn limits(&self) -> Limits {
        self.limits
    }

    fn is_broken(&self) -> bool {
        self.life != Life::Open
    }
}
