//! Where the random bits of keys and the numbers of log entries come from: the state machines draw none themselves.

use std::hash::{Hash, Hasher};

/// The sources of one client.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub enum Draws {
    /// The product's.
    From(Source),
    /// A simulation's: the same numbers each time, and no two clients have one in common.
    Counted {
        /// The next bits for a key.
        key_bits: u32,
        /// The next number of a log entry.
        nonce: u32,
        /// How many clients there may be.
        clients: u32,
    },
}

/// Functions of the edge.
#[derive(Clone, Copy, Debug)]
pub struct Source {
    /// Random bits for a key, which no peer can guess.
    pub key_bits: fn() -> u32,
    /// A number that no client of this process has had before.
    pub nonce: fn() -> u32,
}

impl PartialEq for Source {
    /// A process has one.
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl Eq for Source {}

impl Hash for Source {
    fn hash<H: Hasher>(&self, _: &mut H) {}
}

impl Draws {
    /// For a simulation: client `number` of so many.
    #[must_use]
    pub const fn counted(number: u32, clients: u32) -> Self {
        Self::Counted { key_bits: number, nonce: number, clients }
    }

    pub(super) fn key_bits(&mut self) -> u32 {
        match self {
            Self::From(source) => (source.key_bits)(),
            Self::Counted { key_bits, clients, .. } => advance(key_bits, *clients),
        }
    }

    pub(super) fn nonce(&mut self) -> u32 {
        match self {
            Self::From(source) => (source.nonce)(),
            Self::Counted { nonce, clients, .. } => advance(nonce, *clients),
        }
    }
}

fn advance(next: &mut u32, step: u32) -> u32 {
    std::mem::replace(next, next.wrapping_add(step))
}

impl std::fmt::Debug for Draws {
    /// Keys stay out of logs.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Draws")
    }
}
