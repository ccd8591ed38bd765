//! Places of words in a node's metadata.

use std::fmt;

use super::Grant;
use crate::layout::SECTION_ENTRIES;
use crate::size::{SECTION_CHUNKS, SECTION_SPANS, SPAN_CHUNKS, SizeClass};

/// The place of a control word, or of an entry in `logs[]` or `keys[]`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub enum WordAt {
    /// The word of the section with this index.
    Section(u32),
    /// The word of the span with this index, counted over all sections.
    Span(u32),
    /// The entry of `logs[]` with this index, counted over all sections.
    Log(u32),
    /// The entry of `keys[]` with this index, counted over all sections.
    Key(u32),
}

impl WordAt {
    /// The number of a section's entries before those of its spans.
    const SPAN_ENTRIES: u32 = 16;
    /// The number of a section's entries before those of its chunks.
    const CHUNK_ENTRIES: u32 = Self::SPAN_ENTRIES + SECTION_SPANS;

    /// The log entry of a span, for the record of a group that begins with it.
    #[must_use]
    pub const fn span_entry(span: u32) -> Self {
        Self::Log(span / SECTION_SPANS * SECTION_ENTRIES + Self::SPAN_ENTRIES + span % SECTION_SPANS)
    }

    /// The log entry of a chunk, for the record of an extent that begins with it.
    #[must_use]
    pub const fn chunk_entry(chunk: u32) -> Self {
        Self::Log(chunk / SECTION_CHUNKS * SECTION_ENTRIES + Self::CHUNK_ENTRIES + chunk % SECTION_CHUNKS)
    }

    /// The key entry of a section, for an extent that is the section.
    #[must_use]
    pub const fn section_key(section: u32) -> Self {
        Self::Key(section * SECTION_ENTRIES)
    }

    /// The key entry of a span: the owner of the span, and the key of an extent of whole spans that
    /// begins with it.
    #[must_use]
    pub const fn span_key(span: u32) -> Self {
        Self::Key(span / SECTION_SPANS * SECTION_ENTRIES + Self::SPAN_ENTRIES + span % SECTION_SPANS)
    }

    /// Whether this is the key entry of a span.
    pub(crate) const fn is_key_of_span(self) -> bool {
        let place = match self {
            Self::Key(index) => index % SECTION_ENTRIES,
            _ => 0,
        };
        Self::SPAN_ENTRIES <= place && place < Self::CHUNK_ENTRIES
    }

    /// The key entry of a chunk, for an extent that begins with it.
    #[must_use]
    pub const fn chunk_key(chunk: u32) -> Self {
        Self::Key(chunk / SECTION_CHUNKS * SECTION_ENTRIES + Self::CHUNK_ENTRIES + chunk % SECTION_CHUNKS)
    }

    /// The key entry of an extent.
    #[must_use]
    pub const fn key_of(grant: Grant) -> Self {
        if grant.class.is_within_span() {
            Self::chunk_key(grant.chunk)
        } else if grant.class.k() < SizeClass::SECTION.k() {
            Self::span_key(grant.chunk / SPAN_CHUNKS)
        } else {
            Self::section_key(grant.chunk / SECTION_CHUNKS)
        }
    }
}

impl fmt::Display for WordAt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Section(index) => write!(f, "the word of section {index}"),
            Self::Span(index) => write!(f, "the word of span {index}"),
            Self::Log(index) => write!(f, "log entry {index}"),
            Self::Key(index) => write!(f, "key entry {index}"),
        }
    }
}
