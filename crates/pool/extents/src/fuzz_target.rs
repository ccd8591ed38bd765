//! Fuzz targets for the memory and the record of a session that the keeper returns.

use aquifer_fabric::{Key, Memory};
use aquifer_pool::{Extent, NodeId, SizeClass};

use crate::book::{Book, EXTENTS_MAX, ExtentState};
use crate::serve::SessionRecord;

/// Offset of the entries, and bytes of each.
const ENTRIES_AT: usize = 64;
const ENTRY_BYTES: usize = 32;
/// Most entries of an input.
const ENTRIES: u32 = 16;
/// Offset of the word with the bound of the entries.
const END_AT: usize = 16;

thread_local! {
    static BOOK: Memory = {
        let book = Book::new().expect("the system has memory");
        let fd = book.memory().fd().try_clone_to_owned().expect("the system has descriptors");
        Memory::whole(fd).expect("the memory is sealed")
    };
}

/// Recovers a book, and records its entries again.
///
/// The input is the beginning of the memory. Returns whether all entries are valid.
///
/// # Panics
/// If a check fails.
#[must_use]
pub fn recover_book(bytes: &[u8]) -> bool {
    let mut initial = vec![0; ENTRIES_AT + ENTRIES as usize * ENTRY_BYTES];
    let used = bytes.len().min(initial.len());
    initial[..used].copy_from_slice(&bytes[..used]);
    let memory = BOOK.with(|memory| {
        memory.write(0, &initial);
        let fd = memory.fd().try_clone_to_owned().expect("the system has descriptors");
        Memory::whole(fd).expect("the memory is sealed")
    });
    let Ok(book) = Book::recover(memory) else { return false };
    assert!(book.end() <= EXTENTS_MAX, "a book has no entry {}", book.end());
    let mut is_valid = true;
    for number in 0..book.end().min(ENTRIES) {
        let Some(entry) = book.entry(number) else {
            is_valid = false;
            continue;
        };
        book.insert(number, &entry.extent, entry.state, entry.request);
        assert_eq!(book.entry(number), Some(entry));
        book.remove(number);
        assert_eq!(book.entry(number), None);
    }
    is_valid
}

/// Books with entries in all states.
#[must_use]
pub fn book_seeds() -> Vec<(&'static str, Vec<u8>)> {
    let book = Book::new().expect("the system has memory");
    let class = SizeClass::new(3).expect("a class");
    let extent = Extent { node: NodeId(2), addr: 1 << 30, class, key: Key(0x8765_4321) };
    let states = [ExtentState::Stocked, ExtentState::InUse, ExtentState::Freeing(9)];
    for (number, state) in (0..).zip(states) {
        book.insert(number, &extent, state, u64::from(number) + 40);
    }
    book.set_done_requests(42);
    let mut bytes = vec![0; ENTRIES_AT + states.len() * ENTRY_BYTES];
    book.memory().read(0, &mut bytes);
    assert_eq!(bytes[END_AT], 3, "the offset is that of the format");
    vec![("states", bytes)]
}

/// Parses the record of a session.
///
/// # Panics
/// If a check fails.
#[must_use]
pub fn parse_record(text: &str) -> bool {
    let Ok(record) = serde_json::from_str::<SessionRecord>(text) else { return false };
    let again = serde_json::to_string(&record).expect("plain structs are JSON");
    assert_eq!(serde_json::from_str::<SessionRecord>(&again).ok(), Some(record));
    true
}

/// The record of a session.
#[must_use]
pub fn record_seed() -> String {
    let record = SessionRecord { tenant: 1000, pid: 77, version: aquifer_ipc::ring::RING_VERSION };
    serde_json::to_string(&record).expect("plain structs are JSON")
}
