//! A text in a segment.

use std::borrow::Borrow;
use std::cmp::Ordering;
use std::fmt;
use std::hash::{Hash, Hasher};
use std::ops::Deref;

use crate::allocator::{SegmentAllocator, SegmentFull};
use crate::vector::Vector;

/// A text in a segment. Dereferences to `str`; in a map with such keys, a key is looked up by
/// `str`.
pub struct Text {
    bytes: Vector<u8>,
}

impl Text {
    /// Copies a text to the segment.
    ///
    /// # Errors
    /// If the segment is full.
    pub fn new(allocator: SegmentAllocator, text: &str) -> Result<Self, SegmentFull> {
        let mut bytes = Vector::new(allocator);
        bytes.extend_from_slice(text.as_bytes())?;
        Ok(Self { bytes })
    }

    /// Appends a text.
    ///
    /// # Errors
    /// If the segment is full.
    pub fn push_str(&mut self, text: &str) -> Result<(), SegmentFull> {
        self.bytes.extend_from_slice(text.as_bytes())
    }
}

impl Deref for Text {
    type Target = str;

    fn deref(&self) -> &str {
        std::str::from_utf8(&self.bytes).expect("only whole texts were appended")
    }
}

impl Borrow<str> for Text {
    fn borrow(&self) -> &str {
        self
    }
}

impl PartialEq for Text {
    fn eq(&self, other: &Self) -> bool {
        *self.bytes == *other.bytes
    }
}

impl Eq for Text {}

impl PartialOrd for Text {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Text {
    fn cmp(&self, other: &Self) -> Ordering {
        self.bytes.cmp(&other.bytes)
    }
}

impl Hash for Text {
    fn hash<H: Hasher>(&self, state: &mut H) {
        // The hash must be that of `str`, because `Borrow<str>` requires it.
        (**self).hash(state);
    }
}

impl fmt::Debug for Text {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (**self).fmt(f)
    }
}

impl fmt::Display for Text {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self)
    }
}
