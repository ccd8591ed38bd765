//! A session: one program's extents. What it is asked it does, writes down in its [`Book`], and answers; whoever takes over from an agent that was killed
//! in the middle of that goes on from the book.
//!
//! Requests are done in their order. One for an extent is done once, whenever the agent dies: its effect is in the book with the request's number. Reading and
//! writing are done again; that nothing else is seen by it, what is done at once is either changes, or WRITEs and then READs.

mod take;

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use aquifer_fabric::Key;
use aquifer_ipc::ring::{ExtentAnswer, ExtentName, ExtentRequest, ExtentStatus, TransferRange};
use aquifer_pool::{Extent, NodeId, OperationGuard, SizeClass, Stretch};

use crate::account::Account;
use crate::book::{Book, Entry, State};
use crate::stock::Stock;
use take::{alike, at_once_max};

/// Most extents that are taken or given back at once where a program may come meanwhile.
const AT_LEISURE_MAX: usize = 8;
/// Extents that are given back at once.
const RETURNED_MAX: usize = 1024;
/// More than so much is not in stock, however busy the program is: no other session could have it.
const STOCKED_BYTES_MAX: u64 = 128 << 20;
/// No request has this number.
const NO_REQUEST: u64 = u64::MAX;

/// Data to be moved between a part of an extent and the data area.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Move {
    pub extent: Extent,
    pub piece: TransferRange,
    pub is_write: bool,
}

/// What a session needs of the pool.
pub(crate) trait Pool {
    /// To be held from before an extent is taken until it is written down.
    fn under_way(&self) -> Option<OperationGuard>;
    /// Take an extent.
    fn allocate(&mut self, class: SizeClass) -> Result<Extent, ExtentStatus>;
    /// Take up to so many extents, at least one.
    fn allocate_many(&mut self, class: SizeClass, count: u32) -> Result<Vec<Extent>, ExtentStatus>;
    /// Take so many sections side by side.
    fn allocate_stretch(&mut self, sections: u32) -> Result<Stretch, ExtentStatus>;
    /// If a stretch of so many sections may be had soon, how many sections have to be cleared of what others have left there.
    fn sections_to_clear(&self, sections: u32) -> Option<u32>;
    /// The record in its control word, for [`Self::give_back_begun`].
    fn last_record(&self, extent: Extent) -> u32;
    /// Give extents back; for each false if its node cannot be reached just now, and true if the node is gone for good, too.
    fn give_back(&mut self, extents: &[Extent]) -> Vec<bool>;
    /// The same of one whose giving back was begun when its control word had that record.
    fn give_back_begun(&mut self, extent: Extent, record: u32) -> bool;
    /// Whether there is a connection to a node.
    fn reaches(&self, node: NodeId) -> bool;
    /// Move data, of each node in this order; how each ended.
    fn transfer(&mut self, moves: &[Move]) -> Vec<ExtentStatus>;
    /// Nodes to which a connection has broken since this was asked. What was under way may yet arrive there.
    fn take_gone(&mut self) -> Vec<NodeId>;
    /// How much a user may have, by what nodes lend.
    fn quota_bytes(&self) -> u64;
}

/// What may be done at once with what was before.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Sort {
    Change,
    Write,
    Read,
}

impl Sort {
    fn of(request: Option<&ExtentRequest>) -> Self {
        match request {
            Some(ExtentRequest::Write(..)) => Self::Write,
            Some(ExtentRequest::Read(..)) => Self::Read,
            Some(ExtentRequest::Allocate(_) | ExtentRequest::AllocateStretch(_) | ExtentRequest::Free(_))
            | None => Self::Change,
        }
    }

    fn may_follow(self, before: Self) -> bool {
        self == before || (before == Self::Write && self == Self::Read)
    }
}

/// What a session has.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Holdings {
    pub extents: u64,
    pub bytes: u64,
    pub stocked_bytes: u64,
}

