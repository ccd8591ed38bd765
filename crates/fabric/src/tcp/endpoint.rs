//! The initiator's end: requests go out in one call for a batch, answers come back in the same order.

use std::collections::VecDeque;
use std::io;
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::net::{RecvFlags, SendFlags};
use zerocopy::{FromBytes, IntoBytes};

use super::door::TRY_AGAIN;
use super::hello::{self, Hello, Reply, Resume, SessionId, Welcome};
use super::secure::{Seal, SecureError, initiate};
use super::stream::{Deadlined, tune};
use super::wire::{self, ANSWER_BYTES, Answer, Request, padded};
use super::{ClusterKey, ConnectOptions, HANDSHAKE_TIME};
use crate::Memory;
use crate::memory::{copy, u64_from};
use crate::target::{Identity, Region};
use crate::work::{
    Completion, Endpoint, EndpointError, Limits, LocalKey, LocalSlice, PostError, RemoteAddr, Verb, Work,
    WorkError,
};

/// Bytes taken from the connection in one call.
const INPUT_BYTES: usize = 256 << 10;
/// Between attempts to make a broken connection anew.
const RETRY_EVERY: Duration = Duration::from_millis(20);

/// A posted operation without outcome.
#[derive(Clone, Copy, Debug)]
struct Pending {
    work: Work,
    /// Known at once, and told in its turn.
    outcome: Option<WorkError>,
}

/// One connection to a [`super::TcpTarget`].
pub struct TcpEndpoint {
    address: SocketAddr,
    key: ClusterKey,
    options: ConnectOptions,
    who: Identity,
    stream: TcpStream,
    seal: Option<Seal>,
    session: SessionId,
    limits: Limits,
    regions: Vec<Region>,
    locals: Vec<Arc<Memory>>,
    pending: VecDeque<Pending>,
    done: VecDeque<Completion>,
    /// Requests, plain, to be sealed or sent.
    requests: Vec<u8>,
    /// Bytes on their way into the kernel.
    outgoing: Vec<u8>,
    sent: usize,
    input: Box<[u8]>,
    filled: usize,
    /// What a sealed connection said, opened.
    opened: Vec<u8>,
    /// The READ whose bytes are coming, and how many of them came.
    reading: Option<(LocalSlice, u32)>,
    answered: u64,
    heard: u64,
    taken: u64,
    messages: VecDeque<Vec<u8>>,
    /// Since when an answer is awaited.
    since: Instant,
    /// The target went away in good order: what is unanswered was not done.
    has_farewell: bool,
    broken: bool,
}

/// Connect to the target that listens at `address`.
///
/// # Errors
/// If nobody listens there, the target refuses, or it does not have the cluster's key.
pub fn connect(
    address: SocketAddr,
    key: &ClusterKey,
    who: Identity,
    options: ConnectOptions,
) -> Result<Box<dyn Endpoint>, EndpointError> {
    Ok(Box::new(TcpEndpoint::connect(address, key, who, options)?))
}

/// Knock, and hear what the target says.
fn knock(
    address: SocketAddr,
    key: &ClusterKey,
    hello: &Hello,
    patience: Duration,
) -> Result<(TcpStream, Seal, Welcome), EndpointError> {
    let name = address.to_string();
    let unreachable = |source| EndpointError::Unreachable { address: name.clone(), source };
    let failed = |error| match error {
        SecureError::System(source) => unreachable(source),
        SecureError::Stranger => EndpointError::Refused {
            address: name.clone(),
            reason: "the cluster keys differ: give both ends the same --key file".into(),
        },
        other => EndpointError::Protocol { address: name.clone(), reason: other.to_string() },
    };
    let stream = TcpStream::connect_timeout(&address, patience).map_err(unreachable)?;
    tune(&stream).map_err(unreachable)?;
    let mut secured = initiate(Deadlined::new(stream, Instant::now() + patience), key).map_err(failed)?;
    secured.say(&hello::encode_hello(hello)).map_err(failed)?;
    let heard = secured.hear().map_err(failed)?;
    let reply = hello::parse_reply(&heard)
        .map_err(|error| EndpointError::Protocol { address: name.clone(), reason: error.to_string() })?;
    match reply {
        Reply::Refusal(reason) => Err(EndpointError::Refused { address: name, reason }),
        Reply::Welcome(welcome) => {
            let (stream, seal) = secured.into_parts();
            let stream = stream.into_inner();
            stream.set_nonblocking(true).map_err(unreachable)?;
            Ok((stream, seal, welcome))
        }
    }
}

