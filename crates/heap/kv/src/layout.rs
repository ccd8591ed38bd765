//! The bytes of the objects of a store, as `docs/formats/kv.md` describes them.

use aquifer_objects::pointer::Pointer;
use siphasher::sip::SipHasher13;

/// Bytes of a pointer in an object.
pub const POINTER_BYTES: usize = 16;
/// The first word of a store's head: a magic number and the version of the format.
const HEAD_MAGIC: u64 = u64::from_le_bytes(*b"AQKV\x00\x00\x00\x02");
/// The first word of a store's head in version 1, in which the hash had no secret.
const HEAD_MAGIC_1: u64 = u64::from_le_bytes(*b"AQKV\x00\x00\x00\x01");
/// Bytes of an item before its key.
const ITEM_HEAD_BYTES: usize = 16;
/// Bytes of the shortest item, which has room for a pointer.
const ITEM_BYTES_MIN: usize = ITEM_HEAD_BYTES + POINTER_BYTES;
/// Bytes of a bucket before its entries.
const BUCKET_HEAD_BYTES: usize = 16;
const ENTRY_BYTES: usize = 24;

/// The first word of an item with the value of its key.
pub const LIVE: u64 = 1;
/// The first word of an item whose key was deleted.
pub const DEAD: u64 = 2;
/// The first word of an item that another item replaces.
pub const MOVED: u64 = 3;

fn word(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_le_bytes(bytes.get(at..at + 8)?.try_into().ok()?))
}

/// Decodes the pointer at an offset; `None` if it is zeros or outside the bytes.
pub fn pointer_at(bytes: &[u8], at: usize) -> Option<Pointer> {
    Pointer::from_words([word(bytes, at)?, word(bytes, at + 8)?])
}

/// Appends a pointer to `out`, or zeros for `None`.
pub fn put_pointer(out: &mut Vec<u8>, pointer: Option<Pointer>) {
    let words = pointer.map_or([0; 2], Pointer::words);
    words.iter().for_each(|word| out.extend_from_slice(&word.to_le_bytes()));
}

/// The content of an item.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Item<'a> {
    /// The value of a key.
    Live {
        /// The key.
        key: &'a [u8],
        /// The value.
        value: &'a [u8],
    },
    /// A deleted key.
    Dead {
        /// The key.
        key: &'a [u8],
    },
    /// A pointer to the item that has the value of the key.
    Moved(Pointer),
}

impl<'a> Item<'a> {
    /// Decodes an item; `None` if the bytes are damaged.
    #[must_use]
    pub fn decode(bytes: &'a [u8]) -> Option<Self> {
        let state = word(bytes, 0)?;
        if state == MOVED {
            return pointer_at(bytes, ITEM_HEAD_BYTES).map(Self::Moved);
        }
        let lengths = word(bytes, 8)?;
        let key_len = usize::try_from(lengths & u64::from(u32::MAX)).ok()?;
        let value_len = usize::try_from(lengths >> 32).ok()?;
        let (key, rest) = bytes.get(ITEM_HEAD_BYTES..)?.split_at_checked(key_len)?;
        match state {
            LIVE => Some(Self::Live { key, value: rest.get(..value_len)? }),
            DEAD => Some(Self::Dead { key }),
            _ => None,
        }
    }

    /// Encodes a live item.
    #[must_use]
    pub fn encode(key: &[u8], value: &[u8]) -> Vec<u8> {
        let mut out = Vec::with_capacity(ITEM_BYTES_MIN.max(ITEM_HEAD_BYTES + key.len() + value.len()));
        out.extend_from_slice(&LIVE.to_le_bytes());
        for part in [key, value] {
            let len = u32::try_from(part.len()).expect("keys and values are shorter than 4 GiB");
            out.extend_from_slice(&len.to_le_bytes());
        }
        out.extend_from_slice(key);
        out.extend_from_slice(value);
        out.resize(out.len().max(ITEM_BYTES_MIN), 0);
        out
    }

    /// Encodes the first bytes of an item that another item replaces.
    #[must_use]
    pub fn encode_moved(to: Pointer) -> Vec<u8> {
        moved(MOVED, 0, to)
    }
}

/// Encodes two words and the pointer to a replacement.
fn moved(first: u64, second: u64, to: Pointer) -> Vec<u8> {
    let mut out = Vec::with_capacity(BUCKET_HEAD_BYTES + POINTER_BYTES);
    out.extend_from_slice(&first.to_le_bytes());
    out.extend_from_slice(&second.to_le_bytes());
    put_pointer(&mut out, Some(to));
    out
}

/// An entry of a bucket.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BucketEntry {
    /// The hash of the key.
    pub hash: u64,
    /// The pointer to the item.
    pub item: Pointer,
}

/// A bucket: the items whose keys have hashes in one range.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Bucket {
    /// The first word, which each write changes.
    pub version: u64,
    /// The entries, or the replacement.
    pub contents: BucketContents,
}

