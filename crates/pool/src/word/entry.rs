//! An entry of the full log: a control word's record, kept when the word goes on.

use super::{IllegalWord, InlineLog, high, join, log, low, section, span};

/// A record in the low half; in the high half a number that its writer has not used before, so that no entry ever looks as it
/// once did.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct LogEntry(pub u64);

impl LogEntry {
    /// The record of a control word, to be kept.
    #[must_use]
    pub const fn of(word: u64, nonce: u32) -> Self {
        Self(join(nonce, high(word)))
    }

    /// Whether it tells the same as the record in that word. Timestamps may differ: a change of a hint moves them on.
    #[must_use]
    pub const fn tells(self, word: u64) -> bool {
        log::untimed(low(self.0)) == log::untimed(high(word))
    }

    /// The record, if it is of a span's word; `None` if nothing was ever kept here.
    ///
    /// # Errors
    /// If the bits cannot be a log.
    pub fn of_span(self) -> Result<Option<InlineLog>, IllegalWord> {
        InlineLog::decode(low(self.0), span::PLACES)
    }

    /// The record, if it is of a section's word; `None` if nothing was ever kept here.
    ///
    /// # Errors
    /// If the bits cannot be a log.
    pub fn of_section(self) -> Result<Option<InlineLog>, IllegalWord> {
        InlineLog::decode(low(self.0), section::PLACES)
    }
}
