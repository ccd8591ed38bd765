//! Crates and documents that do not keep the rules of language yet.
//!
//! A crate is removed from a list when it keeps the rule. Nothing is added.

/// Units with words that the glossary bans.
pub const WORDS: &[&str] = &[];

/// Units with doc comments that begin with a word that stands for another one.
pub const FIRST_WORDS: &[&str] = &[
    "bindings/c",
    "crates/bench/bench",
    "crates/bench/research",
    "crates/cache/cache",
    "crates/cache/cache-cluster",
    "crates/fabric/fabric",
    "crates/fabric/fabric-verbs",
    "crates/heap/heaps",
    "crates/heap/objects",
    "crates/ownership/ownership",
    "crates/pool/extents",
    "crates/pool/pool",
    "crates/segments/segments",
    "tests/e2e",
    "tests/fuzz",
    "tests/hostile",
    "tests/memcached",
    "tests/sim",
    "tests/support",
    "tests/tidy",
];

/// Documents with lines of more than 200 characters.
pub const MARKDOWN_LINES: &[&str] = &[];

/// Units with lines of code over 110 columns, or of comments over 100.
pub const CODE_LINES: &[&str] = &[];
