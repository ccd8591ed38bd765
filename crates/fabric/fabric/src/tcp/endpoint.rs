//! The initiator's end. One call sends the requests of a batch, and answers arrive in the order of
//! the requests.

mod answers;
mod direct;
mod drain;
#[cfg(debug_assertions)]
pub(super) mod fuzz_target;
mod recovery;

use std::collections::VecDeque;
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use aquifer_secure_channel::RecordCipher;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::net::SendFlags;
use zerocopy::IntoBytes;

use self::direct::DirectPlan;
use self::recovery::ReconnectReply;
use super::ConnectOptions;
use super::busy_poll::BusyPoll;
use super::stream::{DeadlineStream, configure, connect_unpaced};
use super::wire::{self, RequestHead, padded};
use crate::Memory;
use crate::background::BackgroundTask;
use crate::handshake::hello::{Hello, SessionId, Welcome};
use crate::handshake::{self, ClusterKey, Credential, HANDSHAKE_TIMEOUT, Ticket, TicketSecret};
use crate::locals::LocalMemories;
use crate::memory::copy;
use crate::target::{Identity, Region};
use crate::work::{
    Completion, DrainHandle, Endpoint, EndpointError, Limits, LocalKey, LocalSlice, PostError, RemoteAddr,
    Verb, Work, WorkError,
};

/// Size of the input buffer, in bytes.
const INPUT_BYTES: usize = 256 << 10;
/// The last 1/`TIMEOUT_GRACE_DIVISOR` of an operation's timeout begins only when this process has
/// observed the end of the rest. So a process that was suspended (SIGSTOP, a paused VM) receives
/// answers that arrived meanwhile before it reports a timeout.
const TIMEOUT_GRACE_DIVISOR: u32 = 10;

/// A posted operation that is not complete.
#[derive(Clone, Copy, Debug)]
struct PendingWork {
    work: Work,
    /// An error found before sending. It completes in the order of posting.
    outcome: Option<WorkError>,
}

/// One connection to a [`super::TcpTarget`].
pub struct TcpEndpoint {
    address: SocketAddr,
    credential: Credential,
    options: ConnectOptions,
    who: Identity,
    stream: TcpStream,
    cipher: Option<RecordCipher>,
    session: SessionId,
    limits: Limits,
    regions: Vec<Region>,
    locals: LocalMemories,
    pending: VecDeque<PendingWork>,
    done: VecDeque<Completion>,
    /// Requests before encryption.
    requests: Vec<u8>,
    /// Bytes that the kernel has not accepted yet.
    outgoing: Vec<u8>,
    sent: usize,
    input: Box<[u8]>,
    filled: usize,
    /// The decrypted input of an encrypted connection.
    opened: Vec<u8>,
    plan: DirectPlan,
    /// The READ whose bytes are arriving, and how many have arrived.
    reading: Option<(LocalSlice, u32)>,
    answered: u64,
    received: u64,
    taken: u64,
    messages: VecDeque<Vec<u8>>,
    /// Set by a post when nothing was in flight. No answer can have arrived yet, so the next poll
    /// does not receive.
    is_fresh: bool,
    busy_poll: BusyPoll,
    /// Set while the connection is being re-established. Nothing is sent or received then.
    reconnecting: Option<BackgroundTask<ReconnectReply>>,
    /// Number of messages that had been taken when the connection broke.
    taken_at_break: u64,
    /// The time from which the timeout of the answer to the oldest operation counts.
    since: Instant,
    /// Whether only the grace part of the timeout is left. It began at `since`.
    is_in_grace: bool,
    /// Whether the target has sent a farewell. Operations without an answer were not done.
    has_farewell: bool,
    /// The error of operations that are posted after the target went away.
    end_cause: WorkError,
    broken: bool,
}

/// Connects to the target that listens at `address`.
///
/// # Errors
/// If no target listens there, the target refuses, or it does not hold the cluster key.
pub fn connect(
    address: SocketAddr,
    key: &ClusterKey,
    who: Identity,
    options: ConnectOptions,
) -> Result<Box<dyn Endpoint>, EndpointError> {
    Ok(Box::new(TcpEndpoint::connect(address, key, who, options)?))
}

