//! The core of a session: answers the requests of one program.
//!
//! The core carries out a request, records the effect in the [`Book`], and answers. The next agent
//! resumes from the book.
//!
//! Requests are done in order. An allocate or free is done once, whenever the agent is killed,
//! because its effect is in the book with the request's number. Reads and writes are repeated by
//! the next agent. So that the program cannot observe the repetition, the requests that are
//! answered together are one allocate or free, or writes followed by reads.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use aquifer_fabric::Key;
use aquifer_ipc::ring::{ExtentName, RingAnswer, RingRequest, RingStatus, TransferRange};
use aquifer_pool::{Extent, NodeId, SizeClass};

use super::account::{KeyTries, UserAccount};
use super::allocate::{batch_max, equal_requests};
use super::stock::Stock;
use super::{ExtentPool, Transfer};
use crate::book::{Book, BookEntry, ExtentState};

/// Maximum number of extents in one step of stock maintenance, because a request waits for the
/// step.
const MAINTENANCE_EXTENTS_MAX: usize = 8;
/// Maximum number of extents that are freed together.
const FREED_TOGETHER_MAX: usize = 1024;
/// Maximum bytes in stock. No other session can use them.
const SESSION_STOCK_BYTES_MAX: u64 = 128 << 20;

/// Whether a request may be answered together with those before it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum RequestKind {
    /// Allocates or frees, or is invalid.
    Change,
    Write,
    Read,
}

impl RequestKind {
    fn of(request: Option<&RingRequest>) -> Self {
        match request {
            Some(RingRequest::Write(..)) => Self::Write,
            Some(RingRequest::Read(..)) => Self::Read,
            Some(RingRequest::Allocate(_) | RingRequest::AllocateStretch(_) | RingRequest::Free(_))
            | None => Self::Change,
        }
    }

    fn may_follow(self, before: Self) -> bool {
        self == before || (before == Self::Write && self == Self::Read)
    }
}

/// Usage of the pool by a session: the extents of its program, and the stock.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct SessionUsage {
    /// Extents that the program has allocated.
    pub extents: u64,
    /// Bytes that the program has allocated.
    pub bytes: u64,
    /// Bytes in stock.
    pub stocked_bytes: u64,
}

/// The identity of an extent. The address alone does not identify it, because a node that loses its
/// memory allocates the same addresses again.
type ExtentId = (NodeId, u64, Key);

/// The state of a session.
#[derive(Debug)]
pub(crate) struct SessionCore<P> {
    pub(super) pool: P,
    pub(super) book: Arc<Book>,
    pub(super) account: Arc<UserAccount>,
    /// Book entries of extents in use and in stock.
    pub(super) known: HashMap<ExtentId, u32>,
    pub(super) stock: Stock,
    /// Entries that the program freed and must not get again. They are freed at the next
    /// [`Self::conclude`].
    not_reusable: Vec<u32>,
    /// Entries to free on nodes that could not be reached.
    deferred_frees: Vec<u32>,
    /// Entries in use whose node was unreachable since their allocation. Their bytes cannot be
    /// trusted, because operations that were in flight may still take effect.
    untrusted: HashSet<u32>,
    /// Unused entries below the book's end.
    pub(super) unused_entries: Vec<u32>,
    pub(super) usage: SessionUsage,
    /// Entries that an earlier agent had already changed for the next request when it was killed.
    pub(super) resumed: Vec<u32>,
    /// Tries of unknown keys that this session has left.
    key_tries: KeyTries,
    /// Transfers of the requests that are being answered.
    transfers: Vec<Transfer>,
    /// The index of the answer of each transfer, and whether its key is unknown to the session.
    transfer_answers: Vec<(usize, bool)>,
}

impl<P: ExtentPool> SessionCore<P> {
    /// Resumes from a book, which may be new. The account must include the book's extents.
    pub fn new(pool: P, book: Arc<Book>, account: Arc<UserAccount>) -> Self {
        let mut session = Self {
            pool,
            book,
            account,
            known: HashMap::new(),
            stock: Stock::default(),
            not_reusable: Vec::new(),
            deferred_frees: Vec::new(),
            untrusted: HashSet::new(),
            unused_entries: Vec::new(),
            usage: SessionUsage::default(),
            resumed: Vec::new(),
            key_tries: KeyTries::of_session(),
            transfers: Vec::new(),
            transfer_answers: Vec::new(),
        };
        let book = Arc::clone(&session.book);
        for number in 0..book.end() {
            match book.entry(number) {
                Some(entry) => session.resume_entry(number, entry),
                None => session.unused_entries.push(number),
            }
        }
        session
    }

