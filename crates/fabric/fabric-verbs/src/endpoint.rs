//! The initiator's end. Work is posted to the device in order, as soon as the device keys of its
//! ranges are known.

mod pump;
mod recovery;

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, epoll};

use self::recovery::ReconnectAttempt;
use super::key_cache::KeyCache;
use super::link::{VerbsLink, open_session};
use super::local_memory::RegisteredMemories;
use super::messages::{InitiatorMessage, TargetMessage};
use super::queue::WorkQueue;
use super::slots::{MessageSlots, RECEIVED_BIT, SENT_BIT};
use super::sys::completions::{WorkCompletion, WorkOutcome};
use super::sys::queue_pair::WorkRequest;
use aquifer_fabric::ClusterKey;
use aquifer_fabric::Memory;
use aquifer_fabric::background::BackgroundTask;
use aquifer_fabric::handshake::hello::{Hello, SessionId};
use aquifer_fabric::handshake::{Credential, HANDSHAKE_TIMEOUT};
use aquifer_fabric::memory::u64_from;
use aquifer_fabric::target::{Identity, Region};
use aquifer_fabric::wake::WakeFd;
use aquifer_fabric::work::{
    Completion, Endpoint, EndpointError, Limits, LocalKey, PostError, Verb, Work, WorkError,
};

/// Number of completions taken from the device at a time.
const POLL_MAX: usize = 64;
/// Empty polls of the device between two checks whether the connection is over.
const POLLS_PER_CHECK: u32 = 256;
/// Empty polls between two checks while a thread waits. The number is small because an event of
/// librdmacm keeps the descriptor ready until it is read.
const POLLS_PER_CHECK_WAITING: u32 = 8;

/// The state of an endpoint.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum EndpointState {
    Open,
    /// The endpoint is broken. The first operation without an outcome gets the cause, which is
    /// `None` if an operation has got it; further operations are flushed.
    Over(Option<WorkError>),
}

/// One connection to a [`super::VerbsTarget`].
#[derive(Debug)]
pub struct VerbsEndpoint {
    address: SocketAddr,
    credential: Credential,
    who: Identity,
    session: SessionId,
    limits: Limits,
    regions: Vec<Region>,
    state: EndpointState,
    /// The connection; `None` while reconnecting, and after the end.
    link: Option<VerbsLink>,
    reconnecting: Option<BackgroundTask<ReconnectAttempt>>,
    keys: KeyCache,
    queue: WorkQueue,
    locals: RegisteredMemories,
    /// The slots into which the device writes the results of atomics, by number of the work.
    results: MessageSlots,
    /// Messages that wait for a free slot.
    unsent: VecDeque<Vec<u8>>,
    messages: VecDeque<Vec<u8>>,
    received: u64,
    taken: u64,
    // Buffers that are reused, so that nothing is allocated.
    requests: Vec<WorkRequest>,
    ended: Vec<WorkCompletion>,
    message: Vec<u8>,
    empty_polls: u32,
    /// Number of the work that the peer's device refused last, and how many times in a row.
    refused: (u64, u32),
    /// An epoll descriptor that watches the device, librdmacm, the reconnect and `wake`.
    epoll: OwnedFd,
    wake: WakeFd,
    /// Set once a thread has waited for `epoll`.
    has_waiter: AtomicBool,
    /// Set while `wake` must be cleared.
    is_woken: AtomicBool,
    is_armed: bool,
}

/// Connects to the target that listens at the `address` of an RDMA device.
///
/// # Errors
/// If no target listens there, the target refuses, or it does not hold the cluster key; or if this
/// machine has no device that reaches the address.
pub fn connect(
    address: SocketAddr,
    key: &ClusterKey,
    who: Identity,
) -> Result<Box<dyn Endpoint>, EndpointError> {
    Ok(Box::new(VerbsEndpoint::connect(address, key, who)?))
}

impl VerbsEndpoint {
    /// Connects like [`connect`], for callers that want static dispatch.
    ///
    /// # Errors
    /// The errors of [`connect`].
    pub fn connect(address: SocketAddr, key: &ClusterKey, who: Identity) -> Result<Self, EndpointError> {
        Self::connect_by(address, &Credential::Member(key.clone()), who)
    }