/// Connects to the target that listens at `address` with a ticket, which has the identity.
///
/// # Errors
/// If no target listens there, the target refuses the ticket, or cannot derive its secret.
pub fn connect_with_ticket(
    address: SocketAddr,
    ticket: &Ticket,
    secret: &TicketSecret,
    options: ConnectOptions,
) -> Result<Box<dyn Endpoint>, EndpointError> {
    let credential = Credential::Ticket(*ticket, secret.clone());
    Ok(Box::new(TcpEndpoint::connect_by(address, credential, ticket.identity(), options)?))
}

/// Connects and runs the handshake.
fn open_session(
    address: SocketAddr,
    credential: &Credential,
    hello: &Hello,
    timeout: Duration,
) -> Result<(TcpStream, RecordCipher, Welcome), EndpointError> {
    let unreachable = |source| EndpointError::Unreachable { address: address.to_string(), source };
    let stream = connect_unpaced(address, timeout).map_err(unreachable)?;
    configure(&stream).map_err(unreachable)?;
    let deadlined = DeadlineStream::new(stream, Instant::now() + timeout);
    let (secured, welcome) = handshake::initiate_session(deadlined, address, credential, hello)?;
    let (stream, cipher) = secured.into_parts();
    let stream = stream.into_inner();
    stream.set_nonblocking(true).map_err(unreachable)?;
    Ok((stream, cipher, welcome))
}

impl TcpEndpoint {
    /// Connects like [`connect`], for callers that want static dispatch.
    ///
    /// # Errors
    /// If no target listens there, the target refuses, or it does not hold the cluster key.
    pub fn connect(
        address: SocketAddr,
        key: &ClusterKey,
        who: Identity,
        options: ConnectOptions,
    ) -> Result<Self, EndpointError> {
        Self::connect_by(address, Credential::Member(key.clone()), who, options)
    }

    fn connect_by(
        address: SocketAddr,
        credential: Credential,
        who: Identity,
        options: ConnectOptions,
    ) -> Result<Self, EndpointError> {
        let hello = Hello { who, encrypt: options.encrypt, resume: None };
        let (stream, cipher, welcome) = open_session(address, &credential, &hello, HANDSHAKE_TIMEOUT)?;
        let parts = (address, credential, who, options);
        Ok(Self::over(stream, welcome.encrypt.then_some(cipher), welcome, parts))
    }

    /// Creates an endpoint over an open connection.
    fn over(
        stream: TcpStream,
        cipher: Option<RecordCipher>,
        welcome: Welcome,
        (address, credential, who, options): (SocketAddr, Credential, Identity, ConnectOptions),
    ) -> Self {
        Self {
            address,
            credential,
            busy_poll: BusyPoll::new(options.spin_time),
            options,
            who,
            stream,
            cipher,
            session: welcome.session,
            limits: welcome.limits,
            regions: welcome.regions,
            locals: LocalMemories::default(),
            pending: VecDeque::with_capacity(welcome.limits.queue_depth),
            done: VecDeque::with_capacity(welcome.limits.queue_depth),
            requests: Vec::new(),
            outgoing: Vec::new(),
            sent: 0,
            input: vec![0; INPUT_BYTES].into_boxed_slice(),
            filled: 0,
            opened: Vec::new(),
            plan: DirectPlan::new(),
            reading: None,
            answered: 0,
            received: 0,
            taken: 0,
            messages: VecDeque::new(),
            is_fresh: false,
            reconnecting: None,
            taken_at_break: 0,
            since: Instant::now(),
            is_in_grace: false,
            has_farewell: false,
            end_cause: WorkError::PeerGone,
            broken: false,
        }
    }

    /// The error of a verb that needs no answer of the target.
    fn local_error(&self, verb: &Verb) -> Option<WorkError> {
        match *verb {
            Verb::Read { local, .. } | Verb::Write { local, .. } => {
                if local.len > self.limits.transfer_bytes_max {
                    return Some(WorkError::TooLong);
                }
                self.local(local).is_none().then_some(WorkError::LocalAccess)
            }
            Verb::Send { local } => {
                if local.len > self.limits.message_bytes_max {
                    return Some(WorkError::TooLong);
                }
                self.local(local).is_none().then_some(WorkError::LocalAccess)
            }
            Verb::CompareSwap { .. } | Verb::FetchAdd { .. } => None,
        }
    }

