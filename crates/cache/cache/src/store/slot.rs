//! The words of the index: the location of an item, bits of its key's hash, and a count of reads.

/// Bytes of a run of the log.
pub const RUN_BYTES: usize = 1 << RUN_SHIFT;
/// Bits of an offset in a run.
const RUN_SHIFT: u32 = 16;
/// Bits of a location: 128 GiB in runs of 64 KiB.
const LOCATION_BITS: u32 = 37;
/// Most runs of a partition.
pub const RUNS_MAX: usize = 1 << (LOCATION_BITS - RUN_SHIFT);
/// Bits of the hash that a slot has.
const TAG_BITS: u32 = 20;
/// The lowest bit of the hash that a slot has. Buckets are chosen by the bits below and by some of
/// those that the slot has, so that a bucket can be split without reading the keys.
pub const TAG_LOW_BIT: u32 = 6;
/// Most buckets of an index, as a power of two.
pub const BUCKET_BITS_MAX: u32 = TAG_LOW_BIT + TAG_BITS;
/// Greatest count of reads of an item.
pub const READS_MAX: u64 = 3;

const TAG_SHIFT: u32 = LOCATION_BITS;
const READS_SHIFT: u32 = TAG_SHIFT + TAG_BITS;
const FETCHED: u64 = 1 << (READS_SHIFT + 2);
const LOCATION_MASK: u64 = (1 << LOCATION_BITS) - 1;
const TAG_MASK: u64 = (1 << TAG_BITS) - 1;

/// The location of an item: a run, and the offset in it. Run 0 is never used.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Location {
    /// The run, from 1 to [`RUNS_MAX`] − 1.
    pub run: u32,
    /// The offset in bytes from the run's start, below [`RUN_BYTES`].
    pub offset: u32,
}

/// A word of the index. Zero is an empty slot.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Slot(pub u64);

impl Slot {
    /// The slot that is empty.
    pub const EMPTY: Self = Self(0);

    /// A slot for an item whose key has this hash.
    #[inline]
    #[must_use]
    pub fn new(hash: u64, location: Location, reads: u64) -> Self {
        debug_assert!(location.run != 0 && (location.run as usize) < RUNS_MAX);
        debug_assert!((location.offset as usize) < RUN_BYTES && reads <= READS_MAX);
        let place = u64::from(location.run) << RUN_SHIFT | u64::from(location.offset);
        Self(place | tag(hash) << TAG_SHIFT | reads << READS_SHIFT)
    }

    /// Whether the slot has no item.
    #[inline]
    #[must_use]
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Whether the key of this item may have this hash.
    #[inline]
    #[must_use]
    pub fn matches_hash(self, hash: u64) -> bool {
        self.0 >> TAG_SHIFT & TAG_MASK == tag(hash) && !self.is_empty()
    }

    /// The bits of the hash that the slot has, at their places in the hash; the others are 0.
    #[inline]
    #[must_use]
    pub fn hash_bits(self) -> u64 {
        (self.0 >> TAG_SHIFT & TAG_MASK) << TAG_LOW_BIT
    }

    /// The location of the item.
    #[inline]
    #[must_use]
    pub fn location(self) -> Location {
        let place = self.0 & LOCATION_MASK;
        Location {
            run: u32::try_from(place >> RUN_SHIFT).expect("21 bits"),
            offset: u32::try_from(place & (RUN_BYTES as u64 - 1)).expect("16 bits"),
        }
    }

    /// The slot with another location of the item.
    #[inline]
    #[must_use]
    pub fn with_location(self, location: Location) -> Self {
        let place = u64::from(location.run) << RUN_SHIFT | u64::from(location.offset);
        Self(self.0 & !LOCATION_MASK | place)
    }

    /// Reads of the item since it was stored, less those that the eviction has subtracted; at most
    /// [`READS_MAX`]. A value that replaces another one inherits the count.
    #[inline]
    #[must_use]
    pub fn reads(self) -> u64 {
        self.0 >> READS_SHIFT & READS_MAX
    }

    /// Whether the item was read since it was stored.
    #[inline]
    #[must_use]
    pub fn is_fetched(self) -> bool {
        self.0 & FETCHED != 0
    }

    /// The slot after another read.
    #[inline]
    #[must_use]
    pub fn with_read(self) -> Self {
        self.with_reads((self.reads() + 1).min(READS_MAX)).with_fetched(true)
    }

    /// The slot with or without the bit that the item was read.
    #[inline]
    #[must_use]
    pub fn with_fetched(self, is_fetched: bool) -> Self {
        Self(if is_fetched { self.0 | FETCHED } else { self.0 & !FETCHED })
    }

    /// The slot with another count of reads.
    #[inline]
    #[must_use]
    pub fn with_reads(self, reads: u64) -> Self {
        debug_assert!(reads <= READS_MAX);
        Self(self.0 & !(READS_MAX << READS_SHIFT) | reads << READS_SHIFT)
    }
}

#[inline]
fn tag(hash: u64) -> u64 {
    hash >> TAG_LOW_BIT & TAG_MASK
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn golden_slot() {
        let slot = Slot::new(0x0123_4567_89AB_CDEF, Location { run: 0x12345, offset: 0x6789 }, 2);
        assert_eq!(slot.0, 0x04D5_E6E1_2345_6789, "{:#x}", slot.0);
    }

    #[test]
    fn a_slot_returns_the_values_it_was_made_of() {
        let hash = 0x0123_4567_89AB_CDEF;
        for (run, offset) in [(1, 0), (1, 65535), ((1 << 21) - 1, 1234)] {
            let location = Location { run, offset };
            let slot = Slot::new(hash, location, 1);
            assert!(slot.matches_hash(hash) && !slot.matches_hash(hash ^ 1 << TAG_LOW_BIT));
            assert_eq!((slot.location(), slot.reads()), (location, 1));
            let read = slot.with_read();
            assert_eq!((read.reads(), read.is_fetched(), slot.is_fetched()), (2, true, false));
            assert_eq!(read.with_reads(3).with_read().reads(), READS_MAX);
            assert_eq!(slot.with_reads(0).location(), location);
            let known = ((1 << BUCKET_BITS_MAX) - 1) & !((1 << TAG_LOW_BIT) - 1);
            assert_eq!(slot.hash_bits(), hash & known);
        }
        assert!(!Slot::EMPTY.matches_hash(0));
    }
}
