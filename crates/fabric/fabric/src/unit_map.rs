//! Translation tables of movable regions: for each unit of addresses the place of its bytes in a
//! memory. An object keeps its address while its bytes move (CoRM §3.5), and a move is one store.
//!
//! A table is memory of its owner, so it can outlive the owner's process. It has a word of 8 bytes,
//! little-endian, for each unit. Word 0 means that nothing is there. Any other word is the offset
//! of the unit's bytes in the memory, divided by 4096, plus 1. The owner may store words at any
//! time. An access that begins later uses the new word; [`crate::Target::expel`] waits for the
//! accesses that began before.
//!
//! A wrong word is an error of the access, never a fault: the bytes that it names are checked
//! against the memory. The last bytes of a unit need not exist, if no access needs them.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::Memory;
use crate::memory::u64_from;
use crate::mutation::Mutation;
use crate::page_store::{PageStore, StoredPages};
use crate::target::TargetError;
use crate::work::WorkError;

/// Alignment in bytes of the offsets that words name.
pub const OFFSET_BYTES: u64 = 4096;
/// Length of the shortest unit, in bytes.
pub const UNIT_BYTES_MIN: u64 = 4096;
/// Length of the longest unit, in bytes.
pub const UNIT_BYTES_MAX: u64 = 128 << 20;
/// Bound of the addresses of one movable region: each has 2^46 of them, and leaves 2 MiB unused.
pub const ADDRESSES_MAX: u64 = (1 << 46) - (2 << 20);

/// The word of a unit whose bytes are at `offset`, a multiple of [`OFFSET_BYTES`], of the memory.
#[inline]
#[must_use]
pub const fn encode(offset: u64) -> u64 {
    offset / OFFSET_BYTES + 1
}

/// The offset in the memory that a word names; `None` if nothing is there.
#[inline]
#[must_use]
pub const fn decode(word: u64) -> Option<u64> {
    match word.checked_sub(1) {
        Some(number) => number.checked_mul(OFFSET_BYTES),
        None => None,
    }
}

/// The translation table of a movable region, which has `units * unit_bytes` addresses.
#[derive(Clone, Debug)]
pub struct UnitMap {
    /// The memory that contains the words.
    pub words: Arc<Memory>,
    /// Offset of the first word, a multiple of 8.
    pub at: usize,
    /// Number of units.
    pub units: u64,
    /// Length of a unit: a power of two from [`UNIT_BYTES_MIN`] to [`UNIT_BYTES_MAX`].
    pub unit_bytes: u64,
}

impl UnitMap {
    /// The number of addresses; `None` if the table does not fit its memory, or a number is out of
    /// bounds.
    #[must_use]
    pub fn addresses(&self) -> Option<u64> {
        let is_unit =
            self.unit_bytes.is_power_of_two() && (UNIT_BYTES_MIN..=UNIT_BYTES_MAX).contains(&self.unit_bytes);
        let end = self.units.checked_mul(8).and_then(|bytes| bytes.checked_add(u64_from(self.at)));
        let fits = self.at.is_multiple_of(8) && end.is_some_and(|end| end <= u64_from(self.words.len()));
        let addresses = self.units.checked_mul(self.unit_bytes)?;
        (is_unit && fits && (1..=ADDRESSES_MAX).contains(&addresses)).then_some(addresses)
    }

    /// Checks the table, and returns the number of addresses.
    ///
    /// # Errors
    /// [`TargetError::BadUnits`].
    pub fn check(&self) -> Result<u64, TargetError> {
        let Self { units, unit_bytes, .. } = *self;
        self.addresses().ok_or(TargetError::BadUnits { units, unit_bytes })
    }

    /// The offset in the memory of a unit's bytes; `None` if nothing is there.
    ///
    /// # Panics
    /// If there is no such unit.
    #[must_use]
    pub fn offset(&self, unit: u64) -> Option<u64> {
        decode(self.words.load_u64(self.word_at(unit)))
    }

    /// Stores the word of a unit: its bytes are at `offset` of the memory, or nothing is there.
    /// Everything that was written before is visible to accesses that use the word.
    ///
    /// # Panics
    /// If there is no such unit, or the words were mapped read-only.
    pub fn store(&self, unit: u64, offset: Option<u64>) {
        let word = offset.map_or(0, encode);
        self.words.atomic_u64(self.word_at(unit)).store(word, Ordering::Release);
    }

