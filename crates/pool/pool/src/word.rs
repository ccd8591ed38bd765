//! Control words of sections and spans, and entries of the full log.
//!
//! The low half of a control word is the state; the high half is the inline log, the record of the
//! last change. One CAS changes both, and is the commit point of an operation.
//!
//! All functions are pure and total. Words are read from memory that peers write, so any 64 bits
//! may arrive. [`SectionWord::check`] and [`SpanWord::check`] detect illegal ones.

mod entry;
mod log;
mod run;
mod section;
mod span;

pub use entry::LogEntry;
pub use log::{InlineLog, LogOp, STAMPS};
pub use run::AlignedRun;
pub use section::{SectionWord, SpanState};
pub use span::SpanWord;

/// The reason why 64 bits cannot be a control word.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, thiserror::Error)]
pub enum IllegalWord {
    /// The inline log is not one that this version writes.
    #[error("its inline log {0:#010x} is not one that this version writes")]
    Log(u32),
    /// The state is not a result of the change in the inline log.
    #[error("its bits {bits:#010x} contradict its inline log {log:?}")]
    Contradiction {
        /// The state half.
        bits: u32,
        /// The log half.
        log: InlineLog,
    },
}

/// The bits of the inline log of a control word.
#[must_use]
pub const fn record_of(word: u64) -> u32 {
    high(word)
}

/// The low half of a word.
const fn low(word: u64) -> u32 {
    (word & 0xffff_ffff) as u32
}

/// The high half of a word.
const fn high(word: u64) -> u32 {
    (word >> 32) as u32
}

/// Joins two halves into a word.
const fn join(high: u32, low: u32) -> u64 {
    ((high as u64) << 32) | low as u64
}
