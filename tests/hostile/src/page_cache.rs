//! Attempts to read pages of others that are in the page cache of the host.

use std::fs::read_dir;

use crate::sys::{self, PAGE};

/// Memory of the attacker, several times its limit.
const BYTES: usize = 64 << 20;
const ROUNDS: u64 = 6;

/// Writes, discards and reads memory that passes through the page cache with that of others. Every
/// word must be its own, or zero. No process of this user may have the cache's memory.
pub fn read() -> bool {
    let area = sys::reserve(BYTES);
    let mut is_own = true;
    for round in 1..=ROUNDS {
        for at in 0..BYTES / PAGE {
            let stamp = round << 32 | at as u64;
            let page = area + at * PAGE;
            let found = sys::words(page);
            is_own &= found.iter().all(|word| *word == 0 || *word == (round - 1) << 32 | at as u64);
            match at % 3 {
                0 => sys::discard(page, PAGE),
                1 => found.fill(stamp),
                // A part of the page is kept.
                _ => found[..PAGE / 16].fill(stamp),
            }
            is_own &=
                sys::words(page).iter().all(|word| *word == 0 || [round, round - 1].contains(&(word >> 32)));
        }
    }
    is_own && is_cache_unreachable()
}

/// Whether no process of this user, the worker included, has the mempool or an index of the page
/// cache, as a descriptor or in its memory.
fn is_cache_unreachable() -> bool {
    let is_secret = |text: &str| text.contains("aquifer-mempool") || text.contains("aquifer-cache");
    let mut has_worker = false;
    let mut has_cache = false;
    for pid in sys::processes() {
        // Those of other users cannot be read.
        let Ok(links) = read_dir(format!("/proc/{pid}/fd")) else { continue };
        let read = |name: &str| std::fs::read_to_string(format!("/proc/{pid}/{name}")).unwrap_or_default();
        has_worker |= read("comm").starts_with("aquifer-worker");
        let mut links = links.flatten().filter_map(|entry| std::fs::read_link(entry.path()).ok());
        has_cache |= is_secret(&read("maps")) || links.any(|link| is_secret(&link.to_string_lossy()));
    }
    has_worker && !has_cache
}
