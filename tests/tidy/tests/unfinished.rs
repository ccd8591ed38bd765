//! Crates and documents that do not keep the rules of language yet.
//!
//! A crate is removed from a list when it keeps the rule. Nothing is added.

/// Units with words that the glossary bans.
pub const WORDS: &[&str] = &[];

/// Units with doc comments that begin with a pronoun instead of their noun.
pub const FIRST_WORDS: &[&str] = &[
    "crates/base/channel",
    "crates/base/ipc",
    "crates/base/keeper",
    "crates/base/metrics",
    "crates/base/report",
    "crates/base/secure-channel",
    "crates/cli/aquifer",
    "crates/daemons/agent",
    "crates/daemons/host",
    "crates/daemons/node",
    "crates/daemons/swap",
    "crates/paging/block",
    "crates/paging/pager",
    "crates/program/attach",
];

/// Documents with lines of more than 200 characters.
pub const MARKDOWN_LINES: &[&str] = &[];

/// Units with lines of code over 110 columns, or of comments over 100.
pub const CODE_LINES: &[&str] = &[];
