//! The target's end of one session: a state machine that parses requests, accesses memory and
//! produces answers. It does no I/O.
//!
//! A session outlives a broken connection for a while. An initiator that resumes it says how many
//! answers it has, and receives the rest.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::sync::{Arc, OnceLock};

use zerocopy::{FromBytes, IntoBytes};

use super::reply::AnswerBuffer;
use super::target::{RegionMapping, TcpPeer, TcpShared};
use super::wire::{self, AnswerHead, REQUEST_BYTES, RequestHead, padded};
use crate::control::FENCED;
use crate::handshake::hello::Resume;
use crate::keys::{KeyGrant, Right};
use crate::memory::{copy, u64_from};
use crate::target::Identity;
use crate::work::{Key, WorkError};

/// No further request is served while this many bytes of answers wait to be sent.
pub(super) const ANSWERS_BYTES_MAX: usize = 512 << 10;

/// The peer violated the protocol.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct ProtocolViolation(pub &'static str);

/// The record of an answer, by which it can be sent again.
#[derive(Clone, Copy, Debug)]
struct SentAnswer {
    outcome: Result<u64, WorkError>,
    /// The READ, to be repeated: it changes nothing.
    read: Option<RequestHead>,
}

/// The part of a request that the parser expects next.
#[derive(Debug)]
enum ParserState {
    RequestHead,
    /// More bytes of a WRITE.
    Bytes {
        request: RequestHead,
        taken: u32,
        outcome: Result<u64, WorkError>,
    },
    /// More bytes of a message.
    Message {
        len: u32,
        bytes: Vec<u8>,
    },
    /// The new value of a compare-and-swap.
    Word(RequestHead),
}

/// The state of one session.
#[derive(Debug)]
pub(super) struct TcpSession {
    pub who: Identity,
    pub slot: usize,
    pub peer: Arc<TcpPeer>,
    shared: Arc<TcpShared>,
    next: ParserState,
    /// Number of requests that are done.
    done: u64,
    /// The most recent answers, as many as an initiator can lack.
    sent_answers: VecDeque<SentAnswer>,
    /// Whether the initiator has ended the session.
    pub has_said_bye: bool,
    /// Bytes and requests since the last [`Self::drain_counters`].
    work: (u64, u64),
}

impl TcpSession {
    pub fn new(shared: &Arc<TcpShared>, peer: &Arc<TcpPeer>, slot: usize) -> Self {
        Self {
            who: peer.who,
            slot,
            peer: Arc::clone(peer),
            shared: Arc::clone(shared),
            next: ParserState::RequestHead,
            done: 0,
            sent_answers: VecDeque::with_capacity(shared.options.limits.queue_depth),
            has_said_bye: false,
            work: (0, 0),
        }
    }

    /// The number of requests that are done.
    pub fn done(&self) -> u64 {
        self.done
    }

    /// Takes the bytes and requests since the last call, and adds them to the session's counters.
    pub fn drain_counters(&mut self) -> (u64, u64) {
        let (bytes, operations) = std::mem::take(&mut self.work);
        self.peer.own.counters.add(bytes, operations);
        (bytes, operations)
    }

    /// Appends the next unsent message to `out`. Returns false if there is none.
    pub fn next_message(&self, out: &mut Vec<u8>) -> bool {
        self.peer.mailbox.send_next(|_, message| {
            let len = u32::try_from(message.len()).expect("bounded by the limits");
            out.extend_from_slice(AnswerHead::new(wire::MESSAGE, Ok(0), len).as_bytes());
            out.extend_from_slice(message);
            out.resize(out.len() + padded(len) - message.len(), 0);
        })
    }

    /// Discards a partly received request after the connection broke.
    pub fn discard_partial(&mut self) {
        self.next = ParserState::RequestHead;
    }

    /// Resumes after a broken connection, and appends the answers that the initiator lacks. Returns
    /// false if the position is impossible.
    pub fn resume(&mut self, resume: &Resume, out: &mut AnswerBuffer) -> bool {
        let Some(lacking) =
            self.done.checked_sub(resume.answered).and_then(|lacking| usize::try_from(lacking).ok())
        else {
            return false;
        };
        if lacking > self.sent_answers.len() || !self.peer.mailbox.resume(resume.received, resume.taken) {
            return false;
        }
        for at in self.sent_answers.len() - lacking..self.sent_answers.len() {
            let SentAnswer { outcome, read } = self.sent_answers[at];
            match read {
                // The READ may fail now, because its key may have been invalidated since.
                Some(request) => drop(self.read(&request, out)),
                None => out.put(AnswerHead::new(wire::ANSWER, outcome, 0).as_bytes()),
            }
        }
        true
    }