/// See above.
#[derive(Debug)]
pub(crate) struct Session<P> {
    pool: P,
    book: Arc<Book>,
    account: Arc<Account>,
    /// The program's, and those in stock, by their names: numbers in the book. An address alone is no name: a node that comes back empty has the same again.
    known: HashMap<(NodeId, u64, Key), u32>,
    stock: Stock,
    /// Given back by the program, and not to be given to it again: they go to the pool.
    unwanted: Vec<u32>,
    /// To be given back to nodes that could not be reached.
    owed: Vec<u32>,
    /// Of the program's, those whose node was gone at some time since: they cannot be trusted any more, for what was under way may yet arrive.
    lost: HashSet<u32>,
    /// Numbers that are free, below the book's end.
    gaps: Vec<u32>,
    holdings: Holdings,
    /// What the request that is to be concluded next has changed already, before the agent that did it was killed.
    resumed: Vec<u32>,
    moves: Vec<Move>,
    /// For each move, which answer it is, and whether the key is one that the session was not given.
    moved: Vec<(usize, bool)>,
}

impl<P: Pool> Session<P> {
    /// Go on with a book, new or another agent's. What is in it is on the account already.
    pub fn new(pool: P, book: Arc<Book>, account: Arc<Account>) -> Self {
        let mut session = Self {
            pool,
            book,
            account,
            known: HashMap::new(),
            stock: Stock::default(),
            unwanted: Vec::new(),
            owed: Vec::new(),
            lost: HashSet::new(),
            gaps: Vec::new(),
            holdings: Holdings::default(),
            resumed: Vec::new(),
            moves: Vec::new(),
            moved: Vec::new(),
        };
        let book = Arc::clone(&session.book);
        for number in 0..book.end() {
            match book.entry(number) {
                Some(entry) => session.take_in(number, entry),
                None => session.gaps.push(number),
            }
        }
        session
    }

    fn take_in(&mut self, number: u32, Entry { extent, state, request }: Entry) {
        let bytes = extent.class.bytes();
        if request == self.book.done() {
            self.resumed.push(number);
        }
        match state {
            State::Given => {
                self.known.insert(key_of(&extent), number);
                self.holdings.extents += 1;
                self.holdings.bytes += bytes;
            }
            State::Stocked => {
                self.known.insert(key_of(&extent), number);
                self.stock.put(extent.class, number);
                self.holdings.stocked_bytes += bytes;
            }
            State::Returning(record) => {
                if self.pool.give_back_begun(extent, record) {
                    self.forget(number, bytes);
                } else {
                    self.owed.push(number);
                }
            }
        }
    }

    /// Do those of these requests, the first of which is `first`, that can be done at once; at least one, if there is one. Answers, for as many. `now` is the time since the agent began. `None` is a
    /// request that cannot be parsed.
    pub fn answer(
        &mut self,
        first: u64,
        requests: &[Option<ExtentRequest>],
        answers: &mut Vec<ExtentAnswer>,
        now: Duration,
    ) {
        answers.clear();
        let mut before = Sort::of(requests.first().and_then(Option::as_ref));
        for (at, request) in requests.iter().enumerate() {
            let sort = Sort::of(request.as_ref());
            // Changes one by one: each is written down before the next.
            if !answers.is_empty() && (sort == Sort::Change || !sort.may_follow(before)) {
                break;
            }
            before = sort;
            let answer = match request {
                None => ExtentAnswer::without_extent(ExtentStatus::BadRequest),
                Some(ExtentRequest::Allocate(class)) => self.allocate(first, *class, alike(&requests[at..])),
                Some(ExtentRequest::AllocateStretch(sections)) => self.allocate_stretch(first, *sections),
                Some(ExtentRequest::Free(name)) => ExtentAnswer::without_extent(self.free(first, name)),
                Some(ExtentRequest::Read(name, piece)) => {
                    match self.prepare(name, *piece, false, answers.len(), now) {
                        Some(answer) => answer,
                        None => break,
                    }
                }
                Some(ExtentRequest::Write(name, piece)) => {
                    match self.prepare(name, *piece, true, answers.len(), now) {
                        Some(answer) => answer,
                        None => break,
                    }
                }
            };
            answers.push(answer);
        }
        self.transfer(answers);
        for node in self.pool.take_gone() {
            self.lose(node);
        }
    }

    /// The connection to a node has broken.
    fn lose(&mut self, node: NodeId) {
        let numbers = self.known.iter().filter(|((at, ..), _)| *at == node).map(|(_, number)| *number);
        let is_given =
            |number: &u32| self.book.entry(*number).is_some_and(|entry| entry.state == State::Given);
        self.lost.extend(numbers.filter(is_given));
        for class in classes() {
            let is_there = |number| self.book.entry(number).is_some_and(|entry| entry.extent.node == node);
            let dropped = self.stock.drop_all(class, is_there);
            self.holdings.stocked_bytes -= dropped.len() as u64 * class.bytes();
            self.return_to_pool(&dropped);
        }
    }

