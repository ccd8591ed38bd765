//! What a session has of the pool, in memory that outlives the agent. Programs never see it.
//!
//! An agent may be killed between any two stores here, and the next goes on with what it finds: an entry's state is stored last, and the one that is
//! struck out first.

use std::io;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use aquifer_fabric::{Key, Memory};
use aquifer_pool::{Extent, Ledger, NodeId, SizeClass};

/// Extents that a session may have, those in its stock included.
pub const EXTENTS_MAX: u32 = 1 << 20;

/// First word of a book; its last bytes are the version.
const MAGIC: u64 = u64::from_le_bytes(*b"AQBOOK\x01\0");
const DONE_AT: usize = 8;
/// Above all entries that were ever in use.
const END_AT: usize = 16;
const ENTRIES_AT: usize = 64;
const ENTRY_BYTES: usize = 32;
const BOOK_BYTES: usize = ENTRIES_AT + EXTENTS_MAX as usize * ENTRY_BYTES;
// Of an entry.
const ADDR: usize = 0;
const NAME: usize = 8;
const STATE: usize = 16;
const REQUEST: usize = 24;

/// Whose an extent is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum State {
    /// In stock, to be given to the program or back to the pool.
    Stocked,
    /// The program's.
    Given,
    /// It is being given back to the pool. The control word's record when that was begun.
    Returning(u32),
}

/// An extent that the session has.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Entry {
    pub extent: Extent,
    pub state: State,
    /// The request that changed the state last.
    pub request: u64,
}

/// See above.
#[derive(Debug)]
pub(crate) struct Book {
    memory: Memory,
}

impl Ledger for Book {
    /// Whoever it is that has them, and those that go back just now.
    fn extents(&self, each: &mut dyn FnMut(Extent)) {
        self.entries().for_each(|(_, entry)| each(entry.extent));
    }
}

impl Book {
    /// An empty book.
    pub fn new() -> io::Result<Self> {
        let memory = Memory::create("aquifer-session-book", BOOK_BYTES)?;
        memory.atomic_u64(0).store(MAGIC, Release);
        Ok(Self { memory })
    }

    /// The book that an agent before this one kept.
    pub fn recover(memory: Memory) -> io::Result<Self> {
        if memory.len() < BOOK_BYTES || memory.atomic_u64(0).load(Acquire) != MAGIC {
            return Err(io::Error::other("the book of a session is of another version"));
        }
        Ok(Self { memory })
    }

    /// The memory that it is in.
    pub fn memory(&self) -> &Memory {
        &self.memory
    }

    /// Requests for extents whose effect is written down, and all before them.
    pub fn done(&self) -> u64 {
        self.memory.atomic_u64(DONE_AT).load(Acquire)
    }

    pub fn set_done(&self, requests: u64) {
        self.step();
        self.memory.atomic_u64(DONE_AT).store(requests, Release);
    }

    /// Write down an extent that was just taken.
    pub fn add(&self, number: u32, extent: &Extent, state: State, request: u64) {
        let name =
            u64::from(extent.key.0) << 32 | u64::from(extent.node.0) << 16 | u64::from(extent.class.k());
        self.word(number, ADDR).store(extent.addr, Relaxed);
        self.word(number, NAME).store(name, Relaxed);
        let end = self.memory.atomic_u64(END_AT);
        end.store(end.load(Relaxed).max(u64::from(number) + 1), Release);
        self.set(number, state, request);
    }

    /// Its state changes, by a request.
    pub fn set(&self, number: u32, state: State, request: u64) {
        self.step();
        self.word(number, REQUEST).store(request, Release);
        self.put_state(number, state);
    }

    /// It is being given back to the pool. Until then it is whatever it was, to whichever request.
    pub fn set_returning(&self, number: u32, record: u32) {
        self.put_state(number, State::Returning(record));
    }

    fn put_state(&self, number: u32, state: State) {
        self.step();
        let state = match state {
            State::Stocked => 1,
            State::Given => 2,
            State::Returning(record) => 3 | u64::from(record) << 32,
        };
        self.word(number, STATE).store(state, Release);
    }

    /// It is the session's no longer.
    pub fn strike(&self, number: u32) {
        self.step();
        self.word(number, STATE).store(0, Release);
    }

    /// An entry; `None` if there is none of this number, or it is damaged.
    pub fn entry(&self, number: u32) -> Option<Entry> {
        let state = self.word(number, STATE).load(Acquire);
        let state = match state & 0xffff_ffff {
            1 => State::Stocked,
            2 => State::Given,
            3 => State::Returning(u32::try_from(state >> 32).ok()?),
            _ => return None,
        };
        let name = self.word(number, NAME).load(Relaxed);
        let extent = Extent {
            node: NodeId(u16::try_from(name >> 16 & 0xffff).ok()?),
            addr: self.word(number, ADDR).load(Relaxed),
            class: SizeClass::new(u8::try_from(name & 0xffff).ok()?)?,
            key: Key(u32::try_from(name >> 32).ok()?),
        };
        Some(Entry { extent, state, request: self.word(number, REQUEST).load(Relaxed) })
    }

    /// All entries, with their numbers.
    pub fn entries(&self) -> impl Iterator<Item = (u32, Entry)> + '_ {
        (0..self.end()).filter_map(|number| Some((number, self.entry(number)?)))
    }

    /// Above all entries that were ever in use.
    pub fn end(&self) -> u32 {
        let end = self.memory.atomic_u64(END_AT).load(Acquire);
        u32::try_from(end).unwrap_or(u32::MAX).min(EXTENTS_MAX)
    }

    fn word(&self, number: u32, field: usize) -> &std::sync::atomic::AtomicU64 {
        assert!(number < EXTENTS_MAX, "entry {number} of a book");
        self.memory.atomic_u64(ENTRIES_AT + number as usize * ENTRY_BYTES + field)
    }

    /// A place where an agent may be killed.
    #[cfg_attr(not(test), expect(clippy::unused_self, reason = "tests have their say here"))]
    fn step(&self) {
        #[cfg(test)]
        crate::model_tests::may_die();
    }
}
