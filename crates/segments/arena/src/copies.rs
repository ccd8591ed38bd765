//! The directory's record of a segment's copies on memory nodes.
//!
//! Format: `docs/formats/segments.md`.

use serde::{Deserialize, Serialize};

/// Maximum number of copies of a segment.
pub const COPIES_MAX: usize = 8;
/// Maximum number of obsolete roots in a record.
pub const FORMER_MAX: usize = 48;

/// Two words, in JSON 32 hexadecimal digits: the pointer of an object, or a checksum.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct WordPair(pub [u64; 2]);

impl From<WordPair> for String {
    fn from(WordPair([first, second]): WordPair) -> Self {
        format!("{first:016x}{second:016x}")
    }
}

impl TryFrom<String> for WordPair {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        let is_plain =
            text.len() == 32 && text.bytes().all(|digit| matches!(digit, b'0'..=b'9' | b'a'..=b'f'));
        let word = |digits: &str| u64::from_str_radix(digits, 16).ok();
        let words = text.get(..16).and_then(word).zip(text.get(16..).and_then(word));
        let words = words.filter(|_| is_plain).ok_or_else(|| format!("{text:?} are not 32 digits"))?;
        Ok(Self([words.0, words.1]))
    }
}

/// The record of a segment's copies.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CopyRecord {
    /// The number of changes of the record.
    pub revision: u64,
    /// The length of the segment in bytes.
    pub bytes: u64,
    /// The number of the sync that wrote the copies.
    pub version: u64,
    /// The time of that sync, in seconds since 1970.
    pub synced_at_s: u64,
    /// The copies, which are identical; none if the segment was deallocated.
    pub trees: Vec<CopyTree>,
    /// Roots of obsolete copies that are not freed yet.
    pub former: Vec<FormerRoot>,
}

/// A copy on one node: a tree of objects.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CopyTree {
    /// The node.
    pub node: u16,
    /// Pointers to the two roots, which are written in turn.
    pub roots: [WordPair; 2],
    /// The index of the root that has the copy: 0 or 1.
    pub current: u8,
    /// The checksum of that root.
    pub sum: WordPair,
}

/// A root of an obsolete copy.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FormerRoot {
    /// The node.
    pub node: u16,
    /// The pointer to the root.
    pub root: WordPair,
    /// The length of the copied segment in bytes.
    pub bytes: u64,
}

impl CopyTree {
    /// Both roots of the copy, as obsolete ones. `bytes` is the length of the segment.
    #[must_use]
    pub fn former(&self, bytes: u64) -> [FormerRoot; 2] {
        self.roots.map(|root| FormerRoot { node: self.node, root, bytes })
    }
}

impl CopyRecord {
    /// Whether the segment can be restored: the record has a copy.
    #[must_use]
    pub fn has_copies(&self) -> bool {
        !self.trees.is_empty()
    }

    /// Whether the record is within its limits.
    #[must_use]
    pub fn is_valid(&self) -> bool {
        self.trees.len() <= COPIES_MAX
            && self.former.len() <= FORMER_MAX
            && self.trees.iter().all(|tree| tree.current < 2)
    }
}