    #[inline]
    fn local(&self, slice: LocalSlice) -> Option<*mut u8> {
        self.locals.pointer(slice)
    }

    fn encode(&mut self, verb: &Verb) {
        let at = |mut request: RequestHead, remote: RemoteAddr, value: u64| {
            request.addr = remote.addr.into();
            request.key = remote.key.0.into();
            request.value = value.into();
            request
        };
        match *verb {
            Verb::Read { local, remote } => {
                self.put(at(RequestHead::new(wire::READ, local.len), remote, 0));
            }
            Verb::Write { local, remote } => {
                self.put(at(RequestHead::new(wire::WRITE, local.len), remote, 0));
                self.put_local(local);
            }
            Verb::CompareSwap { remote, expected, desired } => {
                self.put(at(RequestHead::new(wire::SWAP, 8), remote, expected));
                self.requests.extend_from_slice(&desired.to_le_bytes());
            }
            Verb::FetchAdd { remote, add } => self.put(at(RequestHead::new(wire::ADD, 8), remote, add)),
            Verb::Send { local } => {
                self.put(RequestHead::new(wire::SEND, local.len));
                self.put_local(local);
            }
        }
    }

    fn put(&mut self, request: RequestHead) {
        self.requests.extend_from_slice(request.as_bytes());
    }

    fn put_local(&mut self, local: LocalSlice) {
        let from = self.local(local).expect("the slice was checked when the work was posted");
        let (len, room) = (local.len as usize, padded(local.len));
        let at = self.requests.len();
        self.requests.reserve(room);
        // SAFETY: `local` proved the source; the destination was reserved and its padding is
        // written too.
        unsafe {
            let to = self.requests.as_mut_ptr().add(at);
            to.add(len).write_bytes(0, room - len);
            copy(to, from, len);
            self.requests.set_len(at + room);
        }
    }

    /// Sends as much as the kernel accepts. An error of the connection shows at the next receive.
    fn flush(&mut self) {
        while self.reconnecting.is_none() {
            if self.sent == self.outgoing.len() {
                self.outgoing.clear();
                self.sent = 0;
                match &mut self.cipher {
                    None => std::mem::swap(&mut self.outgoing, &mut self.requests),
                    Some(cipher) => {
                        cipher.encrypt(&self.requests, &mut self.outgoing);
                        self.requests.clear();
                    }
                }
                if self.outgoing.is_empty() {
                    return;
                }
            }
            let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
            match rustix::net::send(&self.stream, &self.outgoing[self.sent..], flags) {
                Ok(bytes) => self.sent += bytes,
                Err(rustix::io::Errno::INTR) => {}
                Err(_) => return,
            }
        }
    }

    /// Receives answers once, and detects broken connections and timeouts.
    fn progress(&mut self) {
        if self.broken {
            return;
        }
        self.complete_known();
        if self.is_reconnecting() || self.broken {
            return;
        }
        self.flush();
        let answered = self.answered;
        if self.receive_some() {
            self.recover();
        } else if self.answered != answered {
            self.await_answer();
        } else if !self.pending.is_empty() {
            self.check_time();
        }
    }

    /// Starts the timeout of the answer to the oldest operation.
    fn await_answer(&mut self) {
        (self.since, self.is_in_grace) = (Instant::now(), false);
    }

    /// Breaks the endpoint if the answer to the oldest operation did not arrive in time.
    fn check_time(&mut self) {
        let operation_time = self.options.operation_time;
        let grace = operation_time / TIMEOUT_GRACE_DIVISOR;
        let part = if self.is_in_grace { grace } else { operation_time - grace };
        if self.since.elapsed() <= part {
            return;
        }
        if self.is_in_grace {
            self.complete_known();
            self.fail_all(Some(WorkError::Timeout));
        } else {
            (self.since, self.is_in_grace) = (Instant::now(), true);
        }
    }