    fn resume_entry(&mut self, number: u32, BookEntry { extent, state, request }: BookEntry) {
        let bytes = extent.class.bytes();
        if request == self.book.done_requests() {
            self.resumed.push(number);
        }
        match state {
            ExtentState::InUse => {
                self.known.insert(extent_id(&extent), number);
                self.usage.extents += 1;
                self.usage.bytes += bytes;
            }
            ExtentState::Stocked => {
                self.known.insert(extent_id(&extent), number);
                self.stock.push(extent.class, number);
                self.usage.stocked_bytes += bytes;
            }
            ExtentState::Freeing(record) => {
                if self.pool.resume_free(extent, record) {
                    self.remove_entry(number, bytes);
                } else {
                    self.deferred_frees.push(number);
                }
            }
        }
    }

    /// Answers the first requests that can be answered together, at least one if there is any.
    ///
    /// `first` is the number of the first request. `None` is a request that cannot be parsed.
    /// `answers` is replaced. [`Self::conclude`] must follow when they are in the ring.
    pub fn answer(&mut self, first: u64, requests: &[Option<RingRequest>], answers: &mut Vec<RingAnswer>) {
        answers.clear();
        let mut before = RequestKind::of(requests.first().and_then(Option::as_ref));
        for (at, request) in requests.iter().enumerate() {
            let kind = RequestKind::of(request.as_ref());
            // A change is answered alone, because it must be in the book before the next request.
            if !answers.is_empty() && (kind == RequestKind::Change || !kind.may_follow(before)) {
                break;
            }
            before = kind;
            let answer = match request {
                None => RingAnswer::without_extent(RingStatus::BadRequest),
                Some(RingRequest::Allocate(class)) => {
                    self.allocate(first, *class, equal_requests(&requests[at..]))
                }
                Some(RingRequest::AllocateStretch(sections)) => self.allocate_stretch(first, *sections),
                Some(RingRequest::Free(name)) => RingAnswer::without_extent(self.free(first, name)),
                Some(RingRequest::Read(name, range) | RingRequest::Write(name, range)) => {
                    let is_write = kind == RequestKind::Write;
                    match self.prepare_transfer(name, *range, is_write, answers.len()) {
                        Some(answer) => answer,
                        None => break,
                    }
                }
            };
            answers.push(answer);
        }
        self.transfer(answers);
        for node in self.pool.drain_lost_nodes() {
            self.distrust_node(node);
        }
    }

    /// Handles a broken connection: distrusts the node's extents in use, and frees those in stock.
    fn distrust_node(&mut self, node: NodeId) {
        let numbers = self.known.iter().filter(|((at, ..), _)| *at == node).map(|(_, number)| *number);
        let is_in_use =
            |number: &u32| self.book.entry(*number).is_some_and(|entry| entry.state == ExtentState::InUse);
        self.untrusted.extend(numbers.filter(is_in_use));
        for class in classes() {
            let is_there = |number| self.book.entry(number).is_some_and(|entry| entry.extent.node == node);
            let removed = self.stock.remove_where(class, is_there);
            self.usage.stocked_bytes -= removed.len() as u64 * class.bytes();
            self.free_entries(&removed);
        }
    }

    /// Records that all requests below `next` are done: their answers are in the ring.
    pub fn conclude(&mut self, next: u64) {
        self.resumed.clear();
        self.book.set_done_requests(next);
        if !self.not_reusable.is_empty() {
            let numbers = std::mem::take(&mut self.not_reusable);
            self.free_entries(&numbers);
        }
        if self.usage.stocked_bytes > SESSION_STOCK_BYTES_MAX {
            while let Some((class, count)) = self.stock.surplus() {
                self.free_stocked(class, count);
            }
        }
    }

    /// Number of the next request.
    pub fn next_request(&self) -> u64 {
        self.book.done_requests()
    }