    fn word_at(&self, unit: u64) -> usize {
        assert!(unit < self.units, "unit {unit} is beyond the {} units of the region", self.units);
        self.at + usize::try_from(unit * 8).expect("the table is mapped")
    }

    /// The first byte of an access of `len` bytes inside one unit, at `within` bytes of it. The
    /// word is loaded once.
    #[inline]
    fn translate(&self, memory: &Memory, unit: u64, within: u64, len: u64) -> Option<*mut u8> {
        if unit >= self.units {
            return None;
        }
        let mut start = self.offset(unit)?;
        if Mutation::AcceptWrongUnit.is_active() {
            start = start.min(u64_from(memory.len()).saturating_sub(self.unit_bytes));
        }
        memory.pointer(start.checked_add(within)?, len)
    }
}

/// The memory of a region, and its translation table if it is movable.
#[derive(Clone, Debug)]
pub struct RegionMemory {
    /// The bytes.
    pub memory: Arc<Memory>,
    /// The translation table of a movable region.
    pub map: Option<UnitMap>,
    /// The part that is stored elsewhere.
    pub stored: Option<StoredPages>,
}

impl RegionMemory {
    /// The store of `len` bytes of the region from `offset`; `None` if they are in memory.
    ///
    /// # Errors
    /// [`WorkError::RemoteAccess`] if only a part of them is in memory.
    #[inline]
    pub(crate) fn store(&self, offset: u64, len: u64) -> Result<Option<&Arc<dyn PageStore>>, WorkError> {
        self.stored.as_ref().map_or(Ok(None), |stored| stored.of(offset, len))
    }

    /// The parts of memory at `len` bytes of the region from `offset`, in the order of their
    /// addresses: one for each unit of a movable region. A part that is not there is an error, and
    /// the last item.
    #[inline]
    pub(crate) fn parts(&self, offset: u64, len: u64) -> MemoryParts<'_> {
        MemoryParts { region: self, offset, left: len }
    }

    /// The place in the memory of one of its [`Self::parts`].
    pub(crate) fn offset_of(&self, (first, bytes): (*mut u8, usize)) -> (usize, usize) {
        (first.addr() - self.memory.as_ptr().addr(), bytes)
    }

    /// The first byte of `len` bytes that do not span units.
    #[inline]
    pub(crate) fn part(&self, offset: u64, len: u64) -> Result<*mut u8, WorkError> {
        match self.parts(offset, len).next() {
            Some(Ok((first, bytes))) if u64_from(bytes) == len => Ok(first),
            _ => Err(WorkError::RemoteAccess),
        }
    }
}

/// Iterator over the parts of an access: see [`RegionMemory::parts`].
pub(crate) struct MemoryParts<'a> {
    region: &'a RegionMemory,
    offset: u64,
    left: u64,
}

impl MemoryParts<'_> {
    #[inline]
    fn next_part(&self) -> Option<(*mut u8, u64)> {
        let RegionMemory { memory, map, .. } = self.region;
        let Some(map) = map else { return Some((memory.pointer(self.offset, self.left)?, self.left)) };
        let within = self.offset & (map.unit_bytes - 1);
        let len = self.left.min(map.unit_bytes - within);
        let first = map.translate(memory, self.offset / map.unit_bytes, within, len)?;
        if Mutation::TranslateOnce.is_active() {
            let start = u64_from(first.addr() - memory.as_ptr().addr());
            return Some((memory.pointer(start, self.left)?, self.left));
        }
        Some((first, len))
    }
}

impl Iterator for MemoryParts<'_> {
    type Item = Result<(*mut u8, usize), WorkError>;

    #[inline]
    fn next(&mut self) -> Option<Self::Item> {
        if self.left == 0 {
            return None;
        }
        let Some((first, bytes)) = self.next_part() else {
            self.left = 0;
            return Some(Err(WorkError::RemoteAccess));
        };
        self.offset += bytes;
        self.left -= bytes;
        Some(usize::try_from(bytes).map(|bytes| (first, bytes)).map_err(|_| WorkError::RemoteAccess))
    }
}

#[cfg(test)]
mod tests {
    use aquifer_mutation::Mutations;
    use proptest::prelude::*;

    use super::*;

    const UNIT: u64 = 8192;
    const UNITS: u64 = 6;
    const MEMORY_BYTES: usize = 10 * 4096;

