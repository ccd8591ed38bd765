//! The fuzz target for the page table that an earlier agent left.

use aquifer_fabric::Memory;

use crate::page::{PageState, PageWord};
use crate::table::{PAGES_MAX, PageTable};

/// Bytes of a page table: 2^20 tree nodes of 4096 bytes.
const TABLE_BYTES: usize = 4096 << 20;
/// Tree nodes to which the input can write.
const NODES: usize = 8;
const NODE_BYTES: usize = 4096;
/// Most entries that one store writes. With more, a walk through all pages takes long.
const ENTRIES_MAX: usize = 8;
/// Bytes of one store of the input.
const STORE_BYTES: usize = 9;

thread_local! {
    static MEMORY: Memory = Memory::create("fuzz-table", TABLE_BYTES).expect("the system has addresses");
}

/// Recovers a page table and changes a page.
///
/// The input has stores of 9 bytes: the tree node as u8, the first index as u16, the number of
/// entries as u16, and the value as u32. Returns whether the links are a tree.
///
/// # Panics
/// If a check fails.
#[must_use]
pub fn recover_table(bytes: &[u8]) -> bool {
    let fd = MEMORY.with(|memory| {
        memory.punch(0, TABLE_BYTES).expect("a memfd has holes");
        for store in bytes.chunks_exact(STORE_BYTES) {
            let short = |at: usize| usize::from(u16::from_le_bytes([store[at], store[at + 1]]));
            let (node, first) = (usize::from(store[0]) % NODES, short(1) % 512);
            let count = short(3) % (ENTRIES_MAX + 1);
            let value = u32::from_le_bytes(store[5..9].try_into().expect("4 bytes"));
            for index in first..(first + count).min(512) {
                memory.write(node * NODE_BYTES + index * 8, &u64::from(value).to_le_bytes());
            }
        }
        memory.fd().try_clone_to_owned().expect("the system has descriptors")
    });
    let memory = Memory::from_fd(fd, TABLE_BYTES).expect("it is sealed");
    let Ok(mut table) = PageTable::recover(memory) else { return false };
    assert!(table.bytes() >= NODE_BYTES && table.bytes() <= TABLE_BYTES);
    let before = table.words(0, PAGES_MAX);
    let Some((page, old)) = before.first().copied() else { return true };
    let changed = PageWord::new(PageState::Lost);
    if old != changed {
        table.set(page, changed);
        let mut expected = before;
        expected[0].1 = changed;
        assert!(table.words(0, PAGES_MAX) == expected, "another page has changed with page {page}");
    }
    true
}

/// Page tables.
#[must_use]
pub fn table_seeds() -> Vec<(&'static str, Vec<u8>)> {
    let store = |node: u8, index: u16, count: u16, value: u32| {
        [&[node][..], &index.to_le_bytes(), &count.to_le_bytes(), &value.to_le_bytes()].concat()
    };
    let leaf = [store(0, 0, 1, 1), store(1, 3, 1, 2), store(2, 4, 1, 3), store(3, 5, 7, 7)].concat();
    let second = [leaf.clone(), store(2, 9, 1, 4), store(4, 0, 1, 6)].concat();
    vec![("leaf", leaf), ("leaves", second)]
}
