//! A connection of a serving thread: its buffers, and the bytes that it receives and sends.

use std::os::fd::OwnedFd;
use std::sync::atomic::{Ordering, fence};
use std::time::Instant;

use aquifer_secure_channel::RecordCipher;
use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::net::{RecvFlags, SendFlags};

use super::reply::AnswerBuffer;
use super::serve::AcceptedConnection;
use super::session::{ANSWERS_BYTES_MAX, ProtocolViolation, TcpSession};
use super::target::TcpShared;

/// Size of the input buffer during a turn. Requests that arrive together are served together.
const INPUT_BYTES: usize = 256 << 10;

/// A connection and its session.
pub(super) struct ServedConnection {
    pub socket: OwnedFd,
    pub session: TcpSession,
    cipher: Option<RecordCipher>,
    /// Received bytes, possibly encrypted. As long as the whole buffer during a turn, and as long
    /// as the bytes that are left otherwise.
    input: Vec<u8>,
    filled: usize,
    /// The decrypted input of an encrypted connection.
    opened: Vec<u8>,
    /// Answers that are to be sent next.
    pub answers: AnswerBuffer,
    /// Bytes that are being sent.
    outgoing: Vec<u8>,
    sent: usize,
    /// The events that epoll reports for the connection.
    interest: EventFlags,
    /// Set while the tenant has exceeded its rate.
    pub paused_until: Option<Instant>,
}

/// The buffers that a connection uses during its turn. A connection keeps only those with bytes
/// that wait, so that thousands of idle connections take little memory.
#[derive(Default)]
pub(super) struct TurnBuffers {
    input: Vec<u8>,
    opened: Vec<u8>,
    answers: AnswerBuffer,
    outgoing: Vec<u8>,
}

impl ServedConnection {
    pub fn new(accepted: AcceptedConnection) -> Self {
        let mut answers = AnswerBuffer::default();
        answers.put(&accepted.answers);
        Self {
            socket: accepted.socket,
            session: accepted.session,
            cipher: accepted.cipher,
            input: Vec::new(),
            filled: 0,
            opened: Vec::new(),
            answers,
            outgoing: Vec::new(),
            sent: 0,
            interest: EventFlags::IN,
            paused_until: None,
        }
    }

    /// Replaces empty buffers by the thread's. Does nothing if the turn has begun.
    pub fn begin_turn(&mut self, buffers: &mut TurnBuffers) {
        if self.input.len() < INPUT_BYTES {
            let mut input = std::mem::take(&mut buffers.input);
            input.resize(INPUT_BYTES, 0);
            input[..self.filled].copy_from_slice(&self.input[..self.filled]);
            self.input = input;
        }
        for (own, spare) in
            [(&mut self.opened, &mut buffers.opened), (&mut self.outgoing, &mut buffers.outgoing)]
        {
            if own.is_empty() {
                std::mem::swap(own, spare);
            }
        }
        if self.answers.is_empty() {
            std::mem::swap(&mut self.answers, &mut buffers.answers);
        }
    }

    /// Returns the empty buffers to the thread.
    pub fn end_turn(&mut self, buffers: &mut TurnBuffers) {
        let left = self.input[..self.filled].to_vec();
        let input = std::mem::replace(&mut self.input, left);
        if input.len() == INPUT_BYTES {
            buffers.input = input;
        }
        if self.sent == self.outgoing.len() {
            self.outgoing.clear();
            self.sent = 0;
        }
        for (own, spare) in
            [(&mut self.opened, &mut buffers.opened), (&mut self.outgoing, &mut buffers.outgoing)]
        {
            if own.is_empty() {
                *spare = std::mem::take(own);
            }
        }
        if self.answers.is_empty() {
            buffers.answers = std::mem::take(&mut self.answers);
        }
    }

