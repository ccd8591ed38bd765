//! The limit on segment numbers that each user can use on a host.
//!
//! An agent remembers the decided hand-overs of a segment that has left or was deallocated, as long
//! as the agent runs. A number can be reused, so the limit bounds the memory and not the number of
//! allocations.

use std::collections::{BTreeMap, BTreeSet};

use super::{SegmentError, SegmentKey};

/// Maximum number of different segment numbers that a user, with all of its subordinate ids, can
/// use on a host.
const NUMBERS_PER_OWNER_MAX: usize = 65_536;

/// The used numbers, by the owner of the user's id.
#[derive(Debug)]
pub(super) struct UsedNumbers {
    of_owners: BTreeMap<u32, BTreeSet<SegmentKey>>,
    max: usize,
}

impl Default for UsedNumbers {
    fn default() -> Self {
        Self { of_owners: BTreeMap::new(), max: NUMBERS_PER_OWNER_MAX }
    }
}

impl UsedNumbers {
    /// Records that the number of a segment is used.
    ///
    /// # Errors
    /// If the number is new and the owner has used the maximum.
    pub fn add(&mut self, owner: u32, segment: SegmentKey) -> Result<(), SegmentError> {
        let used = self.of_owners.entry(owner).or_default();
        if used.len() >= self.max && !used.contains(&segment) {
            return Err(SegmentError::TooManyNumbers { max: self.max });
        }
        used.insert(segment);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_user_can_reuse_numbers_but_not_exceed_the_limit() {
        let mut used = UsedNumbers { max: 3, ..UsedNumbers::default() };
        let key = |tenant, id| SegmentKey { tenant, id };
        for _ in 0..2 {
            (1..=3).for_each(|id| used.add(7, key(7, id)).unwrap());
        }
        let refused = used.add(7, key(7, 4)).unwrap_err();
        assert!(refused.to_string().contains("3 numbers"), "{refused}");
        assert!(used.add(7, key(100_000, 1)).is_err(), "a subordinate id of the same user");
        used.add(8, key(8, 4)).unwrap();
    }
}