    /// Serves the requests in `input` and appends the answers to `out`. Returns the number of bytes
    /// used, a multiple of 8.
    ///
    /// The remaining bytes must be passed again, with more behind them, or after borrowed ranges in
    /// `out` were sent. The slot's `active` word must be odd during the call, and until borrowed
    /// ranges were sent.
    pub fn feed(&mut self, input: &[u8], out: &mut AnswerBuffer) -> Result<usize, ProtocolViolation> {
        let mut at = 0;
        while out.len() < ANSWERS_BYTES_MAX && !self.has_said_bye {
            let used = self.step(&input[at..], out)?;
            if used == 0 {
                break;
            }
            at += used;
        }
        Ok(at)
    }

    fn step(&mut self, input: &[u8], out: &mut AnswerBuffer) -> Result<usize, ProtocolViolation> {
        match &mut self.next {
            ParserState::RequestHead => {
                let Ok((request, rest)) = RequestHead::read_from_prefix(input) else {
                    return Ok(0);
                };
                // A request that changes memory, or sends a message to a program that may change
                // it, must come after the borrowed READs before it.
                if request.kind != wire::READ && out.has_borrowed() {
                    return Ok(0);
                }
                Ok(REQUEST_BYTES + self.begin(request, rest, out)?)
            }
            ParserState::Word(request) => {
                let Ok((desired, _)) = u64::read_from_prefix(input) else {
                    return Ok(0);
                };
                let request = *request;
                let expected = request.value.get();
                let outcome = self.word(&request).map(|word| {
                    let swapped = word.compare_exchange(
                        expected,
                        u64::from_le(desired),
                        Ordering::SeqCst,
                        Ordering::SeqCst,
                    );
                    swapped.unwrap_or_else(|found| found)
                });
                self.next = ParserState::RequestHead;
                self.answer(outcome, out);
                Ok(8)
            }
            ParserState::Message { len, bytes } => {
                let left = padded(*len) - bytes.len();
                let take = left.min(input.len() & !7);
                bytes.extend_from_slice(&input[..take]);
                if take == left {
                    bytes.truncate(*len as usize);
                    let message = std::mem::take(bytes);
                    self.next = ParserState::RequestHead;
                    let outcome = self.deliver(message);
                    self.answer(outcome, out);
                }
                Ok(take)
            }
            ParserState::Bytes { .. } => Ok(self.write_some(input, out)),
        }
    }

    /// Begins a request. Returns the number of bytes of `rest`, which follows the head, that were
    /// used.
    fn begin(
        &mut self,
        request: RequestHead,
        rest: &[u8],
        out: &mut AnswerBuffer,
    ) -> Result<usize, ProtocolViolation> {
        let limits = &self.shared.options.limits;
        let len = request.len.get();
        match request.kind {
            wire::READ if len <= limits.transfer_bytes_max => {
                let outcome = self.read(&request, out);
                self.record(SentAnswer { outcome, read: outcome.is_ok().then_some(request) });
            }
            wire::WRITE if len <= limits.transfer_bytes_max => {
                self.next = ParserState::Bytes { request, taken: 0, outcome: Ok(u64::from(len)) };
                // Mostly all bytes have arrived, and the key is checked only once.
                return Ok(self.write_some(rest, out));
            }
            wire::SWAP => self.next = ParserState::Word(request),
            wire::ADD => {
                let add = request.value.get();
                let outcome = self.word(&request).map(|word| word.fetch_add(add, Ordering::SeqCst));
                self.answer(outcome, out);
            }
            wire::SEND if len <= limits.message_bytes_max => {
                if len == 0 {
                    let outcome = self.deliver(Vec::new());
                    self.answer(outcome, out);
                } else {
                    self.next = ParserState::Message { len, bytes: Vec::with_capacity(padded(len)) };
                }
            }
            wire::CREDIT => {
                if !self.peer.mailbox.credit(u64::from(len)) {
                    return Err(ProtocolViolation("more messages were taken than were sent"));
                }
            }
            wire::BYE => self.has_said_bye = true,
            wire::READ | wire::WRITE | wire::SEND => {
                return Err(ProtocolViolation("a request is longer than the limits"));
            }
            _ => return Err(ProtocolViolation("a request has an unknown kind")),
        }
        Ok(0)
    }

    /// Answers a READ. Returns its outcome.
    fn read(&mut self, request: &RequestHead, out: &mut AnswerBuffer) -> Result<u64, WorkError> {
        let len = request.len.get();
        let from = match self.locate(request, request.addr.get(), u64::from(len), Right::Read) {
            Ok(from) => from,
            Err(error) => {
                out.put(AnswerHead::new(wire::ANSWER, Err(error), 0).as_bytes());
                return Err(error);
            }
        };
        let outcome = Ok(u64::from(len));
        self.work.0 += u64::from(len);
        out.put(AnswerHead::new(wire::ANSWER, outcome, len).as_bytes());
        // SAFETY: `locate` proved the source to be inside a mapping that `shared` holds; borrowed
        // ranges are sent before `active` is even again.
        unsafe { out.read(from, len as usize, padded(len)) };
        // Later operations of this session must come after this one.
        fence(Ordering::AcqRel);
        outcome
    }