impl TcpEndpoint {
    /// As [`connect`], for callers that want static dispatch.
    ///
    /// # Errors
    /// If nobody listens there, the target refuses, or it does not have the cluster's key.
    pub fn connect(
        address: SocketAddr,
        key: &ClusterKey,
        who: Identity,
        options: ConnectOptions,
    ) -> Result<Self, EndpointError> {
        let hello = Hello { who, encrypt: options.encrypt, resume: None };
        let (stream, seal, welcome) = knock(address, key, &hello, HANDSHAKE_TIME)?;
        Ok(Self {
            address,
            key: key.clone(),
            options,
            who,
            stream,
            seal: welcome.encrypt.then_some(seal),
            session: welcome.session,
            limits: welcome.limits,
            regions: welcome.regions,
            locals: Vec::new(),
            pending: VecDeque::with_capacity(welcome.limits.queue_depth),
            done: VecDeque::with_capacity(welcome.limits.queue_depth),
            requests: Vec::new(),
            outgoing: Vec::new(),
            sent: 0,
            input: vec![0; INPUT_BYTES].into_boxed_slice(),
            filled: 0,
            opened: Vec::new(),
            reading: None,
            answered: 0,
            heard: 0,
            taken: 0,
            messages: VecDeque::new(),
            since: Instant::now(),
            has_farewell: false,
            broken: false,
        })
    }

    // ---- requests ----------------------------------------------------------------------------------

    /// What is wrong with a verb that need not be asked of the target.
    fn fault(&self, verb: &Verb) -> Option<WorkError> {
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
        let memory = (slice.key.0 as usize).checked_sub(1).and_then(|index| self.locals.get(index))?;
        let size = u64_from(memory.len());
        if slice.offset > size || u64::from(slice.len) > size - slice.offset {
            return None;
        }
        // SAFETY: `offset` is at most the length of the mapping.
        Some(unsafe { memory.as_ptr().add(usize::try_from(slice.offset).ok()?) })
    }

    fn encode(&mut self, verb: &Verb) {
        let at = |mut request: Request, remote: RemoteAddr, value: u64| {
            request.addr = remote.addr.into();
            request.key = remote.key.0.into();
            request.value = value.into();
            request
        };
        match *verb {
            Verb::Read { local, remote } => {
                self.put(at(Request::new(wire::READ, local.len), remote, 0));
            }
            Verb::Write { local, remote } => {
                self.put(at(Request::new(wire::WRITE, local.len), remote, 0));
                self.put_local(local);
            }
            Verb::CompareSwap { remote, expected, desired } => {
                self.put(at(Request::new(wire::SWAP, 8), remote, expected));
                self.requests.extend_from_slice(&desired.to_le_bytes());
            }
            Verb::FetchAdd { remote, add } => self.put(at(Request::new(wire::ADD, 8), remote, add)),
            Verb::Send { local } => {
                self.put(Request::new(wire::SEND, local.len));
                self.put_local(local);
            }
        }
    }

    fn put(&mut self, request: Request) {
        self.requests.extend_from_slice(request.as_bytes());
    }

