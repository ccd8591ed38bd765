//! A connection: its socket, and the bytes that have arrived or wait to be sent.

use std::io::IoSlice;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::buffer::spare_capacity;
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags};
use smallvec::SmallVec;

use super::Peer;
use super::acceptor::Accepted;
use super::tls::TlsStream;
use crate::commands::lookahead::{self, Hashes, REQUESTS_AHEAD};
use crate::commands::{Context, Replies, Session, Step};

/// Bytes that are received at a time. A request that is longer has a buffer of its own.
pub const INPUT_BYTES: usize = 32 << 10;
/// Parts of a message that the kernel takes at a time.
const PARTS_MAX: usize = 1024;

/// Bytes that have arrived.
#[derive(Debug, Default)]
pub struct Input {
    bytes: Vec<u8>,
    /// Bytes at the start that were used.
    used: usize,
}

impl Input {
    /// No bytes, in a buffer.
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
            // A value is as long as announced; a line grows by doubling.
            if missing > 1 { self.bytes.reserve_exact(missing) } else { self.bytes.reserve(missing) }
        }
    }
}

/// What the statistics show of a connection.
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
    socket: OwnedFd,
    tls: Option<Box<TlsStream>>,
    session: Session,
    /// Bytes that have arrived, except during a turn.
    pub input: Input,
    /// The least bytes that the next request has.
    needs: usize,
    /// Replies that the socket did not take, and how much of them was sent since.
    backlog: Vec<u8>,
    backlog_sent: usize,
    /// No more bytes come from the client.
    is_ended: bool,
    /// More bytes may have been decrypted than the input had room for.
    has_decrypted: bool,
    /// The connection is closed when its replies are sent.
    closes: bool,
    /// Requests are left that can be served in another turn.
    pub is_runnable: bool,
    /// The connection is one of those that are served in this turn.
    pub is_ready: bool,
    /// Whether the connection waits to send, not to receive.
    pub waits_to_send: bool,
    /// What the statistics show.
    pub report: Arc<ConnectionReport>,
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Connection {
    /// A connection that was accepted in this second.
    pub fn new(accepted: Accepted, now_s: u32) -> Self {
        let report = ConnectionReport {
            peer: accepted.peer,
            listener: accepted.listener,
            last_request_s: AtomicU32::new(now_s),
        };
        Self {
            socket: accepted.socket,
            tls: accepted.tls.map(Box::new),
            session: Session::default(),
            input: Input::default(),
            needs: 0,
            backlog: Vec::new(),
            backlog_sent: 0,
            is_ended: false,
            has_decrypted: false,
            closes: false,
            is_runnable: false,
            is_ready: false,
            waits_to_send: false,
            report: Arc::new(report),
        }
    }

    /// Receives what has arrived; returns how many bytes. A connection without a buffer gets one of
    /// these.
    pub fn receive(&mut self, buffers: &mut Vec<Vec<u8>>) -> u64 {
        if self.input.bytes.capacity() == 0 {
            self.input = Input::new(buffers.pop().unwrap_or_else(|| Vec::with_capacity(INPUT_BYTES)));
        }
        self.input.reserve(self.needs);
        if self.input.bytes.len() == self.input.bytes.capacity() {
            return 0;
        }
        if let Some(tls) = &mut self.tls {
            let before = self.input.bytes.len();
            match tls.receive(self.socket.as_fd(), &mut self.input.bytes) {
                Ok(is_open) => self.is_ended |= !is_open,
                Err(_) => {
                    self.is_ended = true;
                    self.closes = true;
                }
            }
            // More may be decrypted than there was room for, and no event will say so.
            self.has_decrypted = self.input.bytes.len() == self.input.bytes.capacity();
            return (self.input.bytes.len() - before) as u64;
        }
        loop {
            let room = spare_capacity(&mut self.input.bytes);
            match rustix::net::recv(&self.socket, room, RecvFlags::empty()) {
                Ok((received, _)) => {
                    self.is_ended |= received == 0;
                    return received as u64;
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return 0,
                Err(_) => {
                    self.is_ended = true;
                    self.input = Input::default();
                    return 0;
                }
            }
        }
    }

    /// Serves requests in `input`, which was taken from this connection; returns how many bytes of
    /// it were used.
    pub fn serve<'p>(
        &mut self,
        input: &'p Input,
        requests_max: usize,
        context: &Context<'p>,
        out: &mut Replies<'p>,
    ) -> usize {
        self.is_runnable = false;
        let bytes = input.unused();
        let (mut at, mut requests) = (0, 0);
        while at < bytes.len() && !self.closes {
            if requests == requests_max {
                self.is_runnable = true;
                context.access.counters.conn_yields.add(1);
                break;
            }
            if requests > 0 && requests.is_multiple_of(REQUESTS_AHEAD) {
                let mut hashes = Hashes::new();
                lookahead::collect(&bytes[at..], &mut hashes);
                lookahead::load(context.access.store, context.access.pin, &hashes);
            }
            match self.session.step(&bytes[at..], context, out) {
                Step::Used(used) => {
                    at += used;
                    requests += 1;
                }
                Step::Incomplete(needs) => {
                    self.needs = needs;
                    break;
                }
                Step::Full | Step::NoRoom => {
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

    /// Takes the input back after a turn that used some of its bytes.
    pub fn put_input(&mut self, mut input: Input, used: usize) {
        input.used += used;
        self.input = input;
    }

    /// Sends replies; returns how many bytes were sent. What the socket does not take is kept.
    pub fn send(&mut self, replies: &Replies<'_>) -> u64 {
        debug_assert!(!self.has_backlog());
        if replies.is_empty() {
            return 0;
        }
        let parts = replies.parts();
        if let Some(tls) = &mut self.tls {
            if tls.send(self.socket.as_fd(), &parts).is_err() {
                self.is_ended = true;
                self.closes = true;
            }
            return replies.len() as u64;
        }
        let sent = self.send_parts(&parts);
        if sent < replies.len() && !self.is_broken() {
            self.backlog = replies.rest(sent);
            self.backlog_sent = 0;
        }
        sent as u64
    }

    /// Sends what the socket did not take before; returns how many bytes were sent.
    pub fn send_backlog(&mut self) -> u64 {
        if let Some(tls) = &mut self.tls {
            if tls.flush(self.socket.as_fd()).is_err() {
                self.is_ended = true;
                self.closes = true;
            }
            self.is_runnable |= !self.input.unused().is_empty();
            return 0;
        }
        if self.backlog.is_empty() {
            return 0;
        }
        let backlog = std::mem::take(&mut self.backlog);
        let sent = self.send_parts(&[&backlog[self.backlog_sent..]]);
        self.backlog_sent += sent;
        if self.backlog_sent < backlog.len() && !self.is_broken() {
            self.backlog = backlog;
        } else if !self.input.unused().is_empty() {
            self.is_runnable = true;
        }
        sent as u64
    }

    fn send_parts(&mut self, parts: &[&[u8]]) -> usize {
        let sent = if let [part] = parts {
            retry(|| rustix::net::send(&self.socket, part, SendFlags::NOSIGNAL))
        } else {
            let slices: SmallVec<[IoSlice<'_>; 8]> =
                parts.iter().take(PARTS_MAX).map(|part| IoSlice::new(part)).collect();
            retry(|| rustix::io::writev(&self.socket, &slices))
        };
        match sent {
            Ok(sent) => sent,
            Err(Errno::AGAIN) => 0,
            Err(_) => {
                self.is_ended = true;
                self.closes = true;
                0
            }
        }
    }

    fn is_broken(&self) -> bool {
        self.is_ended && self.closes
    }

    /// Whether replies wait until the socket takes them.
    pub fn has_backlog(&self) -> bool {
        !self.backlog.is_empty()
            || !self.is_broken() && self.tls.as_ref().is_some_and(|tls| tls.has_backlog())
    }

    /// Whether bytes can be received without an event of the socket.
    pub fn has_decrypted(&self) -> bool {
        self.has_decrypted && !self.is_ended
    }

    /// Whether the connection has ended, or is to be closed, and nothing is left to do.
    pub fn is_over(&self) -> bool {
        (self.closes || self.is_ended && !self.is_runnable) && !self.has_backlog()
    }
}

fn retry<T>(mut call: impl FnMut() -> rustix::io::Result<T>) -> rustix::io::Result<T> {
    loop {
        match call() {
            Err(Errno::INTR) => {}
            other => return other,
        }
    }
}