    /// Writes the received part of a WRITE. The key is checked for each part, because it may have
    /// been invalidated in between.
    fn write_some(&mut self, input: &[u8], out: &mut AnswerBuffer) -> usize {
        let ParserState::Bytes { request, taken, outcome } = &self.next else {
            unreachable!("the caller looked");
        };
        let (request, taken, mut outcome) = (*request, *taken, *outcome);
        let len = request.len.get();
        let left = padded(len) - taken as usize;
        let take = left.min(input.len() & !7);
        let bytes = take.min((len - taken) as usize);
        // The whole range is checked, so that nothing is written if a part is not permitted.
        let to =
            outcome.and_then(|_| self.locate(&request, request.addr.get(), u64::from(len), Right::Write));
        match to {
            Ok(to) => {
                fence(Ordering::AcqRel);
                // SAFETY: `locate` proved all `len` bytes to be inside a mapping that `shared`
                // holds, and `taken + bytes` is at most `len`.
                unsafe { copy(to.add(taken as usize), input.as_ptr(), bytes) };
                fence(Ordering::AcqRel);
                self.work.0 += u64_from(bytes);
            }
            Err(error) => outcome = Err(error),
        }
        if take == left {
            self.next = ParserState::RequestHead;
            self.answer(outcome, out);
        } else {
            let taken = taken + u32::try_from(take).expect("below the request's length");
            self.next = ParserState::Bytes { request, taken, outcome };
        }
        take
    }

    fn deliver(&self, message: Vec<u8>) -> Result<u64, WorkError> {
        self.check_fence()?;
        let len = u64_from(message.len());
        if let Some(handler) = self.shared.handler.get() {
            let mut answer = Vec::new();
            handler.handle(self.peer.who, &message, &mut answer);
            let limits = &self.shared.options.limits;
            // Sent in this turn of the thread, after the answers to requests.
            let is_posted = answer.len() <= limits.message_bytes_max as usize
                && self.peer.mailbox.post(&answer, limits.receive_depth);
            return if is_posted { Ok(len) } else { Err(WorkError::ReceiverNotReady) };
        }
        let stamp = self.shared.control.next_stamp();
        if self.peer.mailbox.deliver(stamp, message, self.shared.options.limits.receive_depth) {
            Ok(len)
        } else {
            Err(WorkError::ReceiverNotReady)
        }
    }

    fn answer(&mut self, outcome: Result<u64, WorkError>, out: &mut AnswerBuffer) {
        out.put(AnswerHead::new(wire::ANSWER, outcome, 0).as_bytes());
        self.record(SentAnswer { outcome, read: None });
    }

    fn record(&mut self, sent_answers: SentAnswer) {
        if self.sent_answers.len() == self.shared.options.limits.queue_depth {
            self.sent_answers.pop_front();
        }
        self.work.1 += 1;
        self.sent_answers.push_back(sent_answers);
        self.done += 1;
    }

    fn check_fence(&self) -> Result<(), WorkError> {
        if self.shared.control.state(self.slot) == FENCED { Err(WorkError::Fenced) } else { Ok(()) }
    }

    /// The address of a remote range, if the key opens it.
    #[inline]
    fn locate(&self, request: &RequestHead, addr: u64, len: u64, right: Right) -> Result<*mut u8, WorkError> {
        self.check_fence()?;
        let grant = self.grant(Key(request.key.get()), addr).ok_or(WorkError::RemoteAccess)?;
        grant.check(self.who, right, addr, len)?;
        let mapping = self.shared.memories.get(grant.region).and_then(|mapping| mapping.get());
        let RegionMapping { base, memory, .. } = mapping.ok_or(WorkError::RemoteAccess)?;
        let offset = addr.checked_sub(*base).ok_or(WorkError::RemoteAccess)?;
        memory.pointer(offset, len).ok_or(WorkError::RemoteAccess)
    }

    /// The range that a key opens at an address.
    #[inline]
    fn grant(&self, key: Key, addr: u64) -> Option<KeyGrant> {
        if !key.is_table_key() {
            return self.shared.control.lookup(key);
        }
        let holds = |mapping: &&RegionMapping| mapping.table.as_ref().is_some_and(|table| table.holds(addr));
        let mapping = self.shared.memories.iter().map_while(OnceLock::get).find(holds)?;
        mapping.table.as_ref()?.grant(&mapping.memory, self.who, key, addr)
    }

    #[inline]
    fn word(&self, request: &RequestHead) -> Result<&AtomicU64, WorkError> {
        let addr = request.addr.get();
        if !addr.is_multiple_of(8) {
            return Err(WorkError::Misaligned);
        }
        let word = self.locate(request, addr, 8, Right::Atomic)?.cast::<u64>();
        // SAFETY: inside a mapping that `shared` holds; aligned, because regions begin at multiples
        // of 8 in both address spaces.
        Ok(unsafe { AtomicU64::from_ptr(word) })
    }
}
