//! Cas numbers, by which clients distinguish the states of an item.
//!
//! A number has the generation of its partition in its high bits. A partition that was lost begins
//! with a higher generation, so that no number of a lost item is used again.

/// Bits of a number below the generation.
const COUNT_BITS: u32 = 44;
const COUNT_MASK: u64 = (1 << COUNT_BITS) - 1;

/// The number before the first number of a partition.
#[must_use]
pub fn before_first(partition: usize, generation: u64) -> u64 {
    generation << COUNT_BITS | partition as u64 & COUNT_MASK
}

/// The number after `cas`. The count below the generation wraps at 2^44.
#[inline]
#[must_use]
pub fn next(cas: u64, step: u64) -> u64 {
    cas & !COUNT_MASK | cas.wrapping_add(step) & COUNT_MASK
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_keep_their_generation() {
        let first = before_first(5, 3);
        assert_eq!(next(first, 128), (3 << 44) + 133);
        let last = first | (COUNT_MASK - 127);
        assert_eq!(next(last, 128), (3 << 44) + 5, "{last:#x}");
        assert!(before_first(5, 4) > last);
    }
}
