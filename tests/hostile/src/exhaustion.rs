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

/// Fills as many MiB of memory as the second argument says, says so, and waits for the end of
/// standard input.
pub fn fill() -> bool {
    let mib = std::env::args().nth(2).and_then(|text| text.parse::<usize>().ok()).expect("a size");
    let first = sys::reserve(mib << 20);
    for offset in (0..mib << 20).step_by(sys::PAGE) {
        sys::touch(first + offset);
    }
    println!("sent");
    let _end = std::io::Read::read(&mut std::io::stdin(), &mut [0]);
    true
}
