//! The bytes of an item in the log: a header of 5 to 25 bytes, the key, and the value.
//!
//! | offset | bytes | field |
//! |---|---|---|
//! | 0 | 1 | marks: which fields follow, and the states of an item |
//! | 1 | 1 | length of the key |
//! | 2 | 3 | length of the value, or `0xFF_FFFF` if the next field has it |
//! | | 4 | length of the value, if it is large |
//! | | 4 | flags of the client, if they are not 0 |
//! | | 4 | second in which the item expires, if it does |
//! | | 4 or 8 | cas: the difference from that of the run, or the value itself |
//!
//! All numbers are little-endian. An item is never changed: a new state is a new item.
//!
//! Between items there are marks: a byte that no item begins with, and the second in which the
//! items after it were stored.

use super::slot::Location;

/// Longest key, in bytes.
pub const KEY_MAX: usize = 250;
/// Longest header.
const HEADER_MAX: usize = 25;
const VALUE_IS_LARGE: usize = 0xFF_FFFF;
/// Bytes at the start of an item from which its length follows, unless its value is long.
pub const PREFIX_BYTES: usize = 5;
/// Bytes at the start of an item with a long value from which its length follows.
pub const LONG_PREFIX_BYTES: usize = 9;

const HAS_CLIENT_FLAGS: u8 = 1;
const HAS_EXPIRY: u8 = 1 << 1;
const HAS_CAS_DIFFERENCE: u8 = 1 << 2;
const HAS_CAS: u8 = 1 << 3;
const STATES_SHIFT: u32 = 4;
/// The first byte of a mark. No item has it, because an item has only one form of its cas number.
const MARK: u8 = HAS_CAS_DIFFERENCE | HAS_CAS;
/// Bytes of a mark.
pub const MARK_BYTES: usize = 5;

/// States of an item, each a bit.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct States(u8);

impl States {
    /// No state.
    pub const NONE: Self = Self(0);
    /// The item was invalidated: the next client that reads it is asked to replace it.
    pub const STALE: Self = Self(1);
    /// A client was asked to replace the item.
    pub const TOKEN_SENT: Self = Self(1 << 1);
    /// The key is binary: clients see it in base64.
    pub const BINARY_KEY: Self = Self(1 << 2);

    /// Whether all of these states are set.
    #[inline]
    #[must_use]
    pub fn has(self, states: Self) -> bool {
        self.0 & states.0 == states.0
    }

    /// Adds states.
    #[must_use]
    pub fn with(self, states: Self) -> Self {
        Self(self.0 | states.0)
    }

    /// Removes states.
    #[must_use]
    pub fn without(self, states: Self) -> Self {
        Self(self.0 & !states.0)
    }
}

/// The fields of an item other than its key and value.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Header {
    /// The client's flags.
    pub client_flags: u32,
    /// The second in which the item expires, or 0.
    pub expires_s: u32,
    /// The unique number of this state of the item, or 0 if the cache has no such numbers.
    pub cas: u64,
    /// The states of the item.
    pub states: States,
}

/// An item in the log.
#[derive(Clone, Copy, Default, Debug)]
pub struct Item<'a> {
    /// The fields other than key and value.
    pub header: Header,
    /// The key.
    pub key: &'a [u8],
    /// The value.
    pub value: &'a [u8],
    /// Whether the item was read since it was stored.
    pub is_fetched: bool,
    /// The location, if the item is stored.
    pub place: Option<Location>,
}

/// An encoded header.
#[derive(Debug)]
pub struct EncodedHeader {
    bytes: [u8; HEADER_MAX],
    len: usize,
}

impl EncodedHeader {
    /// Encodes the header of an item in a run whose items have cas numbers near `cas_base`.
    ///
    /// # Panics
    /// If the key is longer than [`KEY_MAX`] or the value has 4 GiB or more.
    #[inline]
    #[must_use]
    pub fn new(header: &Header, key_len: usize, value_len: usize, cas_base: u64) -> Self {
        assert!(key_len <= KEY_MAX, "a key of {key_len} bytes");
        let mut encoded = Self { bytes: [0; HEADER_MAX], len: 5 };
        let mut marks = header.states.0 << STATES_SHIFT;
        encoded.bytes[1] = u8::try_from(key_len).expect("at most 250");
        if value_len < VALUE_IS_LARGE {
            encoded.bytes[2..5].copy_from_slice(&value_len.to_le_bytes()[..3]);
        } else {
            encoded.bytes[2..5].fill(0xFF);
            encoded.push(&u32::try_from(value_len).expect("below 4 GiB").to_le_bytes());
        }
        if header.client_flags != 0 {
            marks |= HAS_CLIENT_FLAGS;
            encoded.push(&header.client_flags.to_le_bytes());
        }
        if header.expires_s != 0 {
            marks |= HAS_EXPIRY;
            encoded.push(&header.expires_s.to_le_bytes());
        }
        if header.cas != 0 {
            match i32::try_from(header.cas.wrapping_sub(cas_base).cast_signed()) {
                Ok(difference) => {
                    marks |= HAS_CAS_DIFFERENCE;
                    encoded.push(&difference.to_le_bytes());
                }
                Err(_) => {
                    marks |= HAS_CAS;
                    encoded.push(&header.cas.to_le_bytes());
                }
            }
        }
        encoded.bytes[0] = marks;
        encoded
    }

    #[inline]
    fn push(&mut self, field: &[u8]) {
        self.bytes[self.len..self.len + field.len()].copy_from_slice(field);
        self.len += field.len();
    }

