//! The target's end of one session: a state machine that parses requests, accesses memory and
//! produces answers. It does no I/O.
//!
//! A session outlives a broken connection for [`crate::handshake::PARKED_TIMEOUT`]. An initiator
//! that resumes it sends the number of answers that it has received, and receives the rest.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering, fence};

use zerocopy::{FromBytes, IntoBytes};

use super::regions::{RegionMapping, TableIndex};
use super::reply::AnswerBuffer;
use super::target::{TcpPeer, TcpShared};
use super::wire::{self, AnswerHead, REQUEST_BYTES, RequestHead, padded};
use crate::control::FENCED;
use crate::handshake::hello::Resume;
use crate::keys::{KeyGrant, Right};
use crate::memory::{copy, u64_from};
use crate::page_store::PageStore;
use crate::target::Identity;
use crate::unit_map::RegionMemory;
use crate::work::{Key, WorkError};

/// Bound of the bytes of answers that wait to be sent. Above it no further request is served.
pub(super) const ANSWERS_BYTES_MAX: usize = 512 << 10;

/// A violation of the protocol by the peer.
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
    pub is_ended: bool,
    /// Bytes and requests since the last [`Self::drain_counters`].
    work: (u64, u64),
    tables: TableIndex,
    /// Whether a WRITE was done since the last READ. The READ must not overtake it.
    has_written: bool,
    /// The received bytes of a WRITE to a [`crate::PageStore`], which writes all of them together.
    assembled: Vec<u8>,
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
            sent_answers: VecDeque::new(),
            is_ended: false,
            work: (0, 0),
            tables: TableIndex::default(),
            has_written: false,
            assembled: Vec::new(),
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
        self.assembled = Vec::new();
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
        while out.len() < ANSWERS_BYTES_MAX && !self.is_ended {
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
                if out.has_borrowed() && !self.may_join_borrowed(&request, out) {
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

    /// Whether a request may be done before the borrowed READs before it are sent: only a READ that
    /// is borrowed as well. A request that changes memory, or sends a message to a program that may
    /// change it, must come after them. So must a READ that is copied: of a movable region, or of
    /// bytes that are not in memory.
    fn may_join_borrowed(&mut self, request: &RequestHead, out: &AnswerBuffer) -> bool {
        if request.kind != wire::READ || out.is_borrowed_full() {
            return false;
        }
        let grant = self.grant(Key(request.key.get()), request.addr.get());
        // SAFETY: `active` is odd during `feed`.
        let mapping = grant.and_then(|grant| unsafe { self.shared.regions.get(grant.region) });
        mapping.is_none_or(|mapping| mapping.memory.map.is_none() && mapping.memory.stored.is_none())
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
                // Usually all bytes have arrived, and the key is checked only once.
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
            wire::BYE => self.is_ended = true,
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
        let outcome = self.read_bytes(request, out);
        if let Err(error) = outcome {
            out.put(AnswerHead::new(wire::ANSWER, Err(error), 0).as_bytes());
            return outcome;
        }
        self.work.0 += u64::from(len);
        // Later operations of this session must come after this one.
        fence(Ordering::AcqRel);
        outcome
    }

    /// Appends the answer of a READ that is permitted.
    fn read_bytes(&mut self, request: &RequestHead, out: &mut AnswerBuffer) -> Result<u64, WorkError> {
        if std::mem::take(&mut self.has_written) {
            fence(Ordering::SeqCst);
        }
        let len = request.len.get();
        let (mapping, offset) = self.locate(request, request.addr.get(), u64::from(len), Right::Read)?;
        let outcome = Ok(u64::from(len));
        let head = AnswerHead::new(wire::ANSWER, outcome, len);
        if let Some(store) = mapping.memory.store(offset, u64::from(len))? {
            return read_stored(&**store, offset, len, out);
        }
        let RegionMemory { memory, map, .. } = &mapping.memory;
        if map.is_none() {
            let from = memory.pointer(offset, u64::from(len)).ok_or(WorkError::RemoteAccess)?;
            out.put(head.as_bytes());
            // SAFETY: the source is inside a mapping that `shared` holds; borrowed ranges are sent
            // before `active` is even again.
            unsafe { out.read(from, len as usize, padded(len)) };
            return outcome;
        }
        let before = out.bytes().len();
        out.put(head.as_bytes());
        for part in mapping.memory.parts(offset, u64::from(len)) {
            let (from, bytes) = part.inspect_err(|_| out.bytes().truncate(before))?;
            // SAFETY: `parts` proved the source to be inside a mapping that `shared` holds.
            unsafe { out.copy(from, bytes) };
        }
        out.put(&[0; 7][..padded(len) - len as usize]);
        outcome
    }

    /// Writes the received part of a WRITE. The key is checked for each part, because it may have
    /// been invalidated in between.
    fn write_some(&mut self, input: &[u8], out: &mut AnswerBuffer) -> usize {
        let ParserState::Bytes { request, taken, outcome } = &self.next else {
            unreachable!("the caller has checked that bytes of a WRITE follow");
        };
        let (request, taken, outcome) = (*request, *taken, *outcome);
        let len = request.len.get();
        let left = padded(len) - taken as usize;
        let take = left.min(input.len() & !7);
        let bytes = take.min((len - taken) as usize);
        let outcome = outcome.and_then(|value| {
            self.write_bytes(&request, taken, &input[..bytes])?;
            Ok(value)
        });
        if take == left {
            self.next = ParserState::RequestHead;
            self.answer(outcome, out);
        } else {
            let taken = taken + u32::try_from(take).expect("below the request's length");
            self.next = ParserState::Bytes { request, taken, outcome };
        }
        take
    }

    /// Writes the part of a WRITE that comes after `taken` bytes.
    fn write_bytes(&mut self, request: &RequestHead, taken: u32, mut bytes: &[u8]) -> Result<(), WorkError> {
        let (addr, len) = (request.addr.get(), u64::from(request.len.get()));
        // The whole range is checked, so that nothing is written if a part is not permitted.
        let (mapping, offset) = self.locate(request, addr, len, Right::Write)?;
        if let Some(store) = mapping.memory.store(offset, len)?.map(Arc::clone) {
            return self.write_stored(&*store, offset, (taken, request.len.get()), bytes);
        }
        let mut parts = mapping.memory.parts(offset + u64::from(taken), u64_from(bytes.len()));
        fence(Ordering::AcqRel);
        let mut written = 0;
        let outcome = parts.try_for_each(|part| {
            let (to, len) = part?;
            // SAFETY: `parts` proved the destination to be inside a mapping that `shared` holds,
            // and all parts together are as long as the bytes.
            unsafe { copy(to, bytes.as_ptr(), len) };
            bytes = &bytes[len..];
            written += u64_from(len);
            Ok(())
        });
        fence(Ordering::AcqRel);
        self.has_written = true;
        self.work.0 += written;
        outcome
    }

    /// Adds a part of a WRITE to those before. Writes all of them when they are complete.
    fn write_stored(
        &mut self,
        store: &dyn PageStore,
        offset: u64,
        (taken, len): (u32, u32),
        bytes: &[u8],
    ) -> Result<(), WorkError> {
        if taken == 0 {
            self.assembled = Vec::with_capacity(len as usize);
        }
        self.assembled.extend_from_slice(bytes);
        if self.assembled.len() < len as usize {
            return Ok(());
        }
        self.work.0 += u64::from(len);
        store.write(offset, &mut std::mem::take(&mut self.assembled))
    }

    fn deliver(&self, message: Vec<u8>) -> Result<u64, WorkError> {
        self.check_fence()?;
        let len = u64_from(message.len());
        if let Some(handler) = self.shared.handler.get() {
            let mut answer = Vec::new();
            handler.handle(self.peer.sender(), &message, &mut answer);
            let limits = &self.shared.options.limits;
            // Sent in this turn of the thread, after the answers to requests.
            let is_posted = answer.len() <= limits.message_bytes_max as usize
                && self.peer.mailbox.post(&answer, limits.receive_depth);
            return if is_posted { Ok(len) } else { Err(WorkError::ReceiverNotReady) };
        }
        if self.peer.mailbox.deliver(message, self.shared.options.limits.receive_depth) {
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

    /// The region of a remote range and the offset in it, if the key opens the range. `active` must
    /// be odd, or the target's lock held.
    #[inline]
    fn locate(
        &mut self,
        request: &RequestHead,
        addr: u64,
        len: u64,
        right: Right,
    ) -> Result<(&RegionMapping, u64), WorkError> {
        self.check_fence()?;
        let grant = self.grant(Key(request.key.get()), addr).ok_or(WorkError::RemoteAccess)?;
        grant.check(self.who, right, addr, len)?;
        // SAFETY: the caller guarantees it.
        let mapping = unsafe { self.shared.regions.get(grant.region) }.ok_or(WorkError::RemoteAccess)?;
        let offset = addr.checked_sub(mapping.base).ok_or(WorkError::RemoteAccess)?;
        Ok((mapping, offset))
    }

    /// The range that a key opens at an address. `active` must be odd, or the target's lock held.
    #[inline]
    fn grant(&mut self, key: Key, addr: u64) -> Option<KeyGrant> {
        let Self { shared, tables, who, .. } = self;
        if !key.is_table_key() {
            return shared.control.lookup(key);
        }
        let slot = tables.find(&shared.regions, addr)?;
        // SAFETY: the caller guarantees it.
        let mapping = unsafe { shared.regions.get(slot) }?;
        mapping.table.as_ref()?.grant(&mapping.memory.memory, *who, key, addr)
    }

    #[inline]
    fn word(&mut self, request: &RequestHead) -> Result<&AtomicU64, WorkError> {
        let addr = request.addr.get();
        if !addr.is_multiple_of(8) {
            return Err(WorkError::Misaligned);
        }
        let (mapping, offset) = self.locate(request, addr, 8, Right::Atomic)?;
        if mapping.memory.store(offset, 8)?.is_some() {
            return Err(WorkError::RemoteAccess);
        }
        let word = mapping.memory.part(offset, 8)?.cast::<u64>();
        // SAFETY: inside a mapping that `shared` holds; aligned, because regions and units begin at
        // multiples of 8 in both address spaces.
        Ok(unsafe { AtomicU64::from_ptr(word) })
    }
}

/// Appends the answer of a READ of bytes that are not in memory.
fn read_stored(
    store: &dyn PageStore,
    offset: u64,
    len: u32,
    out: &mut AnswerBuffer,
) -> Result<u64, WorkError> {
    let outcome = Ok(u64::from(len));
    let bytes = out.bytes();
    let start = bytes.len();
    bytes.extend_from_slice(AnswerHead::new(wire::ANSWER, outcome, len).as_bytes());
    let data = bytes.len();
    bytes.resize(data + padded(len), 0);
    store.read(offset, &mut bytes[data..data + len as usize]).inspect_err(|_| bytes.truncate(start))?;
    outcome
}