    /// Connects with the cluster key, or with a ticket of this identity.
    ///
    /// # Errors
    /// The errors of [`connect`].
    pub fn connect_by(
        address: SocketAddr,
        credential: &Credential,
        identity: Identity,
    ) -> Result<Self, EndpointError> {
        let unreachable = |source| EndpointError::Unreachable { address: address.to_string(), source };
        let hello = Hello { who: identity, encrypt: false, resume: None };
        let (link, welcome) = open_session(address, credential, &hello, HANDSHAKE_TIMEOUT)?;
        let limits = welcome.limits;
        let results = u32::try_from(limits.queue_depth).unwrap_or(u32::MAX);
        let results =
            MessageSlots::new(link.device, "aquifer-verbs-results", results, 8).map_err(unreachable)?;
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(|error| unreachable(error.into()))?;
        let endpoint = Self {
            address,
            credential: credential.clone(),
            who: identity,
            session: welcome.session,
            limits,
            regions: welcome.regions,
            state: EndpointState::Open,
            keys: KeyCache::new(super::WINDOWS_EACH),
            queue: WorkQueue::default(),
            locals: RegisteredMemories::new(link.device, limits),
            link: None,
            reconnecting: None,
            results,
            unsent: VecDeque::new(),
            messages: VecDeque::new(),
            received: 0,
            taken: 0,
            requests: Vec::with_capacity(limits.queue_depth),
            ended: Vec::with_capacity(POLL_MAX),
            message: Vec::new(),
            empty_polls: 0,
            refused: (0, 0),
            epoll,
            wake: WakeFd::new().map_err(unreachable)?,
            has_waiter: AtomicBool::new(false),
            is_woken: AtomicBool::new(false),
            is_armed: false,
        };
        endpoint.watch(endpoint.wake.as_fd()).map_err(unreachable)?;
        endpoint.watch(link.completions().fd()).map_err(unreachable)?;
        endpoint.watch(link.events_fd()).map_err(unreachable)?;
        Ok(Self { link: Some(link), ..endpoint })
    }

    /// Posts work from now on even if it exceeds a window or its rights, as a hostile initiator
    /// could. Tests of devices use this: the target's device must refuse the work. (Soft-RoCE does
    /// not check the bounds of windows.)
    pub fn skip_local_checks(&mut self) {
        self.keys.skip_checks();
    }

    fn watch(&self, fd: BorrowedFd<'_>) -> std::io::Result<()> {
        Ok(epoll::add(&self.epoll, fd, epoll::EventData::new_u64(0), epoll::EventFlags::IN)?)
    }

    /// Handles all completions of the device, and posts the work that can be posted.
    fn progress(&mut self) {
        self.check_reconnect();
        if self.is_woken.swap(false, Ordering::Relaxed) {
            // Only the first call of `poll_fd` needed it.
            self.wake.clear();
        }
        let has_waiter = self.has_waiter.load(Ordering::Relaxed);
        let mut ended = std::mem::take(&mut self.ended);
        while let Some(link) = &self.link {
            ended.clear();
            let found = link.poll(&mut ended, POLL_MAX);
            if found > 0 && self.is_armed {
                link.completions().disarm();
                self.is_armed = false;
            }
            for end in &ended {
                self.handle_completion(end);
            }
            if found > 0 {
                self.empty_polls = 0;
                continue;
            }
            self.empty_polls += 1;
            let Some(link) = &self.link else { break };
            if has_waiter && !self.is_armed {
                link.completions().arm();
                self.is_armed = true;
                // The device does not notify of completions from before it was armed, so this polls
                // once more.
                continue;
            }
            let empty_polls = if has_waiter { POLLS_PER_CHECK_WAITING } else { POLLS_PER_CHECK };
            if self.empty_polls.is_multiple_of(empty_polls) && link.is_disconnected() {
                self.disconnect(None);
            }
            break;
        }
        self.ended = ended;
        self.pump();
    }

    fn handle_completion(&mut self, end: &WorkCompletion) {
        let Some(link) = &mut self.link else { return };
        if end.id & SENT_BIT != 0 {
            link.free_slot(end.id);
        } else if end.id & RECEIVED_BIT != 0 && end.outcome == WorkOutcome::Done {
            let mut message = std::mem::take(&mut self.message);
            match link.receive(end, &mut message) {
                Ok(()) => self.handle_answer(&message),
                Err(_) => self.disconnect(None),
            }
            self.message = message;
            return;
        } else if end.id & RECEIVED_BIT == 0 {
            match end.outcome {
                WorkOutcome::Done => return self.done_through(end.id),
                WorkOutcome::RemoteAccess => {
                    self.done_through_before(end.id);
                    return self.disconnect(Some(end.id));
                }
                _ => {}
            }
        }
        if end.outcome != WorkOutcome::Done {
            self.disconnect(None);
        }
    }

