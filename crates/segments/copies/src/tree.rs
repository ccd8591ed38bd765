//! The objects of a copy and their bytes: root, leaves, chunks.

use std::sync::Arc;

use aquifer_arena::copies::WordPair;
use aquifer_objects::pointer::Pointer;
use ring::digest::{SHA256, digest};

/// Bytes of a chunk; the last chunk of a segment may be shorter.
pub const CHUNK_BYTES: usize = 64 << 10;
/// Number of chunks of a leaf.
pub const LEAF_CHUNKS: usize = 512;
/// Bytes of a leaf.
pub const LEAF_BYTES: usize = LEAF_CHUNKS * ENTRY_BYTES;
/// Bytes of an entry of a leaf or a root.
pub const ENTRY_BYTES: usize = 32;
/// Bytes of a root before its entries.
pub const ROOT_HEAD_BYTES: usize = 32;
const MAGIC: [u8; 8] = *b"AQCOPY\x00\x01";

/// Returns the checksum of an object's bytes: the first half of their SHA-256.
#[must_use]
pub fn sum_of(bytes: &[u8]) -> WordPair {
    let digest = digest(&SHA256, bytes);
    let word = |at: usize| word_at(digest.as_ref(), at);
    WordPair([word(0), word(8)])
}

/// The pointer to a leaf or a chunk, and its checksum. The default is a leaf or chunk of zeros,
/// which is not stored.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Entry {
    /// The words of the pointer.
    object: [u64; 2],
    /// The words of the checksum.
    sum: [u64; 2],
}

impl Entry {
    /// Makes the entry of an object with this checksum.
    #[must_use]
    pub fn new(object: Pointer, WordPair(sum): WordPair) -> Self {
        Self { object: object.words(), sum }
    }

    /// The pointer to the object; `None` for zeros.
    #[must_use]
    pub fn object(&self) -> Option<Pointer> {
        Pointer::from_words(self.object)
    }

    /// The checksum of the object; `None` for zeros.
    #[must_use]
    pub fn sum(&self) -> Option<WordPair> {
        self.object().map(|_| WordPair(self.sum))
    }

    fn encode(&self) -> [u8; ENTRY_BYTES] {
        let mut bytes = [0; ENTRY_BYTES];
        for (out, word) in bytes.chunks_exact_mut(8).zip(self.object.iter().chain(&self.sum)) {
            out.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    fn decode(bytes: &[u8]) -> Self {
        let word = |at: usize| word_at(bytes, at);
        Self { object: [word(0), word(8)], sum: [word(16), word(24)] }
    }
}

fn word_at(bytes: &[u8], at: usize) -> u64 {
    let word = bytes.get(at..at + 8).and_then(|word| word.try_into().ok());
    u64::from_le_bytes(word.unwrap_or_default())
}

/// Encodes entries, in order.
#[must_use]
pub fn encode(entries: &[Entry]) -> Vec<u8> {
    entries.iter().flat_map(Entry::encode).collect()
}

/// Decodes entries, in order.
#[must_use]
pub fn decode(bytes: &[u8]) -> Vec<Entry> {
    bytes.chunks_exact(ENTRY_BYTES).map(Entry::decode).collect()
}

/// Returns the number of chunks of a segment of `bytes` bytes.
#[must_use]
pub fn chunks_of(bytes: u64) -> usize {
    usize::try_from(bytes.div_ceil(CHUNK_BYTES as u64)).unwrap_or(usize::MAX)
}

/// The content of a root.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Root {
    /// The length of the segment in bytes.
    pub bytes: u64,
    /// The number of the sync that wrote the copy.
    pub version: u64,
    /// The entries of the leaves.
    pub leaves: Vec<Entry>,
}

impl Root {
    /// Length in bytes of the root of a segment of `bytes` bytes.
    #[must_use]
    pub fn len_of(bytes: u64) -> usize {
        ROOT_HEAD_BYTES + chunks_of(bytes).div_ceil(LEAF_CHUNKS) * ENTRY_BYTES
    }

    /// Encodes the root.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let head = [MAGIC, self.bytes.to_le_bytes(), self.version.to_le_bytes(), [0; 8]].concat();
        [head, encode(&self.leaves)].concat()
    }

    /// Decodes a root; `None` if it was never written, or if its segment has another length.
    #[must_use]
    pub fn decode(bytes: &[u8], segment_bytes: u64) -> Option<Self> {
        let head = bytes.get(..ROOT_HEAD_BYTES)?;
        let (found, version) = (word_at(head, 8), word_at(head, 16));
        let is_root = head.starts_with(&MAGIC) && found == segment_bytes;
        let leaves = decode(&bytes[ROOT_HEAD_BYTES..]);
        let is_whole = bytes.len() == Self::len_of(segment_bytes);
        (is_root && is_whole).then_some(Self { bytes: found, version, leaves })
    }
}

/// All entries of a copy.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Tree {
    /// The entries of the leaves.
    pub leaves: Vec<Entry>,
    /// The entries of the chunks of each leaf, [`LEAF_CHUNKS`] each.
    pub chunks: Vec<Arc<Vec<Entry>>>,
}

impl Tree {
    /// The tree of a segment of zeros.
    #[must_use]
    pub fn zeros(bytes: u64) -> Self {
        let leaves = chunks_of(bytes).div_ceil(LEAF_CHUNKS);
        let chunks = Arc::new(vec![Entry::default(); LEAF_CHUNKS]);
        Self { leaves: vec![Entry::default(); leaves], chunks: std::iter::repeat_n(chunks, leaves).collect() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn golden_root() {
        let pointer = Pointer::from_words([0x0102_0304_0506, 0x0007_0000_0000_0009]).unwrap();
        let sum = sum_of(b"aquifer");
        let root =
            Root { bytes: 40 << 20, version: 3, leaves: vec![Entry::new(pointer, sum), Entry::default()] };
        let bytes = root.encode();
        let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        let head = "4151434f50590001000080020000000003000000000000000000000000000000";
        let object = "06050403020100000900000000000700";
        // The first 16 bytes of its SHA-256.
        let sum = "bb3c7870a8944d30d83144bd474e2b49";
        assert_eq!(&hex[..128], [head, object, sum].concat());
        assert!(hex[128..].bytes().all(|digit| digit == b'0'));
        assert_eq!(Root::decode(&bytes, 40 << 20), Some(root));
        assert_eq!(Root::decode(&bytes, 41 << 20), None, "of another segment");
        assert_eq!(Root::decode(&bytes[..90], 40 << 20), None);
        assert_eq!(Root::decode(&vec![0; bytes.len()], 40 << 20), None, "never written");
    }

    #[test]
    fn the_last_leaf_may_be_short() {
        assert_eq!(chunks_of(4096), 1);
        assert_eq!(chunks_of(CHUNK_BYTES as u64 * 512 + 4096), 513);
        assert_eq!(Root::len_of(CHUNK_BYTES as u64 * 512), 64);
        assert_eq!(Root::len_of(CHUNK_BYTES as u64 * 512 + 4096), 96);
    }
}
