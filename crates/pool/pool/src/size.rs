//! Units of the pool, and size classes of extents.

/// Bytes of a chunk.
pub const CHUNK_BYTES: u64 = 4096;
/// Chunks of a span.
pub const SPAN_CHUNKS: u32 = 32;
/// Spans of a section.
pub const SECTION_SPANS: u32 = 16;
/// Chunks of a section.
pub const SECTION_CHUNKS: u32 = SPAN_CHUNKS * SECTION_SPANS;
/// Bytes of a span: 128 KiB.
pub const SPAN_BYTES: u64 = CHUNK_BYTES * SPAN_CHUNKS as u64;
/// Bytes of a section: 2 MiB.
pub const SECTION_BYTES: u64 = SPAN_BYTES * SECTION_SPANS as u64;

/// The size of an extent: 4 KiB · 2^k, k from 0 to 9.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct SizeClass(u8);

impl SizeClass {
    /// 4 KiB, a chunk.
    pub const CHUNK: Self = Self(0);
    /// 128 KiB, a span.
    pub const SPAN: Self = Self(5);
    /// 2 MiB, a section: the largest class.
    pub const SECTION: Self = Self(9);
    /// The number of classes.
    pub const COUNT: u8 = 10;

    /// The class of 4 KiB · 2^`k`; `None` if it is above [`SizeClass::SECTION`].
    #[must_use]
    pub const fn new(k: u8) -> Option<Self> {
        if k < Self::COUNT { Some(Self(k)) } else { None }
    }

    /// The class of 2^`order` whole spans, at most a section.
    #[must_use]
    pub(crate) const fn of_spans(order: u8) -> Self {
        if order < Self::SECTION.0 - Self::SPAN.0 { Self(Self::SPAN.0 + order) } else { Self::SECTION }
    }

    /// The smallest class that holds `bytes`; `None` for zero bytes and for more than 2 MiB.
    #[must_use]
    pub fn from_bytes(bytes: u64) -> Option<Self> {
        if bytes == 0 {
            return None;
        }
        (0..Self::COUNT).map(Self).find(|class| class.bytes() >= bytes)
    }

    /// The exponent k.
    #[must_use]
    pub const fn k(self) -> u8 {
        self.0
    }

    /// Bytes of an extent.
    #[must_use]
    pub const fn bytes(self) -> u64 {
        CHUNK_BYTES << self.0
    }

    /// Chunks of an extent.
    #[must_use]
    pub const fn chunks(self) -> u32 {
        1 << self.0
    }

    /// Whether an extent is part of a span. Otherwise it is one or more whole spans.
    #[must_use]
    pub const fn is_within_span(self) -> bool {
        self.0 < Self::SPAN.0
    }

    /// The exponent of an extent's length in its control word: in chunks for a span's word, in
    /// spans for a section's.
    #[must_use]
    pub const fn order(self) -> u8 {
        if self.is_within_span() { self.0 } else { self.0 - Self::SPAN.0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_round_up_to_a_class() {
        let k = |bytes| SizeClass::from_bytes(bytes).map(SizeClass::k);
        assert_eq!(k(0), None);
        assert_eq!(k(1), Some(0));
        assert_eq!(k(4096), Some(0));
        assert_eq!(k(4097), Some(1));
        assert_eq!(k(64 << 10), Some(4));
        assert_eq!(k(128 << 10), Some(5));
        assert_eq!(k((2 << 20) - 1), Some(9));
        assert_eq!(k(2 << 20), Some(9));
        assert_eq!(k((2 << 20) + 1), None);
        assert_eq!(k(u64::MAX), None);
        assert_eq!(SizeClass::new(10), None);
        assert_eq!(SizeClass::new(9).map(SizeClass::bytes), Some(SECTION_BYTES));
    }
}
