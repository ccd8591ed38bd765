//! Looks at pages in memory that only this process writes: the mempool and fetch buffers.

use aquifer_fabric::Memory;

use crate::page::PAGE_BYTES;

/// The bytes of the page at `offset`. The caller must be the one that decides when they change: the owner of the slot or buffer.
#[must_use]
pub fn page(memory: &Memory, offset: usize) -> &[u8] {
    assert!(offset.is_multiple_of(PAGE_BYTES) && offset + PAGE_BYTES <= memory.len());
    // SAFETY: the range is inside the mapping, which lives as long as `memory`. Mempool slots and fetch buffers are
    // mapped by the agent only, and change only through the thread that owns the slot, which is the caller.
    unsafe { std::slice::from_raw_parts(memory.as_ptr().add(offset), PAGE_BYTES) }
}
