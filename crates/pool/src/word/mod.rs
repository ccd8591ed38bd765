//! Control words: the state of a section or a span in the low half, in the high half the
//! inline log, the record of the last change. One CAS changes both: it is the commit point.
//!
//! All functions are pure and total: a word comes out of memory that others write, so any 64 bits
//! may arrive, and [`SectionWord::check`] and [`SpanWord::check`] say whether they can be right.

mod entry;
mod log;
mod run;
mod section;
mod span;

pub use entry::LogEntry;
pub use log::{InlineLog, LogOp, STAMPS};
pub use run::Run;
pub use section::{SectionWord, SpanState};
pub use span::SpanWord;

/// Why 64 bits cannot be a control word.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, thiserror::Error)]
pub enum IllegalWord {
    /// The inline log is not one that this version writes.
    #[error("its inline log {0:#010x} is none that this version writes")]
    Log(u32),
    /// The inline log tells of a change whose result is not in the bits.
    #[error("its bits {bits:#010x} contradict its inline log {log:?}")]
    Contradiction {
        /// The state half.
        bits: u32,
        /// The log half.
        log: InlineLog,
    },
}

/// The inline log of a control word, as it stands there.
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

/// A word of two halves.
const fn join(high: u32, low: u32) -> u64 {
    ((high as u64) << 32) | low as u64
}
