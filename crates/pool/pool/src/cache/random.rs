//! The source of random key bits and of the numbers in log entries, so that state machines are
//! deterministic.

use std::hash::{Hash, Hasher};

/// The numbers of one client.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub enum NumberSource {
    /// Numbers that functions of the edge return.
    System(NumberFns),
    /// Counted numbers for a simulation: equal in each run, and different for each client.
    Counted {
        /// The next bits for a key.
        key_bits: u32,
        /// The next number of a log entry.
        nonce: u32,
        /// The most clients.
        clients: u32,
    },
}

/// Functions of the edge that provide numbers.
#[derive(Clone, Copy, Debug)]
pub struct NumberFns {
    /// Random bits for a key, which no peer can guess.
    pub key_bits: fn() -> u32,
    /// A number that no client of this process has used before.
    pub nonce: fn() -> u32,
}

impl PartialEq for NumberFns {
    /// Always true: a process has one set of functions.
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl Eq for NumberFns {}

impl Hash for NumberFns {
    fn hash<H: Hasher>(&self, _: &mut H) {}
}

impl NumberSource {
    /// Creates counted numbers for client `number` of at most `clients`.
    #[must_use]
    pub const fn counted(number: u32, clients: u32) -> Self {
        Self::Counted { key_bits: number, nonce: number, clients }
    }

    pub(super) fn key_bits(&mut self) -> u32 {
        match self {
            Self::System(functions) => (functions.key_bits)(),
            Self::Counted { key_bits, clients, .. } => advance(key_bits, *clients),
        }
    }

    pub(super) fn nonce(&mut self) -> u32 {
        match self {
            Self::System(functions) => (functions.nonce)(),
            Self::Counted { nonce, clients, .. } => advance(nonce, *clients),
        }
    }
}

fn advance(next: &mut u32, step: u32) -> u32 {
    std::mem::replace(next, next.wrapping_add(step))
}

impl std::fmt::Debug for NumberSource {
    /// Prints no numbers: keys stay out of logs.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Numbers")
    }
}
