//! Names of words in a node's metadata.

use std::fmt;

use super::Grant;
use crate::layout::SECTION_ENTRIES;
use crate::size::{SECTION_CHUNKS, SECTION_SPANS, SPAN_CHUNKS, SizeClass};

/// Names a control word, or an entry of the full log.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub enum WordAt {
    /// That of the section with this index.
    Section(u32),
    /// That of the span with this index, counted over all sections.
    Span(u32),
    /// The entry of `logs[]` with this index, counted over all sections.
    Log(u32),
    /// The entry of `keys[]` with this index, likewise.
    Key(u32),
}

impl WordAt {
    /// A section's entries before those of its spans.
    const SPAN_ENTRIES: u32 = 16;
    /// A section's entries before those of its chunks.
    const CHUNK_ENTRIES: u32 = Self::SPAN_ENTRIES + SECTION_SPANS;

    /// The entry of a span, for the record of a group that begins with it.
    #[must_use]
    pub const fn span_entry(span: u32) -> Self {
        Self::Log(span / SECTION_SPANS * SECTION_ENTRIES + Self::SPAN_ENTRIES + span % SECTION_SPANS)
    }

    /// The entry of a chunk, for the record of an extent that begins with it.
    #[must_use]
    pub const fn chunk_entry(chunk: u32) -> Self {
        Self::Log(chunk / SECTION_CHUNKS * SECTION_ENTRIES + Self::CHUNK_ENTRIES + chunk % SECTION_CHUNKS)
    }

    /// The key of a section that is one extent.
    #[must_use]
    pub const fn section_key(section: u32) -> Self {
        Self::Key(section * SECTION_ENTRIES)
    }

    /// The key of an extent that begins with this span; and whose the span is, whether or not it is one.
    #[must_use]
    pub const fn span_key(span: u32) -> Self {
        Self::Key(span / SECTION_SPANS * SECTION_ENTRIES + Self::SPAN_ENTRIES + span % SECTION_SPANS)
    }

    /// Whether this is the entry of a span in `keys[]`.
    pub(crate) const fn is_key_of_span(self) -> bool {
        let place = match self {
            Self::Key(index) => index % SECTION_ENTRIES,
            _ => 0,
        };
        Self::SPAN_ENTRIES <= place && place < Self::CHUNK_ENTRIES
    }

    /// The key of an extent that begins with this chunk.
    #[must_use]
    pub const fn chunk_key(chunk: u32) -> Self {
        Self::Key(chunk / SECTION_CHUNKS * SECTION_ENTRIES + Self::CHUNK_ENTRIES + chunk % SECTION_CHUNKS)
    }

    /// The entry of an extent's key.
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
