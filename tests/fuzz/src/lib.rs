//! Fuzz targets: one for each parser of bytes from outside.
//!
//! A target parses bytes with the product's code and checks what was parsed: it is within all
//! bounds, and encodes to the same bytes again. `tests/corpus.rs` runs each target on its corpus,
//! and `scripts/fuzz.sh` searches for new inputs with libFuzzer.
//!
//! Each target has a mutation: a check that its parser omits while the mutation is active. The
//! fuzzer must find an input that notices it.
//!
//! The crate is empty in a build without debug assertions, which contains no mutations.

#![cfg(debug_assertions)]
#![forbid(unsafe_code)]

mod agent;
mod cache;
mod cache_store;
mod daemons;
mod directory;
mod fabric;
mod ipc;
mod objects;
mod pager;
mod pool;

/// A parser, and how to fuzz it.
#[derive(Clone, Copy, Debug)]
pub struct Target {
    /// The name, which is also that of the folder with the corpus.
    pub name: &'static str,
    /// Parses the bytes and checks what was parsed. Returns whether the parser accepted them.
    ///
    /// Panics if a check fails.
    pub run: fn(&[u8]) -> bool,
    /// Inputs that the parser accepts, with their names: what the product's encoders write.
    pub seeds: fn() -> Vec<(&'static str, Vec<u8>)>,
    /// Runs work while the mutation of this parser is active.
    pub with_mutation: fn(&mut dyn FnMut()),
}

/// All targets.
pub const TARGETS: &[Target] = &[
    ipc::FRAME,
    ipc::RING,
    directory::WIRE,
    directory::RECORDS,
    pool::HEADER,
    fabric::HELLO,
    fabric::HANDSHAKE,
    fabric::REQUESTS,
    fabric::ANSWERS,
    fabric::SHM_HELLO,
    fabric::SHM_CONTROL,
    fabric::MAILBOX,
    daemons::VERBS,
    daemons::KEEPER,
    daemons::METRICS,
    agent::WORKER,
    agent::JOURNAL,
    agent::PROCESS_FILES,
    agent::RECORDS,
    agent::BOOK,
    pager::TABLE,
    objects::MESSAGES,
    cache::REQUESTS,
    cache::FRAMES,
    cache_store::STORE,
];

/// The target with this name.
#[must_use]
pub fn find(name: &str) -> Option<&'static Target> {
    TARGETS.iter().find(|target| target.name == name)
}
