//! Where copies of a segment are on memory nodes, as the directory and the agent know it.
//!
//! Format: `docs/formats/segments.md`.

use serde::{Deserialize, Serialize};

/// Most copies of a segment.
pub const COPIES_MAX: usize = 8;
/// Most roots that are to be freed.
pub const FORMER_MAX: usize = 48;

/// Two words as 32 hexadecimal digits: the pointer of an object, or a checksum.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Words(pub [u64; 2]);

impl From<Words> for String {
    fn from(Words([first, second]): Words) -> Self {
        format!("{first:016x}{second:016x}")
    }
}

impl TryFrom<String> for Words {
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

/// The copies of a segment.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CopyRecord {
    /// The number of changes of the record.
    pub revision: u64,
    /// The length of the segment in bytes.
    pub bytes: u64,
    /// The number of the sync that wrote them.
    pub version: u64,
    /// When, in seconds since 1970.
    pub synced_at_s: u64,
    /// The copies, all the same; none if the segment was deallocated.
    pub trees: Vec<CopyTree>,
    /// Roots of copies that are not needed any more, but were not freed yet.
    pub former: Vec<FormerRoot>,
}

/// A copy on one node.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CopyTree {
    /// The node.
    pub node: u16,
    /// Pointers to its two roots, which are written in turn.
    pub roots: [Words; 2],
    /// Which of them has the copy: 0 or 1.
    pub current: u8,
    /// The checksum of that.
    pub sum: Words,
}

/// A root of a copy that is not needed any more.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FormerRoot {
    /// The node.
    pub node: u16,
    /// The pointer to it.
    pub root: Words,
    /// The length of the segment whose copy it had.
    pub bytes: u64,
}

impl CopyTree {
    /// Its roots, as those that are to be freed. `bytes` is the length of the segment.
    #[must_use]
    pub fn former(&self, bytes: u64) -> [FormerRoot; 2] {
        self.roots.map(|root| FormerRoot { node: self.node, root, bytes })
    }
}

impl CopyRecord {
    /// Whether the segment can be restored from it.
    #[must_use]
    pub fn has_copies(&self) -> bool {
        !self.trees.is_empty()
    }

    /// Whether its parts are as many as they may be.
    #[must_use]
    pub fn is_valid(&self) -> bool {
        self.trees.len() <= COPIES_MAX
            && self.former.len() <= FORMER_MAX
            && self.trees.iter().all(|tree| tree.current < 2)
    }
}
