//! The header of an object: its number, its lock and its version in one word.
//!
//! ```text
//! bits  0..44   number of the object, 0 if the slot is free
//! bits 44..46   lock
//! bits 46..64   version
//! ```
//!
//! Each write and each move changes the version. So a reader that finds the same unlocked header
//! before and after it has read the bytes has bytes of one version, unless 2^18 versions pass
//! meanwhile.

/// Bytes of a header.
pub const HEADER_BYTES: u32 = 8;
/// Bits of an object's number.
pub const NUMBER_BITS: u32 = 44;
const LOCK_BITS: u32 = 2;
/// Bits of a version.
pub const VERSION_BITS: u32 = 64 - NUMBER_BITS - LOCK_BITS;
const NUMBER_MASK: u64 = (1 << NUMBER_BITS) - 1;
const LOCK_MASK: u64 = (1 << LOCK_BITS) - 1;

/// The number of an object, unique in its heap for ever: 1..2^44.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
pub struct ObjectNumber(u64);

impl ObjectNumber {
    /// The first number.
    pub const FIRST: Self = Self(1);

    /// Creates an object number; `None` if `number` is out of range.
    #[must_use]
    pub fn new(number: u64) -> Option<Self> {
        (1..=NUMBER_MASK).contains(&number).then_some(Self(number))
    }

    /// The number.
    #[must_use]
    pub fn get(self) -> u64 {
        self.0
    }
}

/// The lock of an object.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Lock {
    /// The object can be read.
    Open,
    /// The object is being written.
    Writing,
    /// The object is being moved.
    Moving,
}

/// A header.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Header(u64);

impl Header {
    /// The header of a free slot.
    pub const FREE: Self = Self(0);

    /// The header of a new object.
    #[must_use]
    pub fn new(number: ObjectNumber, lock: Lock) -> Self {
        Self(number.0).with_lock(lock)
    }

    /// A header from its word.
    #[must_use]
    pub fn from_word(word: u64) -> Self {
        Self(word)
    }

    /// The word.
    #[must_use]
    pub fn word(self) -> u64 {
        self.0
    }

    /// The number of the object; `None` if the slot is free.
    #[must_use]
    pub fn number(self) -> Option<ObjectNumber> {
        ObjectNumber::new(self.0 & NUMBER_MASK)
    }

    /// Whether the object can be read. A header with an unknown lock is locked.
    #[must_use]
    pub fn is_open(self) -> bool {
        self.0 >> NUMBER_BITS & LOCK_MASK == 0
    }

    /// The version.
    #[must_use]
    pub fn version(self) -> u32 {
        u32::try_from(self.0 >> (NUMBER_BITS + LOCK_BITS)).expect("18 bits")
    }

    /// The header with another lock.
    #[must_use]
    pub fn with_lock(self, lock: Lock) -> Self {
        let bits = match lock {
            Lock::Open => 0,
            Lock::Writing => 1,
            Lock::Moving => 2,
        };
        Self(self.0 & !(LOCK_MASK << NUMBER_BITS) | bits << NUMBER_BITS)
    }

    /// The header of the next version, open.
    #[must_use]
    pub fn next_version(self) -> Self {
        Self(self.0.wrapping_add(1 << (NUMBER_BITS + LOCK_BITS))).with_lock(Lock::Open)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_parts_do_not_touch_each_other() {
        let number = ObjectNumber::new(NUMBER_MASK).unwrap();
        let mut header = Header::new(number, Lock::Writing);
        assert!(!header.is_open());
        for version in 1..1_u32 << VERSION_BITS {
            header = header.next_version();
            assert_eq!((header.number(), header.version()), (Some(number), version));
            assert!(header.is_open() && !header.with_lock(Lock::Moving).is_open());
        }
        assert_eq!(header.next_version(), Header::new(number, Lock::Open), "versions begin again");
        assert_eq!(Header::from_word(header.word()), header);
    }

    #[test]
    fn zero_is_no_number() {
        assert_eq!(Header::FREE.number(), None);
        assert_eq!(ObjectNumber::new(0), None);
        assert_eq!(ObjectNumber::new(NUMBER_MASK + 1), None);
        assert_eq!(ObjectNumber::new(1), Some(ObjectNumber::FIRST));
    }

    #[test]
    fn an_unknown_lock_is_locked() {
        assert!(!Header::from_word(3 << NUMBER_BITS | 1).is_open());
    }
}