    /// The requests before `next` are answered; the answers are where the program will find them.
    pub fn conclude(&mut self, next: u64) {
        self.resumed.clear();
        self.book.set_done(next);
        if !self.unwanted.is_empty() {
            let unwanted = std::mem::take(&mut self.unwanted);
            self.return_to_pool(&unwanted);
        }
        if self.holdings.stocked_bytes > STOCKED_BYTES_MAX {
            while let Some((class, count)) = self.stock.surplus() {
                self.drop_some(class, count);
            }
        }
    }

    /// The number of the next request.
    pub fn next_request(&self) -> u64 {
        self.book.done()
    }

    fn free(&mut self, request: u64, name: &ExtentName) -> ExtentStatus {
        if let Some(entry) = self.given_back_already(request) {
            return if name_of(&entry.extent) == *name { ExtentStatus::Done } else { ExtentStatus::Refused };
        }
        let key = (NodeId(name.node), name.addr, Key(name.key));
        let found = self.known.get(&key).and_then(|number| Some((*number, self.book.entry(*number)?)));
        let found = found.filter(|(_, entry)| entry.state == State::Given);
        let Some((number, Entry { extent, .. })) = found.filter(|(_, entry)| name_of(&entry.extent) == *name)
        else {
            return ExtentStatus::Refused;
        };
        self.book.set(number, State::Stocked, request);
        self.holdings.extents -= 1;
        self.holdings.bytes -= extent.class.bytes();
        self.holdings.stocked_bytes += extent.class.bytes();
        if self.lost.remove(&number) {
            self.unwanted.push(number);
        } else {
            self.stock.put(extent.class, number);
        }
        ExtentStatus::Done
    }

    /// What an agent that was killed gave back for the request that it could not conclude.
    fn given_back_already(&self, request: u64) -> Option<Entry> {
        let mut entries = self.resumed.iter().filter_map(|number| self.book.entry(*number));
        entries.find(|entry| entry.request == request && entry.state == State::Stocked)
    }

    /// `None` if it must wait for what came of keys that are being tried.
    fn prepare(
        &mut self,
        name: &ExtentName,
        piece: TransferRange,
        is_write: bool,
        answer: usize,
        now: Duration,
    ) -> Option<ExtentAnswer> {
        let Some(class) = SizeClass::new(name.class) else {
            return Some(ExtentAnswer::without_extent(ExtentStatus::BadRequest));
        };
        if u64::from(piece.offset) + u64::from(piece.len) > class.bytes() {
            return Some(ExtentAnswer::without_extent(ExtentStatus::BadRequest));
        }
        let extent = Extent { node: NodeId(name.node), addr: name.addr, class, key: Key(name.key) };
        let number = self.known.get(&key_of(&extent)).copied();
        match number.and_then(|number| Some((number, self.book.entry(number)?))) {
            Some((number, entry)) if entry.extent == extent && entry.state == State::Given => {
                if self.lost.contains(&number) {
                    return Some(ExtentAnswer::without_extent(ExtentStatus::NodeGone));
                }
            }
            // It was given back, or has another size.
            Some(_) => return Some(ExtentAnswer::without_extent(ExtentStatus::Refused)),
            None if self.account.may_guess(now) => {}
            None if self.moved.iter().any(|(_, is_guess)| *is_guess) => return None,
            None => {
                self.account.count_untried();
                return Some(ExtentAnswer::without_extent(ExtentStatus::Refused));
            }
        }
        self.moves.push(Move { extent, piece, is_write });
        self.moved.push((answer, number.is_none()));
        Some(ExtentAnswer::without_extent(ExtentStatus::Done))
    }

    fn transfer(&mut self, answers: &mut [ExtentAnswer]) {
        if self.moves.is_empty() {
            return;
        }
        let outcomes = self.pool.transfer(&self.moves);
        for ((answer, is_guess), mut status) in self.moved.iter().zip(outcomes) {
            match (is_guess, status) {
                (true, ExtentStatus::Refused) => self.account.count_wrong_guess(),
                (true, _) => self.account.return_guess(),
                // The node is back without what it had.
                (false, ExtentStatus::Refused) => status = ExtentStatus::NodeGone,
                (false, _) => {}
            }
            answers[*answer].status = status;
        }
        self.moves.clear();
        self.moved.clear();
    }