    fn put_local(&mut self, local: LocalSlice) {
        let from = self.local(local).expect("it was checked when it was posted");
        let (len, room) = (local.len as usize, padded(local.len));
        let at = self.requests.len();
        self.requests.reserve(room);
        // SAFETY: `local` proved the source; the destination was reserved and its padding is written too.
        unsafe {
            let to = self.requests.as_mut_ptr().add(at);
            to.add(len).write_bytes(0, room - len);
            copy(to, from, len);
            self.requests.set_len(at + room);
        }
    }

    /// Give the kernel what it takes. An error shows when answers are looked for.
    fn flush(&mut self) {
        loop {
            if self.sent == self.outgoing.len() {
                self.outgoing.clear();
                self.sent = 0;
                match &mut self.seal {
                    None => std::mem::swap(&mut self.outgoing, &mut self.requests),
                    Some(seal) => {
                        seal.close(&self.requests, &mut self.outgoing);
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

    // ---- answers -----------------------------------------------------------------------------------

    /// Take what has come. True if the connection is over.
    fn receive_some(&mut self) -> bool {
        loop {
            let flags = RecvFlags::DONTWAIT;
            match rustix::net::recv(&self.stream, &mut self.input[self.filled..], flags) {
                Ok((_, 0)) => return true,
                Ok((_, bytes)) => {
                    self.filled += bytes;
                    let is_full = self.filled == self.input.len();
                    if self.take_input().is_err() {
                        tracing::warn!(address = %self.address, "a target said nonsense");
                        return true;
                    }
                    if !is_full {
                        return false;
                    }
                }
                Err(rustix::io::Errno::INTR) => {}
                Err(rustix::io::Errno::AGAIN) => return false,
                Err(_) => return true,
            }
        }
    }

    fn take_input(&mut self) -> Result<(), SecureError> {
        let nonsense = || SecureError::Magic;
        let Some(seal) = &mut self.seal else {
            let input = std::mem::take(&mut self.input);
            let used = self.take_answers(&input[..self.filled]);
            self.input = input;
            let used = used.ok_or_else(nonsense)?;
            self.input.copy_within(used..self.filled, 0);
            self.filled -= used;
            return Ok(());
        };
        let used = seal.open(&self.input[..self.filled], &mut self.opened)?;
        self.input.copy_within(used..self.filled, 0);
        self.filled -= used;
        let mut opened = std::mem::take(&mut self.opened);
        let used = self.take_answers(&opened);
        opened.drain(..used.unwrap_or(0));
        self.opened = opened;
        used.map(drop).ok_or_else(nonsense)
    }

    /// Book the answers in `bytes`; how many bytes were used, a multiple of 8; `None` if they are nonsense.
    fn take_answers(&mut self, bytes: &[u8]) -> Option<usize> {
        let mut at = 0;
        loop {
            if let Some((local, taken)) = self.reading {
                let used = self.take_payload(local, taken, &bytes[at..])?;
                at += used;
                if self.reading.is_some() {
                    return Some(at);
                }
            }
            let Ok((answer, rest)) = Answer::read_from_prefix(&bytes[at..]) else {
                return Some(at);
            };
            let len = answer.len.get();
            match answer.kind {
                wire::ANSWER => self.take_answer(&answer)?,
                wire::MESSAGE => {
                    if len > self.limits.message_bytes_max || self.messages.len() >= self.limits.receive_depth
                    {
                        return None;
                    }
                    let Some(message) = rest.get(..padded(len)) else {
                        return Some(at);
                    };
                    self.messages.push_back(message[..len as usize].to_vec());
                    self.heard += 1;
                    at += padded(len);
                }
                wire::FAREWELL => self.has_farewell = answer.value.get() == self.answered,
                _ => return None,
            }
            at += ANSWER_BYTES;
        }
    }

    fn take_answer(&mut self, answer: &Answer) -> Option<()> {
        self.settle_known();
        let Pending { work, .. } = *self.pending.front()?;
        let outcome = answer.outcome()?;
        match work.verb {
            Verb::Read { local, .. } if outcome.is_ok() => {
                if answer.len.get() != local.len {
                    return None;
                }
                self.reading = Some((local, 0));
            }
            _ if answer.len.get() != 0 => return None,
            _ => self.settle(outcome),
        }
        Some(())
    }

    /// Copy what has come of a READ to its place; how many bytes were used.
    fn take_payload(&mut self, local: LocalSlice, taken: u32, bytes: &[u8]) -> Option<usize> {
        let left = padded(local.len) - taken as usize;
        let take = left.min(bytes.len() & !7);
        let len = take.min((local.len - taken.min(local.len)) as usize);
        let to = self.local(local)?;
        // SAFETY: `local` proved all of the destination, and `taken + len` is at most its length.
        unsafe { copy(to.add(taken as usize), bytes.as_ptr(), len) };
        if take == left {
            self.reading = None;
            self.settle(Ok(u64::from(local.len)));
        } else {
            self.reading = Some((local, taken + u32::try_from(take).expect("below the length")));
        }
        Some(take)
    }

    /// The oldest operation has its answer.
    fn settle(&mut self, outcome: Result<u64, WorkError>) {
        let Some(Pending { work, .. }) = self.pending.pop_front() else { return };
        self.answered += 1;
        self.since = Instant::now();
        self.complete(work, outcome);
        if outcome == Err(WorkError::Fenced) {
            self.give_up(None);
        }
    }

    fn complete(&mut self, work: Work, outcome: Result<u64, WorkError>) {
        if work.signalled || outcome.is_err() {
            self.done.push_back(Completion { id: work.id, outcome });
        }
    }

    /// Tell the outcomes that were known at once, where it is their turn.
    fn settle_known(&mut self) {
        while let Some(Pending { work, outcome: Some(error) }) = self.pending.front().copied() {
            self.pending.pop_front();
            self.complete(work, Err(error));
        }
    }

    // ---- the end, and what comes after -------------------------------------------------------------

    /// Nothing more will be done. The first unanswered operation gets the cause; the later ones were not done, or nobody knows.
    fn give_up(&mut self, cause: Option<WorkError>) {
        self.broken = true;
        let mut cause = cause;
        let is_known = self.has_farewell || cause.is_none();
        for Pending { work, outcome } in std::mem::take(&mut self.pending) {
            let error = outcome.unwrap_or_else(|| {
                if is_known {
                    cause.take().unwrap_or(WorkError::Flushed)
                } else {
                    cause.unwrap_or(WorkError::Flushed)
                }
            });
            self.complete(work, Err(error));
        }
        self.requests.clear();
        self.outgoing.clear();
        self.sent = 0;
    }

    /// The connection is over. Make it anew and go on, or say what became of everything.
    fn recover(&mut self) {
        let deadline = Instant::now() + self.options.reconnect_time;
        while !self.has_farewell && !self.broken {
            match self.reconnect(deadline) {
                Ok(()) => return,
                Err(error) => {
                    let is_over = match &error {
                        EndpointError::Unreachable { source, .. } => {
                            source.kind() == io::ErrorKind::ConnectionRefused
                        }
                        EndpointError::Refused { reason, .. } => reason != TRY_AGAIN,
                        _ => true,
                    };
                    if is_over || Instant::now() >= deadline {
                        tracing::debug!(%error, "an endpoint cannot go on");
                        break;
                    }
                    std::thread::sleep(RETRY_EVERY);
                }
            }
        }
        // Without anything under way the next operation is told.
        let is_idle = self.pending.iter().all(|pending| pending.outcome.is_some());
        if !self.broken && !is_idle {
            self.give_up(Some(WorkError::PeerGone));
        }
        self.has_farewell = true;
    }

    fn reconnect(&mut self, deadline: Instant) -> Result<(), EndpointError> {
        let left = deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        let resume =
            Resume { session: self.session, answered: self.answered, heard: self.heard, taken: self.taken };
        let hello = Hello { who: self.who, encrypt: self.options.encrypt, resume: Some(resume) };
        let (stream, seal, welcome) = knock(self.address, &self.key, &hello, left.min(HANDSHAKE_TIME))?;
        let unanswered = self.pending.iter().filter(|pending| pending.outcome.is_none()).count() as u64;
        let done = welcome.done.checked_sub(self.answered).filter(|done| *done <= unanswered);
        let Some(done) = done else {
            let reason = "it says that it has done what was never asked".into();
            return Err(EndpointError::Protocol { address: self.address.to_string(), reason });
        };
        self.stream = stream;
        self.seal = welcome.encrypt.then_some(seal);
        self.requests.clear();
        self.outgoing.clear();
        self.sent = 0;
        self.filled = 0;
        self.opened.clear();
        self.reading = None;
        let again: Vec<Verb> = self
            .pending
            .iter()
            .filter(|pending| pending.outcome.is_none())
            .skip(usize::try_from(done).expect("fewer than are pending"))
            .map(|pending| pending.work.verb)
            .collect();
        again.iter().for_each(|verb| self.encode(verb));
        self.since = Instant::now();
        self.flush();
        Ok(())
    }

    /// Look for answers once.
    fn look(&mut self) {
        if self.broken {
            return;
        }
        self.settle_known();
        self.flush();
        if self.receive_some() {
            self.recover();
        } else if !self.pending.is_empty() && self.since.elapsed() > self.options.operation_time {
            self.settle_known();
            self.give_up(Some(WorkError::Timeout));
        }
    }
}

impl Endpoint for TcpEndpoint {
    fn post(&mut self, batch: &[Work]) -> Result<(), PostError> {
        if self.pending.is_empty() {
            self.since = Instant::now();
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
            let outcome = self.fault(&work.verb);
            if outcome.is_none() {
                self.encode(&work.verb);
            }
            self.pending.push_back(Pending { work: *work, outcome });
        }
        if !self.broken && self.has_farewell {
            self.settle_known();
            self.give_up(Some(WorkError::PeerGone));
        }
        self.settle_known();
        self.flush();
        if accepted == batch.len() { Ok(()) } else { Err(PostError::QueueFull { accepted }) }
    }

    fn poll(&mut self, out: &mut Vec<Completion>, max: usize) -> usize {
        if self.done.len() < max && !self.pending.is_empty() {
            self.look();
        }
        let count = self.done.len().min(max);
        out.extend(self.done.drain(..count));
        count
    }

    fn wait(&mut self, patience: Duration) {
        if !self.done.is_empty() || self.broken {
            return;
        }
        let mut polled = [PollFd::new(&self.stream, PollFlags::IN)];
        if self.sent < self.outgoing.len() {
            polled[0] = PollFd::new(&self.stream, PollFlags::IN | PollFlags::OUT);
        }
        let timeout = Timespec::try_from(patience).unwrap_or(Timespec { tv_sec: 1, tv_nsec: 0 });
        // Any outcome means: look.
        let _ = rustix::event::poll(&mut polled, Some(&timeout));
    }

    fn event_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.stream.as_fd())
    }

    fn register_local(&mut self, memory: Arc<Memory>) -> Result<LocalKey, EndpointError> {
        let limit = self.limits.local_regions_max;
        if self.locals.len() >= limit {
            return Err(EndpointError::TooManyLocal { limit });
        }
        self.locals.push(memory);
        let key = u32::try_from(self.locals.len());
        key.map(LocalKey).map_err(|_| EndpointError::TooManyLocal { limit })
    }

    fn receive(&mut self, out: &mut Vec<u8>) -> bool {
        if self.messages.is_empty() {
            self.look();
        }
        let Some(message) = self.messages.pop_front() else {
            return false;
        };
        out.extend_from_slice(&message);
        self.taken += 1;
        if !self.broken {
            self.put(Request::new(wire::CREDIT, 1));
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
}

impl Drop for TcpEndpoint {
    fn drop(&mut self) {
        if !self.broken && !self.has_farewell {
            self.put(Request::new(wire::BYE, 0));
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
