//! Crates and documents that do not keep the rules of language yet.
//!
//! A crate is removed from a list when it keeps the rule. Nothing is added.

/// Units with words that the glossary bans.
pub const WORDS: &[&str] = &[];

/// Documents with lines of more than 200 characters.
pub const MARKDOWN_LINES: &[&str] = &[];

/// Units with lines of code over 110 columns, or of comments over 100.
pub const CODE_LINES: &[&str] = &[];
