//! The book of a session: the record of its extents, in memory that outlives the agent.
//!
//! An agent may be killed between any two stores, and the next one resumes from what is stored.
//! Therefore the state of a new entry is stored last, and the state of a removed entry is cleared
//! before the rest is reused. Programs never see this memory.
//! The layout is in `docs/formats/ipc.md`.

use std::io;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use aquifer_fabric::{Key, Memory};
use aquifer_pool::{Extent, Ledger, NodeId, SizeClass};

use crate::mutation::Mutation;

/// Maximum number of extents of a session, its stock included.
pub const EXTENTS_MAX: u32 = 1 << 20;

/// First word of a book. The seventh byte is the version.
const MAGIC: u64 = u64::from_le_bytes(*b"AQBOOK\x01\0");
const DONE_AT: usize = 8;
const END_AT: usize = 16;
const ENTRIES_AT: usize = 64;
const ENTRY_BYTES: usize = 32;
const BOOK_BYTES: usize = ENTRIES_AT + EXTENTS_MAX as usize * ENTRY_BYTES;
// Offsets in an entry.
const ADDR: usize = 0;
const NAME: usize = 8;
const STATE: usize = 16;
const REQUEST: usize = 24;

/// State of an extent in the book.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum ExtentState {
    /// Kept ready, to be allocated by the program or freed.
    Stocked,
    /// Allocated by the program.
    InUse,
    /// Being freed. Has the log record of the extent's control word when the free began.
    Freeing(u32),
}

/// An entry of the book.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct BookEntry {
    pub extent: Extent,
    pub state: ExtentState,
    /// The request that changed the state last.
    pub request: u64,
}

/// The error for memory that is not a book of this version.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("the book of the session has another version, or is truncated")]
pub struct InvalidBook;

/// The record of a session's extents.
#[derive(Debug)]
pub(crate) struct Book {
    memory: Memory,
}

impl Ledger for Book {
    /// Lists extents in any state: the session owns all of them until they are removed.
    fn extents(&self, each: &mut dyn FnMut(Extent)) {
        self.entries().for_each(|(_, entry)| each(entry.extent));
    }
}

impl Book {
    /// Creates an empty book.
    pub fn new() -> io::Result<Self> {
        let memory = Memory::create("aquifer-session-book", BOOK_BYTES)?;
        memory.atomic_u64(0).store(MAGIC, Release);
        Ok(Self { memory })
    }

    /// Opens the book of an earlier agent.
    pub fn recover(memory: Memory) -> Result<Self, InvalidBook> {
        if memory.len() < BOOK_BYTES || memory.atomic_u64(0).load(Acquire) != MAGIC {
            return Err(InvalidBook);
        }
        Ok(Self { memory })
    }

    /// The memory of the book.
    pub fn memory(&self) -> &Memory {
        &self.memory
    }

    /// Number of requests that are done: their answers are in the ring.
    pub fn done_requests(&self) -> u64 {
        self.memory.atomic_u64(DONE_AT).load(Acquire)
    }

    /// Stores the number of requests that are done.
    pub fn set_done_requests(&self, requests: u64) {
        self.kill_point();
        self.memory.atomic_u64(DONE_AT).store(requests, Release);
    }

    /// Records an extent that was just allocated.
    pub fn insert(&self, number: u32, extent: &Extent, state: ExtentState, request: u64) {
        let name =
            u64::from(extent.key.0) << 32 | u64::from(extent.node.0) << 16 | u64::from(extent.class.k());
        self.word(number, ADDR).store(extent.addr, Relaxed);
        self.word(number, NAME).store(name, Relaxed);
        let end = self.memory.atomic_u64(END_AT);
        end.store(end.load(Relaxed).max(u64::from(number) + 1), Release);
        self.set_state(number, state, request);
    }

    /// Changes the state of an entry on behalf of a request.
    pub fn set_state(&self, number: u32, state: ExtentState, request: u64) {
        self.kill_point();
        self.word(number, REQUEST).store(request, Release);
        self.store_state(number, state);
    }

    /// Records that the free of an extent begins. Does not change the entry's request.
    pub fn set_freeing(&self, number: u32, record: u32) {
        self.store_state(number, ExtentState::Freeing(record));
    }

    fn store_state(&self, number: u32, state: ExtentState) {
        self.kill_point();
        let state = match state {
            ExtentState::Stocked => 1,
            ExtentState::InUse => 2,
            ExtentState::Freeing(record) => 3 | u64::from(record) << 32,
        };
        self.word(number, STATE).store(state, Release);
    }

    /// Removes an entry.
    pub fn remove(&self, number: u32) {
        self.kill_point();
        self.word(number, STATE).store(0, Release);
    }

    /// The entry of this number; `None` if it is unused or damaged.
    pub fn entry(&self, number: u32) -> Option<BookEntry> {
        let state = self.word(number, STATE).load(Acquire);
        let state = match state & 0xffff_ffff {
            1 => ExtentState::Stocked,
            2 => ExtentState::InUse,
            3 => ExtentState::Freeing(u32::try_from(state >> 32).ok()?),
            _ => return None,
        };
        let name = self.word(number, NAME).load(Relaxed);
        let extent = Extent {
            node: NodeId(u16::try_from(name >> 16 & 0xffff).ok()?),
            addr: self.word(number, ADDR).load(Relaxed),
            class: SizeClass::new(u8::try_from(name & 0xffff).ok()?)?,
            key: Key(u32::try_from(name >> 32).ok()?),
        };
        Some(BookEntry { extent, state, request: self.word(number, REQUEST).load(Relaxed) })
    }

    /// All entries, with their numbers.
    pub fn entries(&self) -> impl Iterator<Item = (u32, BookEntry)> + '_ {
        (0..self.end()).filter_map(|number| Some((number, self.entry(number)?)))
    }

    /// A number above those of all entries that were ever in use.
    pub fn end(&self) -> u32 {
        let end = self.memory.atomic_u64(END_AT).load(Acquire);
        let most = if Mutation::TrustEntryCount.is_active() { u32::MAX } else { EXTENTS_MAX };
        u32::try_from(end).unwrap_or(u32::MAX).min(most)
    }

    fn word(&self, number: u32, field: usize) -> &AtomicU64 {
        assert!(number < EXTENTS_MAX, "entry {number} is outside of the book");
        self.memory.atomic_u64(ENTRIES_AT + number as usize * ENTRY_BYTES + field)
    }

    /// A point at which the model tests may kill the agent.
    #[cfg_attr(not(test), expect(clippy::unused_self, reason = "the body is for tests only"))]
    fn kill_point(&self) {
        #[cfg(test)]
        crate::model_tests::kill_point();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn damaged_entries_of_a_book_are_skipped() {
        let book = Book::new().expect("memory");
        let extent = Extent { node: NodeId(1), addr: 8192, class: SizeClass::CHUNK, key: Key(7) };
        book.insert(0, &extent, ExtentState::InUse, 3);
        book.insert(2, &extent, ExtentState::Stocked, 4);
        let fd = book.memory().fd().try_clone_to_owned().expect("a descriptor");
        let memory = Memory::whole(fd).expect("a mapping");
        memory.atomic_u64(64 + 16).store(77, Relaxed);
        let entries: Vec<_> = Book::recover(memory).expect("a book").entries().collect();
        assert_eq!(entries.len(), 1);
        assert!(Book::recover(Memory::create("none", 4096).expect("memory")).is_err());
    }
}