    /// Serves the received requests. Returns the bytes and operations, or the reason if the peer
    /// violated the protocol.
    pub fn serve(&mut self, shared: &TcpShared) -> Result<(u64, u64), &'static str> {
        let session = &mut self.session;
        // A thread that invalidates a key clears it, then waits until it has seen this word even or
        // changed.
        let active = shared.control.active(session.slot);
        let sequence = active.load(Ordering::Relaxed).wrapping_add(1);
        active.store(sequence, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        let served = match &mut self.cipher {
            None => self.serve_plain().map(|used| (used, 0)),
            Some(cipher) => {
                let used = if self.opened.len() < INPUT_BYTES {
                    cipher.decrypt(&self.input[..self.filled], &mut self.opened)
                } else {
                    Ok(0)
                };
                match used {
                    Ok(used) => session.feed(&self.opened, &mut self.answers).map(|fed| (used, fed)),
                    Err(_) => Err(ProtocolViolation("a record cannot be decrypted")),
                }
            }
        };
        active.store(sequence.wrapping_add(1), Ordering::Release);
        let work = self.session.drain_counters();
        let (used, fed) = served.map_err(|nonsense| nonsense.0)?;
        self.input.copy_within(used..self.filled, 0);
        self.filled -= used;
        self.opened.drain(..fed);
        Ok(work)
    }

    /// Serves a connection without encryption. Returns the number of input bytes used. `active`
    /// must be odd.
    fn serve_plain(&mut self) -> Result<usize, ProtocolViolation> {
        let mut at = 0;
        loop {
            // Answers must not overtake output that waits.
            self.answers.allow_borrowing(self.sent == self.outgoing.len() && self.answers.is_empty());
            at += self.session.feed(&self.input[at..self.filled], &mut self.answers)?;
            if !self.answers.has_borrowed() {
                return Ok(at);
            }
            self.outgoing.clear();
            self.sent = 0;
            // SAFETY: `active` has been odd since the ranges were borrowed, so no region was
            // removed.
            unsafe { self.answers.send_borrowed(&self.socket, &mut self.outgoing) };
        }
    }

    /// Receives if the connection may be served now. Returns whether the peer has closed it, or
    /// `None` if nothing has arrived.
    pub fn try_receive(&mut self) -> Option<bool> {
        let filled = self.filled;
        let is_closed = self.interest.contains(EventFlags::IN) && self.receive();
        (is_closed || self.filled > filled).then_some(is_closed)
    }

    /// Receives as much as there is room for. Returns true if the connection is over.
    pub fn receive(&mut self) -> bool {
        let room = &mut self.input[self.filled..];
        if room.is_empty() {
            return false;
        }
        match rustix::net::recv(&self.socket, room, RecvFlags::DONTWAIT) {
            Ok((_, 0)) => true,
            Ok((_, bytes)) => {
                self.filled += bytes;
                false
            }
            Err(error) => !matches!(error, rustix::io::Errno::INTR | rustix::io::Errno::AGAIN),
        }
    }

    /// Sends as much as the kernel accepts. Returns true if the connection is over.
    pub fn send(&mut self) -> bool {
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        while self.prepare_sending() {
            match rustix::net::send(&self.socket, &self.outgoing[self.sent..], flags) {
                Ok(bytes) => self.sent += bytes,
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return error != rustix::io::Errno::AGAIN,
            }
        }
        false
    }

    pub fn has_sent_all(&self) -> bool {
        self.sent == self.outgoing.len() && self.answers.is_empty()
    }

    /// Selects the events that can be handled now. Nothing is received while there is no room for
    /// its answers.
    pub fn update_interest(
        &mut self,
        epoll: &OwnedFd,
        at: usize,
        is_stopping: bool,
    ) -> rustix::io::Result<()> {
        let mut interest = EventFlags::empty();
        let is_stalled = self.answers.len() >= ANSWERS_BYTES_MAX;
        interest.set(EventFlags::IN, !is_stopping && !is_stalled && self.paused_until.is_none());
        interest.set(EventFlags::OUT, !self.has_sent_all());
        if interest != self.interest {
            self.interest = interest;
            epoll::modify(epoll, &self.socket, EventData::new_u64(at as u64), interest)?;
        }
        Ok(())
    }

    /// Moves answers to the output, encrypted if necessary. Returns whether there is output.
    fn prepare_sending(&mut self) -> bool {
        if self.sent < self.outgoing.len() {
            return true;
        }
        self.outgoing.clear();
        self.sent = 0;
        match &mut self.cipher {
            None => std::mem::swap(&mut self.outgoing, self.answers.bytes()),
            Some(cipher) => {
                cipher.encrypt(self.answers.bytes(), &mut self.outgoing);
                self.answers.bytes().clear();
            }
        }
        !self.outgoing.is_empty()
    }
}
