//! A connection of a client: its socket, and the bytes that were received.

use std::mem;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use super::Peer;
use super::acceptor::Accepted;
use super::peers::links::{FrameEnd, Waiter};
use super::peers::waiting::{ForwardingState, PeerAccess, Resumed};
use super::stream::{Security, Stream};
use crate::commands::lookahead::{self, Hashes, REQUESTS_AHEAD};
use crate::commands::{Context, Replies, Session, Step};
use crate::store::Until;

/// Bytes that are received at a time. The buffer grows for a longer request.
pub const INPUT_BYTES: usize = 32 << 10;

/// Bytes that were received.
#[derive(Debug, Default)]
pub struct Input {
    bytes: Vec<u8>,
    /// The bytes at the start that were used.
    used: usize,
}

impl Input {
    /// An empty input in a buffer.
    pub fn new(buffer: Vec<u8>) -> Self {
        debug_assert!(buffer.is_empty());
        Self { bytes: buffer, used: 0 }
    }

    /// The bytes that were not used.
    #[inline]
    pub fn unused(&self) -> &[u8] {
        &self.bytes[self.used..]
    }

    /// The buffer, if all bytes were used.
    pub fn into_buffer(mut self) -> Option<Vec<u8>> {
        if self.used < self.bytes.len() {
            return None;
        }
        self.bytes.clear();
        Some(self.bytes)
    }

    /// Makes room for a request of this length.
    fn reserve(&mut self, len: usize) {
        if self.used > 0 && self.bytes.capacity() - self.used < len.max(INPUT_BYTES / 2) {
            self.bytes.drain(..self.used);
            self.used = 0;
        }
        let missing = len.saturating_sub(self.bytes.len() - self.used);
        if self.bytes.capacity() - self.bytes.len() < missing {
            // The length of a value is known; the buffer of a line doubles.
            if missing > 1 { self.bytes.reserve_exact(missing) } else { self.bytes.reserve(missing) }
        }
    }
}

/// The fields of a connection that the statistics show.
#[derive(Debug)]
pub struct ConnectionReport {
    /// The other end.
    pub peer: Peer,
    /// The number of the listening socket.
    pub listener: usize,
    /// The second of the last request.
    pub last_request_s: AtomicU32,
}

/// A connection.
#[derive(Debug)]
pub struct Connection {
    /// The socket.
    pub stream: Stream,
    /// A number that distinguishes the connection from others that had its place before.
    serial: u64,
    session: Session,
    forwarding: ForwardingState,
    /// The received bytes, except during a turn.
    pub input: Input,
    /// The least length of the next request in bytes.
    needs: usize,
    /// Whether the connection is closed once its replies are sent.
    closes: bool,
    /// Whether the next request waits for items of the pool, or has waited for them.
    waits_for_items: bool,
    /// Whether requests remain that can be served in another turn.
    pub is_runnable: bool,
    /// Whether the connection is queued for the next turn.
    pub is_ready: bool,
    /// The socket events for which the worker waits.
    pub waits_for: WaitsFor,
    /// The fields that the statistics show.
    pub report: Arc<ConnectionReport>,
}

/// The socket events of a connection for which a worker waits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum WaitsFor {
    /// Bytes of requests.
    Requests,
    /// Room to send.
    Room,
    /// None: requests wait for other servers, and the input is full or has ended.
    Nothing,
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

impl Connection {
    /// A connection that was accepted in second `now_s`. Its requests wait for a server of their
    /// partition for at most `partition_timeout`.
    pub fn new(accepted: Accepted, serial: u64, now_s: u32, partition_timeout: Duration) -> Self {
        let report = ConnectionReport {
            peer: accepted.peer,
            listener: accepted.listener,
            last_request_s: AtomicU32::new(now_s),
        };
        let security = accepted.tls.map_or(Security::Plain, |tls| Security::Tls(Box::new(tls)));
        Self {
            stream: Stream::new(accepted.socket, security),
            serial,
            session: Session::default(),
            forwarding: ForwardingState::new(partition_timeout),
            input: Input::default(),
            needs: 0,
            closes: false,
            waits_for_items: false,
            is_runnable: false,
            is_ready: false,
            waits_for: WaitsFor::Requests,
            report: Arc::new(report),
        }
    }

    /// Receives bytes from the socket; returns their number. A connection without a buffer gets one
    /// of `buffers`.
    pub fn receive(&mut self, buffers: &mut Vec<Vec<u8>>) -> u64 {
        if self.input.bytes.capacity() == 0 {
            self.input = Input::new(buffers.pop().unwrap_or_else(|| Vec::with_capacity(INPUT_BYTES)));
        }
        self.input.reserve(self.needs);
        if self.is_full() {
            return 0;
        }
        let received = self.stream.receive(&mut self.input.bytes);
        if self.stream.is_ended && self.input.bytes.is_empty() {
            self.input = Input::default();
        }
        received
    }

    /// Whether the input has no room for more bytes.
    fn is_full(&self) -> bool {
        self.input.bytes.capacity() != 0 && self.input.bytes.len() == self.input.bytes.capacity()
    }

