//! The addresses of a tenant's segments, which are the same in each of the tenant's processes.

use std::collections::BTreeMap;

use aquifer_arena::{ARENA_BYTES, ARENA_START, Arena};
use serde::{Deserialize, Serialize};

/// Maximum number of segments of a tenant.
pub const SEGMENTS_MAX: usize = 1024;

/// The directory's record of a tenant's addresses.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct RangesRecord {
    /// The greatest number of a hand-over of any segment that was deallocated. The hand-overs of
    /// later segments have greater numbers, because other hosts remember the earlier ones.
    pub generation: u64,
    /// The first address and the length in bytes of each segment, by its number.
    pub ranges: BTreeMap<u64, (u64, u64)>,
}

impl RangesRecord {
    /// Grants the lowest free addresses to a new segment of `bytes` bytes. `None` if there are
    /// none, or the tenant has [`SEGMENTS_MAX`] segments.
    ///
    /// # Panics
    /// If the segment has addresses already.
    pub fn grant(&mut self, id: u64, bytes: u64) -> Option<u64> {
        assert!(!self.ranges.contains_key(&id), "segment {id} has addresses already");
        if self.ranges.len() >= SEGMENTS_MAX {
            return None;
        }
        let alignment = usize::try_from(bytes).map(Arena::alignment).ok()? as u64;
        let mut used: Vec<(u64, u64)> = self.ranges.values().copied().collect();
        used.sort_unstable();
        let mut address = ARENA_START as u64;
        for (start, len) in used {
            if address.checked_add(bytes)? <= start {
                break;
            }
            address = address.max((start + len).next_multiple_of(alignment));
        }
        let end = ARENA_START as u64 + ARENA_BYTES as u64;
        if address.checked_add(bytes)? > end {
            return None;
        }
        self.ranges.insert(id, (address, bytes));
        Some(address)
    }

    /// Frees the addresses of a segment whose last hand-over had the number `generation`.
    pub fn remove(&mut self, id: u64, generation: u64) {
        self.ranges.remove(&id);
        self.retire(generation);
    }

    /// Records that a segment has ended whose last hand-over had the number `generation`. The
    /// segment keeps its addresses, because it may be restored.
    pub fn retire(&mut self, generation: u64) {
        self.generation = self.generation.max(generation);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn addresses_are_aligned_and_do_not_overlap() {
        let mut record = RangesRecord::default();
        let mut state = 7_u64;
        let mut below = move |bound: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 33) % bound
        };
        for id in 0..5000 {
            if record.ranges.len() == 100 {
                let number = usize::try_from(below(100)).unwrap();
                let victim = *record.ranges.keys().nth(number).unwrap();
                record.remove(victim, id);
            }
            let bytes = (1 + below(1 << 19)) * 4096;
            let address = record.grant(id, bytes).unwrap();
            let (address, bytes) = (usize::try_from(address).unwrap(), usize::try_from(bytes).unwrap());
            Arena::check(address, bytes).unwrap();
            let mut ranges: Vec<(u64, u64)> = record.ranges.values().copied().collect();
            ranges.sort_unstable();
            assert!(ranges.windows(2).all(|pair| pair[0].0 + pair[0].1 <= pair[1].0));
        }
        assert_eq!(record.generation, 4999);
    }

    #[test]
    fn addresses_and_segments_are_limited() {
        let mut record = RangesRecord::default();
        for id in 0..4 {
            assert!(record.grant(id, 1 << 40).is_some());
        }
        assert_eq!(record.grant(9, 4096), None);
        record.remove(2, 0);
        assert_eq!(record.grant(9, 4096), Some(ARENA_START as u64 + (2 << 40)));
        let mut record = RangesRecord::default();
        for id in 0..SEGMENTS_MAX as u64 {
            assert_eq!(record.grant(id, 4096), Some(ARENA_START as u64 + id * 2 * MIB));
        }
        assert_eq!(record.grant(5000, 4096), None);
    }
}