    fn free(&mut self, request: u64, name: &ExtentName) -> RingStatus {
        if let Some(entry) = self.resumed_free(request) {
            let is_same = name_of(&entry.extent) == *name;
            return if is_same { RingStatus::Done } else { RingStatus::Refused };
        }
        let id = (NodeId(name.node), name.addr, Key(name.key));
        let found = self.known.get(&id).and_then(|number| Some((*number, self.book.entry(*number)?)));
        let found = found.filter(|(_, entry)| entry.state == ExtentState::InUse);
        let Some((number, BookEntry { extent, .. })) =
            found.filter(|(_, entry)| name_of(&entry.extent) == *name)
        else {
            return RingStatus::Refused;
        };
        self.book.set_state(number, ExtentState::Stocked, request);
        self.usage.extents -= 1;
        self.usage.bytes -= extent.class.bytes();
        self.usage.stocked_bytes += extent.class.bytes();
        if self.untrusted.remove(&number) {
            self.not_reusable.push(number);
        } else {
            self.stock.push(extent.class, number);
        }
        RingStatus::Done
    }

    /// The entry that a killed agent had already freed for this request.
    fn resumed_free(&self, request: u64) -> Option<BookEntry> {
        let mut entries = self.resumed.iter().filter_map(|number| self.book.entry(*number));
        entries.find(|entry| entry.request == request && entry.state == ExtentState::Stocked)
    }

    /// Adds a transfer, or returns the answer that refuses it. Returns `None` if the request must
    /// wait for the results of unknown keys that are already being tried.
    fn prepare_transfer(
        &mut self,
        name: &ExtentName,
        range: TransferRange,
        is_write: bool,
        answer: usize,
    ) -> Option<RingAnswer> {
        let refuse = |status| Some(RingAnswer::without_extent(status));
        let Some(class) = SizeClass::new(name.class) else { return refuse(RingStatus::BadRequest) };
        if u64::from(range.offset) + u64::from(range.len) > class.bytes() {
            return refuse(RingStatus::BadRequest);
        }
        let extent = Extent { node: NodeId(name.node), addr: name.addr, class, key: Key(name.key) };
        let number = self.known.get(&extent_id(&extent)).copied();
        match number.and_then(|number| Some((number, self.book.entry(number)?))) {
            Some((number, entry)) if entry.extent == extent && entry.state == ExtentState::InUse => {
                if self.untrusted.contains(&number) {
                    return refuse(RingStatus::NodeGone);
                }
            }
            // The extent is freed, or has another size.
            Some(_) => return refuse(RingStatus::Refused),
            None if self.use_key_try() => {}
            None if self.transfer_answers.iter().any(|(_, is_unknown_key)| *is_unknown_key) => return None,
            None => {
                self.account.count_untried_key();
                return refuse(RingStatus::KeyNotTried);
            }
        }
        self.transfers.push(Transfer { extent, range, is_write });
        self.transfer_answers.push((answer, number.is_none()));
        Some(RingAnswer::without_extent(RingStatus::Done))
    }

    /// Uses up a try of an unknown key; false if the session or its user has none left.
    fn use_key_try(&mut self) -> bool {
        let now = self.pool.now();
        let may_try = self.key_tries.has_try(now) && self.account.use_key_try(now);
        if may_try {
            self.key_tries.use_try();
        }
        may_try
    }

    fn transfer(&mut self, answers: &mut [RingAnswer]) {
        if self.transfers.is_empty() {
            return;
        }
        let outcomes = self.pool.transfer(&self.transfers);
        for ((answer, is_unknown_key), mut status) in self.transfer_answers.iter().zip(outcomes) {
            match (is_unknown_key, status) {
                (true, RingStatus::Refused) => self.account.count_wrong_key(),
                (true, _) => {
                    self.key_tries.return_try();
                    self.account.return_key_try();
                }
                // The node has returned without its memory.
                (false, RingStatus::Refused) => status = RingStatus::NodeGone,
                (false, _) => {}
            }
            answers[*answer].status = status;
        }
        self.transfers.clear();
        self.transfer_answers.clear();
    }