    /// The bytes.
    #[inline]
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes[..self.len]
    }
}

/// The key of the item at the start of these bytes, and the item's length.
#[inline]
#[must_use]
pub fn key_and_len(bytes: &[u8]) -> (&[u8], usize) {
    let (marks, key_len) = (bytes[0], usize::from(bytes[1]));
    let (value_len, mut at) = value_len(bytes);
    at += fields_len(marks);
    (&bytes[at..at + key_len], at + key_len + value_len)
}

/// The item at the start of these bytes, in a run whose items have cas numbers near `cas_base`.
#[inline]
#[must_use]
pub fn decode(bytes: &[u8], cas_base: u64) -> Item<'_> {
    let (marks, key_len) = (bytes[0], usize::from(bytes[1]));
    let (value_len, mut at) = value_len(bytes);
    let mut header = Header { states: States(marks >> STATES_SHIFT), ..Header::default() };
    if marks & HAS_CLIENT_FLAGS != 0 {
        header.client_flags = number(bytes, at);
        at += 4;
    }
    if marks & HAS_EXPIRY != 0 {
        header.expires_s = number(bytes, at);
        at += 4;
    }
    if marks & HAS_CAS_DIFFERENCE != 0 {
        let difference = i64::from(number(bytes, at).cast_signed());
        header.cas = cas_base.wrapping_add_signed(difference);
        at += 4;
    } else if marks & HAS_CAS != 0 {
        header.cas = u64::from_le_bytes(bytes[at..at + 8].try_into().expect("8 bytes"));
        at += 8;
    }
    let (key, rest) = bytes[at..].split_at(key_len);
    Item { header, key, value: &rest[..value_len], is_fetched: false, place: None }
}

/// A mark for items that are stored in this second.
#[must_use]
pub fn mark(second: u32) -> [u8; MARK_BYTES] {
    let [a, b, c, d] = second.to_le_bytes();
    [MARK, a, b, c, d]
}

/// The second of the mark at the start of these bytes, if they begin with a mark.
#[inline]
#[must_use]
pub fn marked_s(prefix: &[u8]) -> Option<u32> {
    if prefix[0] == MARK { Some(number(prefix, 1)) } else { None }
}

/// Whether an item with this prefix has a long value.
#[inline]
#[must_use]
pub fn has_long_value(prefix: &[u8]) -> bool {
    prefix[2] & prefix[3] & prefix[4] == 0xFF
}

/// The length of the key of an item with this prefix.
#[must_use]
pub fn key_len(prefix: &[u8]) -> usize {
    usize::from(prefix[1])
}

/// The length of an item with this prefix.
#[inline]
#[must_use]
pub fn len(prefix: &[u8]) -> usize {
    let (value_len, start) = value_len(prefix);
    start + fields_len(prefix[0]) + usize::from(prefix[1]) + value_len
}

#[inline]
fn value_len(bytes: &[u8]) -> (usize, usize) {
    let short = usize::from(bytes[2]) | usize::from(bytes[3]) << 8 | usize::from(bytes[4]) << 16;
    if short < VALUE_IS_LARGE { (short, 5) } else { (number(bytes, 5) as usize, 9) }
}

#[inline]
fn fields_len(marks: u8) -> usize {
    let four = u32::from(marks & (HAS_CLIENT_FLAGS | HAS_EXPIRY | HAS_CAS_DIFFERENCE)).count_ones();
    4 * four as usize + usize::from(marks & HAS_CAS)
}

#[inline]
fn number(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().expect("4 bytes"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn encode(header: &Header, key: &[u8], value: &[u8], cas_base: u64) -> Vec<u8> {
        let encoded = EncodedHeader::new(header, key.len(), value.len(), cas_base);
        [encoded.as_bytes(), key, value].concat()
    }

    #[test]
    fn golden_items() {
        let header = Header::default();
        assert_eq!(encode(&header, b"key", b"value", 0), b"\x00\x03\x05\x00\x00keyvalue");
        let header = Header { client_flags: 1, expires_s: 2, cas: 1003, states: States::STALE };
        let expected = b"\x17\x01\x01\x00\x00\x01\x00\x00\x00\x02\x00\x00\x00\x03\x00\x00\x00kv";
        assert_eq!(encode(&header, b"k", b"v", 1000), expected);
    }

    #[test]
    fn golden_mark() {
        assert_eq!(mark(0x0102_0304), *b"\x0c\x04\x03\x02\x01");
        assert_eq!(marked_s(&mark(77)), Some(77));
        let header = Header { cas: 5, states: States(7), ..Header::default() };
        assert_eq!(marked_s(&encode(&header, b"k", b"v", 0)), None);
    }

    proptest! {
        #[test]
        fn an_encoded_item_is_decoded(
            client_flags: u32, expires_s: u32, cas: u64, near: bool, states in 0u8..8,
            key in prop::collection::vec(any::<u8>(), 1..250), value_len in 0usize..100, large: bool,
        ) {
            let cas_base = if near { cas.wrapping_sub(5) } else { 77 };
            let header = Header { client_flags, expires_s, cas, states: States(states) };
            let value = vec![7; value_len + if large { VALUE_IS_LARGE - 50 } else { 0 }];
            let bytes = encode(&header, &key, &value, cas_base);
            let item = decode(&bytes, cas_base);
            prop_assert_eq!(item.header, header);
            prop_assert_eq!(item.key, &key[..]);
            prop_assert!(item.value == value);
            prop_assert_eq!(key_and_len(&bytes), (&key[..], bytes.len()));
        }
    }
}
