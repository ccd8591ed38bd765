//! Attacks on the memory and the descriptors of the agent.

use crate::sys;

/// Touches one page in each 2 MiB. Each costs the agent a page of its page table.
pub fn sparse() -> bool {
    const STEP: usize = 2 << 20;
    let count = 1_100_000;
    let first = sys::reserve(count * STEP);
    for number in 0..count {
        sys::touch(first + number * STEP);
    }
    println!("touched {count} pages");
    false
}
