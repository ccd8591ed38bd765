//! Slices of pages in memory that only this process writes: the mempool and fetch buffers.

use aquifer_fabric::Memory;

use crate::page::PAGE_BYTES;

/// The bytes of the page at `offset`.
///
/// The caller must own the slot or the buffer, so that the bytes do not change while it uses them.
#[must_use]
pub fn page(memory: &Memory, offset: usize) -> &[u8] {
    assert!(offset.is_multiple_of(PAGE_BYTES) && offset + PAGE_BYTES <= memory.len());
    // SAFETY: the range is inside the mapping, which lives as long as `memory`. Only the agent maps
    // mempool slots and fetch buffers, and only the owner of the slot, which is the caller, changes
    // them.
    unsafe { std::slice::from_raw_parts(memory.as_ptr().add(offset), PAGE_BYTES) }
}