/// The contents of a bucket.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum BucketContents {
    /// The entries of the bucket's items.
    Entries(Vec<BucketEntry>),
    /// A pointer to the larger bucket that replaces this one.
    Moved(Pointer),
}

/// The second word of a bucket that was replaced.
const BUCKET_MOVED: u64 = u64::MAX;

impl Bucket {
    /// Decodes a bucket; `None` if the bytes are damaged.
    #[must_use]
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let (version, count) = (word(bytes, 0)?, word(bytes, 8)?);
        if count == BUCKET_MOVED {
            let to = pointer_at(bytes, BUCKET_HEAD_BYTES)?;
            return Some(Self { version, contents: BucketContents::Moved(to) });
        }
        let count = usize::try_from(count).ok()?;
        let entries = bytes.get(BUCKET_HEAD_BYTES..)?.chunks_exact(ENTRY_BYTES).take(count);
        let entries: Option<Vec<BucketEntry>> = entries
            .map(|entry| Some(BucketEntry { hash: word(entry, 0)?, item: pointer_at(entry, 8)? }))
            .collect();
        let entries = entries.filter(|entries| entries.len() == count)?;
        Some(Self { version, contents: BucketContents::Entries(entries) })
    }

    /// Encodes a bucket with these entries.
    #[must_use]
    pub fn encode(version: u64, entries: &[BucketEntry]) -> Vec<u8> {
        let mut out = Vec::with_capacity(BUCKET_HEAD_BYTES + entries.len() * ENTRY_BYTES);
        out.extend_from_slice(&version.to_le_bytes());
        out.extend_from_slice(&(entries.len() as u64).to_le_bytes());
        for BucketEntry { hash, item } in entries {
            out.extend_from_slice(&hash.to_le_bytes());
            put_pointer(&mut out, Some(*item));
        }
        out
    }

    /// Encodes the first bytes of a bucket that a larger one replaces.
    #[must_use]
    pub fn encode_moved(version: u64, to: Pointer) -> Vec<u8> {
        moved(version, BUCKET_MOVED, to)
    }

    /// Returns the length in bytes of a bucket with room for this number of entries.
    #[must_use]
    pub const fn bytes(entries: usize) -> usize {
        BUCKET_HEAD_BYTES + entries * ENTRY_BYTES
    }
}

/// A table of pointers: the head of a store, or a segment of its index.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PointerTable {
    /// The first word: the version of a segment, or the magic number of a head.
    pub first: u64,
    /// The pointers; `None` for zeros.
    pub pointers: Vec<Option<Pointer>>,
}

impl PointerTable {
    /// Decodes a table of `count` pointers; `None` if there are fewer bytes.
    #[must_use]
    pub fn decode(bytes: &[u8], count: usize) -> Option<Self> {
        let table = bytes.get(16..count.checked_mul(POINTER_BYTES)?.checked_add(16)?)?;
        let pointers = table.chunks_exact(POINTER_BYTES).map(|pointer| pointer_at(pointer, 0)).collect();
        Some(Self { first: word(bytes, 0)?, pointers })
    }

    /// Decodes the number of pointers of a table.
    #[must_use]
    pub fn count(bytes: &[u8]) -> Option<usize> {
        usize::try_from(word(bytes, 8)?).ok()
    }

    /// Encodes the table up to its first `count` pointers.
    #[must_use]
    pub fn encode(&self, count: usize) -> Vec<u8> {
        let mut out = Vec::with_capacity(16 + count * POINTER_BYTES);
        out.extend_from_slice(&self.first.to_le_bytes());
        out.extend_from_slice(&(self.pointers.len() as u64).to_le_bytes());
        self.pointers[..count].iter().for_each(|pointer| put_pointer(&mut out, *pointer));
        out
    }
}

/// The head of a store: pointers to the segments of its index, and the secret of its hash.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Head {
    /// Pointers to the segments.
    pub segments: Vec<Pointer>,
    /// The key of the hash; `None` in version 1, whose hash differs. A store of version 1 can only
    /// be dropped.
    pub hash_secret: Option<[u64; 2]>,
}

impl Head {
    /// Decodes a head; `None` if the bytes are damaged.
    #[must_use]
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let count = PointerTable::count(bytes).filter(|count| count.is_power_of_two())?;
        let table = PointerTable::decode(bytes, count)?;
        let secret_at = table.encode(count).len();
        let hash_secret = match table.first {
            HEAD_MAGIC => Some([word(bytes, secret_at)?, word(bytes, secret_at + 8)?]),
            HEAD_MAGIC_1 => None,
            _ => return None,
        };
        Some(Self { segments: table.pointers.into_iter().collect::<Option<_>>()?, hash_secret })
    }

    /// Encodes the head.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let pointers: Vec<_> = self.segments.iter().copied().map(Some).collect();
        let first = if self.hash_secret.is_some() { HEAD_MAGIC } else { HEAD_MAGIC_1 };
        let table = PointerTable { first, pointers };
        let mut out = table.encode(table.pointers.len());
        self.hash_secret.iter().flatten().for_each(|word| out.extend_from_slice(&word.to_le_bytes()));
        out
    }
}