    /// Keep as much in stock as the program seems to need, and not more: one step of that; false if there was nothing to be done.
    pub fn tend_stock(&mut self) -> bool {
        if let Some(at) = self.owed.iter().position(|number| self.is_reached(*number)) {
            let number = self.owed.swap_remove(at);
            self.return_to_pool(&[number]);
            return true;
        }
        if let Some((class, count)) = self.stock.surplus() {
            self.drop_some(class, count.min(AT_LEISURE_MAX));
            return true;
        }
        let Some((class, count)) = self.stock.shortage() else { return false };
        if self.stock_up(class, count.min(AT_LEISURE_MAX).min(at_once_max(class))).is_err() {
            self.stock.give_up(class);
        }
        true
    }

    /// Frees what is in stock.
    pub fn drop_stock(&mut self) {
        for class in classes() {
            self.drop_some(class, usize::MAX);
        }
    }

    fn drop_some(&mut self, class: SizeClass, count: usize) {
        let dropped = self.stock.drop_some(class, count);
        self.holdings.stocked_bytes -= dropped.len() as u64 * class.bytes();
        self.return_to_pool(&dropped);
    }

    /// Not all at once: what is being given back when an agent is killed costs the next one a look at each.
    fn return_to_pool(&mut self, numbers: &[u32]) {
        numbers.chunks(RETURNED_MAX).for_each(|some| self.return_some(some));
    }

    fn return_some(&mut self, numbers: &[u32]) {
        let (mut returned, mut extents) = (Vec::new(), Vec::new());
        for &number in numbers {
            let Some(Entry { extent, state, .. }) = self.book.entry(number) else { continue };
            self.known.remove(&key_of(&extent));
            self.lost.remove(&number);
            if let State::Returning(record) = state {
                let is_done = self.pool.give_back_begun(extent, record);
                self.settle_return(number, &extent, is_done);
                continue;
            }
            let record = self.pool.last_record(extent);
            self.book.set_returning(number, record);
            returned.push(number);
            extents.push(extent);
        }
        let outcomes = self.pool.give_back(&extents);
        for ((number, extent), is_done) in returned.into_iter().zip(&extents).zip(outcomes) {
            self.settle_return(number, extent, is_done);
        }
    }

    fn settle_return(&mut self, number: u32, extent: &Extent, is_done: bool) {
        if is_done {
            self.forget(number, extent.class.bytes());
        } else {
            self.owed.push(number);
        }
    }

    fn is_reached(&self, number: u32) -> bool {
        self.book.entry(number).is_none_or(|entry| self.pool.reaches(entry.extent.node))
    }

    fn forget(&mut self, number: u32, bytes: u64) {
        self.book.strike(number);
        self.account.give(bytes);
        self.gaps.push(number);
    }

    /// The session is over: give everything back; false if some is on nodes that cannot be reached just now.
    pub fn close(&mut self) -> bool {
        self.drop_stock();
        let mut numbers: Vec<u32> = self.known.drain().map(|(_, number)| number).collect();
        numbers.append(&mut self.owed);
        self.return_to_pool(&numbers);
        self.owed.is_empty()
    }

    /// Whether it keeps anything from others that it does not need.
    pub const fn has_spare(&self) -> bool {
        self.holdings.stocked_bytes > 0
    }

    /// What it has.
    pub fn holdings(&self) -> Holdings {
        self.holdings
    }

    /// The pool that it draws from.
    pub fn pool(&mut self) -> &mut P {
        &mut self.pool
    }
}

fn classes() -> impl Iterator<Item = SizeClass> {
    (0..SizeClass::COUNT).filter_map(SizeClass::new)
}

fn key_of(extent: &Extent) -> (NodeId, u64, Key) {
    (extent.node, extent.addr, extent.key)
}

fn name_of(extent: &Extent) -> ExtentName {
    ExtentName { node: extent.node.0, class: extent.class.k(), key: extent.key.0, addr: extent.addr }
}

fn given(extent: &Extent) -> ExtentAnswer {
    ExtentAnswer { status: ExtentStatus::Done, extent: name_of(extent) }
}