    /// Notes the end of a frame with requests of this connection. Returns whether the connection
    /// can continue.
    pub fn note_frame_end(&mut self, waiter: Waiter, frame: u64, end: FrameEnd) -> bool {
        waiter.serial == self.serial && self.forwarding.note_end(frame, end)
    }

    /// Whether the connection must be retried at intervals, because no event ends its wait.
    pub fn must_retry(&self) -> bool {
        self.forwarding.must_retry()
    }

    /// The connection as the waiter of a frame, where `number` is its place in the worker.
    pub fn waiter(&self, number: usize) -> Waiter {
        Waiter { number, serial: self.serial }
    }

    /// Serves requests in `input`, which was taken from this connection; returns the number of used
    /// bytes.
    pub fn serve<'p>(
        &mut self,
        input: &'p Input,
        requests_max: usize,
        context: &Context<'p>,
        peer_access: &mut PeerAccess<'_>,
        out: &mut Replies<'p>,
    ) -> usize {
        self.is_runnable = false;
        let counters = context.access.counters;
        let bytes = input.unused();
        let (mut at, mut requests) = (0, 0);
        let mut resumed =
            self.forwarding.resume(&mut peer_access.turn(bytes, &mut self.session, context, out));
        loop {
            match resumed {
                Resumed::Used(used) => at += used,
                Resumed::Waits => break,
                Resumed::Closes => self.closes = true,
            }
            resumed = Resumed::Used(0);
            if at >= bytes.len() || self.closes {
                break;
            }
            if requests == requests_max {
                self.is_runnable = true;
                counters.conn_yields.add(1);
                break;
            }
            if requests > 0 && requests.is_multiple_of(REQUESTS_AHEAD) {
                let mut hashes = Hashes::new();
                lookahead::collect(context.access.store, &bytes[at..], &mut hashes);
                lookahead::load(context.access.store, &hashes);
            }
            let hits_before = counters.get_hits.get();
            match self.session.step(&bytes[at..], context, out) {
                Step::Used(used) => {
                    at += used;
                    requests += 1;
                    if mem::take(&mut self.waits_for_items) {
                        counters.fetched_hits.add(counters.get_hits.get() - hits_before);
                    }
                    self.forwarding.note_served();
                }
                Step::Elsewhere { partition, len } => {
                    requests += 1;
                    self.waits_for_items = false;
                    let mut turn = peer_access.turn(&bytes[at..], &mut self.session, context, out);
                    resumed = self.forwarding.forward((partition, len), &mut turn);
                }
                Step::Scatter => {
                    requests += 1;
                    self.waits_for_items = false;
                    let Some(scatter) = self.session.pop_scatter() else { break };
                    let mut turn = peer_access.turn(&bytes[at..], &mut self.session, context, out);
                    resumed = self.forwarding.scatter(scatter, &mut turn);
                }
                Step::Incomplete(needs) => {
                    self.needs = needs;
                    break;
                }
                Step::Again(Until::Fetched) => {
                    self.forwarding.wait_for_fetch();
                    self.waits_for_items = true;
                    break;
                }
                Step::Again(Until::NextTurn) => {
                    self.is_runnable = true;
                    break;
                }
                Step::Close => self.closes = true,
            }
        }
        if at == bytes.len() {
            self.needs = 0;
        }
        if requests > 0 {
            self.report.last_request_s.store(context.access.now_s, Ordering::Relaxed);
        }
        at
    }

    /// Puts the input back after a turn that used some of its bytes.
    pub fn put_input(&mut self, mut input: Input, used: usize) {
        input.used += used;
        self.input = input;
    }

    /// Sends replies; returns the number of sent bytes. Bytes that the socket does not accept are
    /// kept.
    pub fn send(&mut self, replies: &Replies<'_>) -> u64 {
        if replies.is_empty() { 0 } else { self.stream.send(&replies.parts()) }
    }

    /// Sends the bytes that the socket did not accept before; returns the number of sent bytes.
    pub fn send_backlog(&mut self) -> u64 {
        let sent = self.stream.send_backlog();
        if !self.stream.has_backlog() && !self.input.unused().is_empty() {
            self.is_runnable = true;
        }
        sent
    }

    /// Whether bytes can be received without an event of the socket.
    pub fn has_decrypted(&self) -> bool {
        self.stream.has_decrypted() && self.forwarding.waiting.is_none()
    }

    /// The socket events for which the worker must wait from now on.
    pub fn next_wait(&self) -> WaitsFor {
        if self.stream.has_backlog() {
            WaitsFor::Room
        } else if self.forwarding.waiting.is_some() && (self.is_full() || self.stream.is_ended) {
            WaitsFor::Nothing
        } else {
            WaitsFor::Requests
        }
    }

    /// Whether the connection has ended or must be closed, and no work for it remains.
    pub fn is_over(&self) -> bool {
        if self.stream.is_broken {
            return true;
        }
        let is_done = self.stream.is_ended && !self.is_runnable && self.forwarding.waiting.is_none();
        (self.closes || is_done) && !self.stream.has_backlog()
    }
}