    /// Does one step of maintenance: a deferred free, or the adjustment of one size class in stock.
    /// Returns false if no maintenance is due.
    pub fn maintain_stock(&mut self) -> bool {
        if let Some(at) = self.deferred_frees.iter().position(|number| self.is_reachable(*number)) {
            let number = self.deferred_frees.swap_remove(at);
            self.free_entries(&[number]);
            return true;
        }
        if let Some((class, count)) = self.stock.surplus() {
            self.free_stocked(class, count.min(MAINTENANCE_EXTENTS_MAX));
            return true;
        }
        let Some((class, count)) = self.stock.shortage() else { return false };
        if self.stock_up(class, count.min(MAINTENANCE_EXTENTS_MAX).min(batch_max(class))).is_err() {
            self.stock.clear_demand(class);
        }
        true
    }

    /// Frees all extents in stock.
    pub fn free_stock(&mut self) {
        for class in classes() {
            self.free_stocked(class, usize::MAX);
        }
    }

    fn free_stocked(&mut self, class: SizeClass, count: usize) {
        let removed = self.stock.remove_oldest(class, count);
        self.usage.stocked_bytes -= removed.len() as u64 * class.bytes();
        self.free_entries(&removed);
    }

    /// Frees extents, a bounded number at a time, because the next agent must check each extent
    /// that was being freed when this one was killed.
    pub(super) fn free_entries(&mut self, numbers: &[u32]) {
        numbers.chunks(FREED_TOGETHER_MAX).for_each(|some| self.free_together(some));
    }

    fn free_together(&mut self, numbers: &[u32]) {
        let (mut freeing, mut extents) = (Vec::new(), Vec::new());
        for &number in numbers {
            let Some(BookEntry { extent, state, .. }) = self.book.entry(number) else { continue };
            self.known.remove(&extent_id(&extent));
            self.untrusted.remove(&number);
            if let ExtentState::Freeing(record) = state {
                let is_freed = self.pool.resume_free(extent, record);
                self.finish_free(number, &extent, is_freed);
                continue;
            }
            let record = self.pool.last_record(extent);
            self.book.set_freeing(number, record);
            freeing.push(number);
            extents.push(extent);
        }
        let outcomes = self.pool.free(&extents);
        for ((number, extent), is_freed) in freeing.into_iter().zip(&extents).zip(outcomes) {
            self.finish_free(number, extent, is_freed);
        }
    }

    fn finish_free(&mut self, number: u32, extent: &Extent, is_freed: bool) {
        if is_freed {
            self.remove_entry(number, extent.class.bytes());
        } else {
            self.deferred_frees.push(number);
        }
    }

    fn is_reachable(&self, number: u32) -> bool {
        self.book.entry(number).is_none_or(|entry| self.pool.is_connected(entry.extent.node))
    }

    fn remove_entry(&mut self, number: u32, bytes: u64) {
        self.book.remove(number);
        self.account.release(bytes);
        self.unused_entries.push(number);
    }

    /// Frees all extents at the end of the session. Returns false if some are on nodes that cannot
    /// be reached at present; then it must be called again.
    pub fn close(&mut self) -> bool {
        self.free_stock();
        let mut numbers: Vec<u32> = self.known.drain().map(|(_, number)| number).collect();
        // The order of a hash map is random, and that of a core must not be.
        numbers.sort_unstable();
        numbers.append(&mut self.deferred_frees);
        self.free_entries(&numbers);
        self.deferred_frees.is_empty()
    }

    /// Whether the stock has extents that the program does not use.
    pub const fn has_stock(&self) -> bool {
        self.usage.stocked_bytes > 0
    }

    /// The session's usage of the pool.
    pub fn usage(&self) -> SessionUsage {
        self.usage
    }

    /// The pool of the session.
    pub fn pool(&mut self) -> &mut P {
        &mut self.pool
    }
}

fn classes() -> impl Iterator<Item = SizeClass> {
    (0..SizeClass::COUNT).filter_map(SizeClass::new)
}

pub(super) fn extent_id(extent: &Extent) -> ExtentId {
    (extent.node, extent.addr, extent.key)
}

fn name_of(extent: &Extent) -> ExtentName {
    ExtentName { node: extent.node.0, class: extent.class.k(), key: extent.key.0, addr: extent.addr }
}

/// The answer to a successful allocation.
pub(super) fn allocated(extent: &Extent) -> RingAnswer {
    RingAnswer { status: RingStatus::Done, extent: name_of(extent) }
}