    fn region() -> RegionMemory {
        let memory = Arc::new(Memory::create("units", MEMORY_BYTES).unwrap());
        let words = Arc::new(Memory::create("words", 4096).unwrap());
        let map = UnitMap { words, at: 64, units: UNITS, unit_bytes: UNIT };
        RegionMemory { memory, map: Some(map), stored: None }
    }

    /// The offset in the memory of each byte of an access; `None` if a part is not there.
    fn offsets(region: &RegionMemory, offset: u64, len: u64) -> Option<Vec<usize>> {
        let start = region.memory.as_ptr().addr();
        let mut found = Vec::new();
        for part in region.parts(offset, len) {
            let (first, bytes) = part.ok()?;
            found.extend(first.addr() - start..first.addr() - start + bytes);
        }
        Some(found)
    }

    /// The offsets that [`offsets`] must return, computed byte by byte.
    fn expected(region: &RegionMemory, offset: u64, len: u64) -> Option<Vec<usize>> {
        let map = region.map.as_ref().unwrap();
        let byte = |byte: u64| {
            let unit = byte / UNIT;
            let at = map.at + usize::try_from(unit).unwrap() * 8;
            let word = if unit < UNITS { map.words.load_u64(at) } else { 0 };
            let start = u128::from(word.checked_sub(1)?) * 4096;
            let at = start + u128::from(byte % UNIT);
            (at < MEMORY_BYTES as u128).then(|| usize::try_from(at).unwrap())
        };
        (offset..offset + len).map(byte).collect()
    }

    #[test]
    fn words_are_as_documented() {
        assert_eq!([encode(0), encode(4096), encode(1 << 40)], [1, 2, (1 << 28) + 1]);
        assert_eq!([decode(0), decode(1), decode(2)], [None, Some(0), Some(4096)]);
        assert_eq!(decode(u64::MAX), None, "the offset is beyond 2^64");
        assert_eq!(decode(1 << 52), Some(((1 << 52) - 1) * 4096));
    }

    #[test]
    fn tables_that_do_not_fit_are_refused() {
        let words = Arc::new(Memory::create("words", 4096).unwrap());
        let map = |at, units, unit_bytes| UnitMap { words: Arc::clone(&words), at, units, unit_bytes };
        assert_eq!(map(8, 511, 4096).check().unwrap(), 511 * 4096);
        assert_eq!(map(0, 512, 2 << 20).check().unwrap(), 1 << 30);
        let bad = [
            (0, 0, 4096),
            (0, 513, 4096),
            (8, 512, 4096),
            (4, 1, 4096),
            (0, 1, 0),
            (0, 1, 2048),
            (0, 1, 256 << 20),
            (0, 1, 12_288),
            (usize::MAX & !7, 1, 4096),
            (0, u64::MAX, 4096),
            (0, 1 << 61, 4096),
        ];
        for (at, units, unit_bytes) in bad {
            let refused = map(at, units, unit_bytes).check();
            assert!(matches!(refused, Err(TargetError::BadUnits { .. })), "{at} {units} {unit_bytes}");
        }
    }

    #[test]
    fn the_mutations_are_detected() {
        let region = region();
        let map = region.map.as_ref().unwrap();
        map.store(0, Some(0));
        map.store(1, Some(4 * 4096));
        map.store(2, Some(u64_from(MEMORY_BYTES)));
        let agrees = |offset, len| offsets(&region, offset, len) == expected(&region, offset, len);
        assert!(agrees(UNIT - 8, 16) && agrees(2 * UNIT, 8));
        Mutation::TranslateOnce.while_active(|| assert!(!agrees(UNIT - 8, 16)));
        Mutation::AcceptWrongUnit.while_active(|| assert!(!agrees(2 * UNIT, 8)));
    }

    proptest! {
        #[test]
        fn hostile_words_name_no_byte_outside(
            words in prop::collection::vec(
                prop_oneof![0_u64..16, any::<u64>(), Just(u64::MAX), Just(1 << 52)],
                usize::try_from(UNITS).unwrap(),
            ),
            offset in 0..UNITS * UNIT,
            len in 0..3 * UNIT,
        ) {
            let region = region();
            let map = region.map.as_ref().unwrap();
            for (unit, word) in words.iter().enumerate() {
                map.words.atomic_u64(map.at + unit * 8).store(*word, Ordering::Relaxed);
            }
            let found = offsets(&region, offset, len);
            prop_assert!(found.iter().flatten().all(|at| *at < MEMORY_BYTES));
            prop_assert_eq!(found, expected(&region, offset, len));
        }
    }
}