    fn done_through(&mut self, number: u64) {
        let Self { queue, results, limits, message, .. } = self;
        queue.done_through(number, |number, work| match work.verb {
            Verb::Read { local, .. } | Verb::Write { local, .. } => Some(u64::from(local.len)),
            Verb::CompareSwap { .. } | Verb::FetchAdd { .. } => {
                results.read(result_slot(number, limits), 8, message);
                Some(u64::from_ne_bytes(message[..].try_into().expect("8 bytes")))
            }
            // The message was sent. The target's answer contains whether there was room.
            Verb::Send { .. } => None,
        });
    }

    fn done_through_before(&mut self, number: u64) {
        if let Some(before) = number.checked_sub(1) {
            self.done_through(before);
        }
    }

    fn handle_answer(&mut self, message: &[u8]) {
        match TargetMessage::parse(message) {
            Some(TargetMessage::Opened(key, opened)) => {
                if self.keys.handle_opened(key, opened) && opened.is_none() {
                    self.queue.complete_next(Err(WorkError::RemoteAccess));
                }
            }
            Some(TargetMessage::Full(key)) => {
                if !self.keys.handle_full(key) {
                    tracing::warn!(
                        address = %self.address,
                        "a target opens no key: its device has no windows left; disconnecting"
                    );
                    self.disconnect(None);
                }
            }
            Some(TargetMessage::Delivered(number, had_room)) => self.queue.complete_message(number, had_room),
            // Messages that arrived before the connection broke are sent again.
            Some(TargetMessage::Message(number, _)) if number < self.received => {}
            Some(TargetMessage::Message(_, message)) => {
                self.received += 1;
                self.messages.push_back(message.to_vec());
            }
            None => {
                tracing::warn!(address = %self.address, "a target violated the protocol; disconnecting");
                self.disconnect(None);
            }
        }
    }

    /// Sends a message now, or queues it until a slot is free.
    fn send(&mut self, request: InitiatorMessage<'_>) {
        request.write(&mut self.message);
        let Some(link) = &mut self.link else { return };
        // Messages must stay in order.
        let outcome = if self.unsent.is_empty() { link.send(&self.message) } else { Ok(false) };
        match outcome {
            Ok(true) => {}
            Ok(false) => self.unsent.push_back(self.message.clone()),
            Err(_) => self.disconnect(None),
        }
    }
}

/// The slot for the result of an atomic.
fn result_slot(number: u64, limits: &Limits) -> u32 {
    u32::try_from(number % u64_from(limits.queue_depth)).expect("below the queue's depth")
}

impl Endpoint for VerbsEndpoint {
    fn post(&mut self, batch: &[Work]) -> Result<(), PostError> {
        let room = self.limits.queue_depth.saturating_sub(self.queue.len());
        let accepted = batch.len().min(room);
        batch[..accepted].iter().for_each(|work| self.queue.push(*work));
        if let EndpointState::Over(cause) = &mut self.state {
            if accepted > 0 {
                self.queue.fail_all(cause.take().unwrap_or(WorkError::Flushed));
            }
        } else {
            self.pump();
        }
        if accepted < batch.len() { Err(PostError::QueueFull { accepted }) } else { Ok(()) }
    }

    fn poll(&mut self, out: &mut Vec<Completion>, max: usize) -> usize {
        self.progress();
        self.queue.poll(out, max)
    }

    fn wait(&mut self, timeout: Duration) {
        self.has_waiter.store(true, Ordering::Relaxed);
        self.progress();
        if self.queue.has_completions()
            || !self.messages.is_empty()
            || self.link.is_none() && self.reconnecting.is_none()
        {
            return;
        }
        let timeout = Timespec::try_from(timeout).unwrap_or(Timespec { tv_sec: 1, tv_nsec: 0 });
        let _ready = rustix::event::poll(&mut [PollFd::new(&self.epoll, PollFlags::IN)], Some(&timeout));
    }

    fn poll_fd(&self) -> Option<PollFd<'_>> {
        if !self.has_waiter.swap(true, Ordering::Relaxed) {
            // A completion may have arrived before the device was armed, so the caller must poll
            // once.
            self.is_woken.store(true, Ordering::Relaxed);
            self.wake.wake();
        }
        Some(PollFd::new(&self.epoll, PollFlags::IN))
    }

    fn register_local(&mut self, memory: Arc<Memory>) -> Result<LocalKey, EndpointError> {
        self.locals.add(memory)
    }

    fn receive(&mut self, out: &mut Vec<u8>) -> bool {
        self.progress();
        let Some(message) = self.messages.pop_front() else { return false };
        out.extend_from_slice(&message);
        self.taken += 1;
        self.send(InitiatorMessage::Taken(self.taken));
        true
    }

    fn regions(&self) -> &[Region] {
        &self.regions
    }

    fn limits(&self) -> Limits {
        self.limits
    }

    fn is_broken(&self) -> bool {
        self.state != EndpointState::Open
    }
}
