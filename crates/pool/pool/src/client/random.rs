//! Random bits of keys, and numbers of log entries, for all clients of the process.

use std::cell::RefCell;
use std::hash::{BuildHasher, RandomState};
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::cache::{NumberFns, NumberSource};

/// Keys for which random bits are read from the system at once.
const BATCH: usize = 64;

/// The number source of production clients.
pub(super) const SYSTEM: NumberSource = NumberSource::System(NumberFns { key_bits, nonce });

fn key_bits() -> u32 {
    thread_local! {
        static BATCHED: RefCell<Vec<u32>> = const { RefCell::new(Vec::new()) };
    }
    BATCHED.with_borrow_mut(|batched| {
        batched.pop().unwrap_or_else(|| {
            let mut bytes = [0; BATCH * 4];
            let got = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty());
            // A request of up to 256 bytes is never answered in part.
            assert_eq!(got, Ok(bytes.len()), "the system has random bytes");
            let ([first, others @ ..], []) = bytes.as_chunks::<4>() else { unreachable!("64 of 4 bytes") };
            batched.extend(others.iter().map(|word| u32::from_ne_bytes(*word)));
            u32::from_ne_bytes(*first)
        })
    })
}

fn nonce() -> u32 {
    // One counter for the process: its clients usually are of one host. It begins at a random
    // number, so that a restarted process does not repeat the numbers of the one before.
    static NEXT: LazyLock<AtomicU32> = LazyLock::new(|| {
        let [_, _, _, _, random @ ..] = RandomState::new().hash_one(0).to_le_bytes();
        AtomicU32::new(u32::from_le_bytes(random))
    });
    NEXT.fetch_add(1, Ordering::Relaxed)
}
