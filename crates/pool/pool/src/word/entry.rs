//! Entries of the full log: records of control words, kept when the words change.

use super::{IllegalWord, InlineLog, high, join, log, low, section, span};

/// An entry of the full log: the record in the low half, and a number in the high half.
///
/// The writer has not used the number before, so an entry never returns to a former value.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct LogEntry(pub u64);

impl LogEntry {
    /// Creates the entry that keeps the record of a control word.
    #[must_use]
    pub const fn of(word: u64, nonce: u32) -> Self {
        Self(join(nonce, high(word)))
    }

    /// Whether this keeps the record of a control word. Timestamps may differ, because a change of
    /// a hint advances them.
    #[must_use]
    pub const fn is_record_of(self, word: u64) -> bool {
        log::untimed(low(self.0)) == log::untimed(high(word))
    }

    /// The record, for an entry of a chunk; `None` if the entry was never written.
    ///
    /// # Errors
    /// If the bits are not a log.
    pub fn of_span(self) -> Result<Option<InlineLog>, IllegalWord> {
        InlineLog::decode(low(self.0), span::PLACES)
    }

    /// The record, for an entry of a span; `None` if the entry was never written.
    ///
    /// # Errors
    /// If the bits are not a log.
    pub fn of_section(self) -> Result<Option<InlineLog>, IllegalWord> {
        InlineLog::decode(low(self.0), section::PLACES)
    }
}