    /// Polls before a sleep. Returns false if it is time to sleep.
    fn busy_poll(&mut self) -> bool {
        if self.reconnecting.is_some() {
            return false;
        }
        let mut busy_poll = std::mem::take(&mut self.busy_poll);
        let received = self.received;
        // Receiving costs no more than a check for input.
        let is_over = busy_poll.poll(|| {
            self.progress();
            !self.done.is_empty()
                || self.received != received
                || self.is_broken()
                || self.reconnecting.is_some()
        });
        self.busy_poll = busy_poll;
        is_over
    }
}

impl Endpoint for TcpEndpoint {
    fn post(&mut self, batch: &[Work]) -> Result<(), PostError> {
        if self.pending.is_empty() {
            self.await_answer();
            self.is_fresh = true;
        }
        let mut accepted = 0;
        for work in batch {
            if self.done.len() + self.pending.len() == self.limits.queue_depth {
                break;
            }
            accepted += 1;
            if self.broken {
                self.complete(*work, Err(WorkError::Flushed));
                continue;
            }
            let outcome = self.local_error(&work.verb);
            if outcome.is_none() {
                self.encode(&work.verb);
            }
            self.pending.push_back(PendingWork { work: *work, outcome });
        }
        if !self.broken && self.has_farewell {
            self.complete_known();
            self.fail_all(Some(self.end_cause));
        }
        self.complete_known();
        self.flush();
        if accepted == batch.len() { Ok(()) } else { Err(PostError::QueueFull { accepted }) }
    }

    fn poll(&mut self, out: &mut Vec<Completion>, max: usize) -> usize {
        let is_fresh = std::mem::take(&mut self.is_fresh);
        let is_waiting = !self.pending.is_empty() || self.reconnecting.is_some();
        if self.done.len() < max && is_waiting && !is_fresh {
            self.progress();
        }
        let count = self.done.len().min(max);
        out.extend(self.done.drain(..count));
        count
    }

    fn wait(&mut self, timeout: Duration) {
        if !self.done.is_empty() || self.broken {
            return;
        }
        if !timeout.is_zero() && self.busy_poll() {
            return;
        }
        let timeout = Timespec::try_from(timeout).unwrap_or(Timespec { tv_sec: 1, tv_nsec: 0 });
        let mut polled = self.poll_fd();
        // The caller polls after any outcome.
        let _ = rustix::event::poll(polled.as_mut_slice(), Some(&timeout));
    }

    fn poll_fd(&self) -> Option<PollFd<'_>> {
        if let Some(task) = &self.reconnecting {
            return Some(PollFd::from_borrowed_fd(task.ready_fd(), PollFlags::IN));
        }
        let mut flags = PollFlags::IN;
        flags.set(PollFlags::OUT, self.sent < self.outgoing.len());
        Some(PollFd::new(&self.stream, flags))
    }

    fn register_local(&mut self, memory: Arc<Memory>) -> Result<LocalKey, EndpointError> {
        self.locals.add(memory, self.limits.local_regions_max)
    }

    fn receive(&mut self, out: &mut Vec<u8>) -> bool {
        if self.messages.is_empty() {
            self.progress();
        }
        let Some(message) = self.messages.pop_front() else {
            return false;
        };
        out.extend_from_slice(&message);
        self.taken += 1;
        if !self.broken {
            self.put(RequestHead::new(wire::CREDIT, 1));
            self.flush();
        }
        true
    }

    fn regions(&self) -> &[Region] {
        &self.regions
    }

    fn limits(&self) -> Limits {
        self.limits
    }

    fn is_broken(&self) -> bool {
        self.broken || self.has_farewell
    }

    fn drain_handle(&self) -> Option<Box<dyn DrainHandle>> {
        drain::TcpDrain::of(self).map(|late| Box::new(late) as Box<dyn DrainHandle>)
    }
}

impl Drop for TcpEndpoint {
    fn drop(&mut self) {
        if !self.broken && !self.has_farewell && self.reconnecting.is_none() {
            self.put(RequestHead::new(wire::BYE, 0));
            self.flush();
        }
    }
}

impl std::fmt::Debug for TcpEndpoint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TcpEndpoint")
            .field("address", &self.address)
            .field("who", &self.who)
            .field("pending", &self.pending.len())
            .field("broken", &self.broken)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