/// Hashes a key with SipHash-1-3 and the secret of the store. Without the secret, a user cannot
/// choose many keys of one bucket.
#[must_use]
pub fn hash(secret: [u64; 2], key: &[u8]) -> u64 {
    SipHasher13::new_with_keys(secret[0], secret[1]).hash(key)
}

#[cfg(test)]
mod tests {
    use aquifer_objects::class::ClassId;
    use aquifer_objects::header::ObjectNumber;
    use proptest::prelude::*;

    use super::*;

    fn pointer(number: u64) -> Pointer {
        let number = ObjectNumber::new(number).unwrap();
        Pointer { node: 1, heap: 2, class: ClassId(3), address: 0x40, number }
    }

    fn hex(bytes: &[u8]) -> String {
        bytes.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    #[test]
    fn golden_objects() {
        let at = "40000000000002000500000000301000";
        let moved = Item::encode_moved(pointer(5));
        assert_eq!(hex(&moved), format!("03000000000000000000000000000000{at}"));
        let item = Item::encode(b"key", b"a value that is long");
        assert_eq!(
            hex(&item),
            "01000000000000000300000014000000\
             6b6579612076616c75652074686174206973206c6f6e67"
        );
        let bucket = Bucket::encode(7, &[BucketEntry { hash: 0x1122, item: pointer(5) }]);
        assert_eq!(hex(&bucket), format!("070000000000000001000000000000002211000000000000{at}"));
        let bucket = Bucket::encode_moved(8, pointer(5));
        assert_eq!(hex(&bucket), format!("0800000000000000ffffffffffffffff{at}"));
        let table = PointerTable { first: 9, pointers: vec![Some(pointer(5)), None] };
        let none = "0".repeat(32);
        assert_eq!(hex(&table.encode(2)), format!("09000000000000000200000000000000{at}{none}"));
        let head = Head { segments: vec![pointer(5)], hash_secret: Some([0x11, 0x22]) };
        let secret = "11000000000000002200000000000000";
        assert_eq!(hex(&head.encode()), format!("41514b56000000020100000000000000{at}{secret}"));
        // A test vector by the authors of SipHash.
        let key: Vec<u8> = (0..15).collect();
        let hash = hash([0x0706_0504_0302_0100, 0x0F0E_0D0C_0B0A_0908], &key);
        assert_eq!(hash, 0xD320_D86D_2A51_9956);
    }

    #[test]
    fn a_head_decodes_to_what_was_encoded() {
        let head = Head { segments: vec![pointer(5), pointer(6)], hash_secret: Some([1, 2]) };
        let mut bytes = head.encode();
        assert_eq!(Head::decode(&bytes[..bytes.len() - 1]), None);
        bytes.extend_from_slice(&[0; 50]);
        assert_eq!(Head::decode(&bytes), Some(head.clone()));
        bytes[7] = 1;
        assert_eq!(Head::decode(&bytes), Some(Head { hash_secret: None, ..head }));
        bytes[7] = 3;
        assert_eq!(Head::decode(&bytes), None);
    }

    #[test]
    fn objects_decode_to_what_was_encoded() {
        let item = Item::encode(b"k", b"");
        assert_eq!(item.len(), ITEM_BYTES_MIN);
        assert_eq!(Item::decode(&item), Some(Item::Live { key: b"k", value: b"" }));
        let entries =
            vec![BucketEntry { hash: 9, item: pointer(1) }, BucketEntry { hash: 8, item: pointer(2) }];
        let mut bytes = Bucket::encode(4, &entries);
        bytes.extend_from_slice(&[0; 50]);
        let bucket = Bucket { version: 4, contents: BucketContents::Entries(entries) };
        assert_eq!(Bucket::decode(&bytes), Some(bucket));
        assert_eq!(Bucket::decode(&bytes[..40]), None, "an entry is missing");
        let table = PointerTable { first: 3, pointers: vec![None, Some(pointer(9))] };
        assert_eq!(PointerTable::decode(&table.encode(2), 2), Some(table.clone()));
        assert_eq!(PointerTable::decode(&table.encode(1), 2), None);
        assert_eq!(PointerTable::decode(&table.encode(2), 1 << 60), None);
    }

    proptest! {
        #[test]
        fn any_bytes_are_decoded_without_a_panic(bytes in prop::collection::vec(any::<u8>(), 0..100)) {
            let _ = (Item::decode(&bytes), Bucket::decode(&bytes), Head::decode(&bytes));
        }
    }
}
