//! Prefetching for requests that were received and are not yet served.
//!
//! A search of the index and a read of an item each wait for memory. The keys of the next requests
//! are known, so that their memory can be prefetched in parallel.

use smallvec::SmallVec;

use crate::protocol::{number, words};
use crate::store::Store;

/// Most requests of a connection whose keys are collected ahead.
pub const REQUESTS_AHEAD: usize = 16;
/// Number of keys at which no more connections are searched for keys.
pub const KEYS_AHEAD: usize = 16;

/// The hashes of keys, and whether an item is stored for each.
pub type Hashes = SmallVec<[(u64, bool); 2 * KEYS_AHEAD]>;

/// Collects the hashes of the keys of the first text requests in `input`.
///
/// An unusual request ends the search: only speed depends on it.
pub fn collect(store: &Store, input: &[u8], hashes: &mut Hashes) {
    let mut at = 0;
    for _ in 0..REQUESTS_AHEAD {
        let Some(len) = memchr::memchr(b'\n', &input[at..]) else { return };
        let line = input[at..at + len].strip_suffix(b"\r").unwrap_or(&input[at..at + len]);
        at += len + 1;
        let Some((command, mut end)) = words::next(line, 0) else { return };
        let value_word = match command {
            b"get" | b"gets" => {
                while hashes.len() < 2 * KEYS_AHEAD
                    && let Some((key, next)) = words::next(line, end)
                {
                    hashes.push((store.hash(key), false));
                    end = next;
                }
                continue;
            }
            b"set" | b"add" | b"replace" | b"append" | b"prepend" | b"cas" => 2,
            b"ms" => 0,
            _ => usize::MAX,
        };
        let Some((key, mut end)) = words::next(line, end) else { return };
        if hashes.len() >= 2 * KEYS_AHEAD {
            return;
        }
        hashes.push((store.hash(key), value_word != usize::MAX));
        if value_word == usize::MAX {
            continue;
        }
        for _ in 0..value_word {
            end = words::next(line, end).map_or(end, |(_, next)| next);
        }
        let value_len = words::next(line, end).and_then(|(word, _)| number::uint32(word));
        at += value_len.map_or(0, |len| len as usize + 2);
        if at >= input.len() {
            return;
        }
    }
}

/// Prefetches the memory that operations on these keys need.
pub fn load(store: &Store, hashes: &Hashes) {
    // For one key a prefetch gains nothing.
    if hashes.len() > 1 {
        store.prefetch(hashes);
    }
}
