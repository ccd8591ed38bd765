//! Random keys, and numbers of log entries, for all clients of the process.

use std::cell::RefCell;
use std::hash::{BuildHasher, RandomState};
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::cache::{Draws, Source};

/// Keys whose bits are fetched from the system together.
const BATCH: usize = 64;

/// The product's sources.
pub(super) const SYSTEM: Draws = Draws::From(Source { key_bits, nonce });

fn key_bits() -> u32 {
    thread_local! {
        static DRAWN: RefCell<Vec<u32>> = const { RefCell::new(Vec::new()) };
    }
    DRAWN.with_borrow_mut(|drawn| {
        drawn.pop().unwrap_or_else(|| {
            let mut bytes = [0; BATCH * 4];
            let got = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty());
            // So few bytes come at once or not at all.
            assert_eq!(got, Ok(bytes.len()), "the system has random bytes");
            let ([first, others @ ..], []) = bytes.as_chunks::<4>() else { unreachable!("64 of 4 bytes") };
            drawn.extend(others.iter().map(|word| u32::from_ne_bytes(*word)));
            u32::from_ne_bytes(*first)
        })
    })
}

fn nonce() -> u32 {
    // All clients here are of one host, most often; a process that was started again does not begin where the one before began.
    static NEXT: LazyLock<AtomicU32> = LazyLock::new(|| {
        let [_, _, _, _, random @ ..] = RandomState::new().hash_one(0).to_le_bytes();
        AtomicU32::new(u32::from_le_bytes(random))
    });
    NEXT.fetch_add(1, Ordering::Relaxed)
}
