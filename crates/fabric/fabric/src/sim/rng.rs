//! Seeded random numbers for simulators: xoshiro256**, seeded through splitmix64.

use std::ops::Range;

use crate::keys::mix;

/// A generator: the same seed gives the same numbers on every machine and in every version.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Rng {
    state: [u64; 4],
}

impl Rng {
    /// Creates a generator with the given seed.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        let word = |n: u64| mix(seed.wrapping_add(n.wrapping_mul(0x9E37_79B9_7F4A_7C15)));
        Self { state: [word(1), word(2), word(3), word(4)] }
    }

    /// The next 64 random bits.
    pub fn next_u64(&mut self) -> u64 {
        let [a, b, c, d] = &mut self.state;
        let result = b.wrapping_mul(5).rotate_left(7).wrapping_mul(9);
        let shifted = *b << 17;
        *c ^= *a;
        *d ^= *b;
        *b ^= *c;
        *a ^= *d;
        *c ^= shifted;
        *d = d.rotate_left(45);
        result
    }

    /// A number below `end`; zero if `end` is zero.
    pub fn below(&mut self, end: u64) -> u64 {
        // The high half of a 128-bit product; its bias is far below what a simulation can see.
        let product = u128::from(self.next_u64()) * u128::from(end);
        u64::try_from(product >> 64).unwrap_or(0)
    }

    /// An index below `len`; zero if `len` is zero.
    pub fn index(&mut self, len: usize) -> usize {
        usize::try_from(self.below(crate::memory::u64_from(len))).unwrap_or(0)
    }

    /// A number of the range; its start if it is empty.
    pub fn range(&mut self, range: &Range<u64>) -> u64 {
        range.start + self.below(range.end.saturating_sub(range.start))
    }

    /// True in `parts` of `whole` cases.
    pub fn chance(&mut self, parts: u64, whole: u64) -> bool {
        self.below(whole) < parts
    }

    /// Creates a generator that is independent of this one.
    #[must_use]
    pub fn fork(&mut self) -> Self {
        Self::new(self.next_u64())
    }

    /// Shuffles a slice.
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            items.swap(last, self.index(last + 1));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_those_of_the_reference_implementation() {
        // xoshiro256** from the state 1, 2, 3, 4, as its authors' C code gives them.
        let mut rng = Rng { state: [1, 2, 3, 4] };
        assert_eq!(rng.next_u64(), 11520);
        assert_eq!(rng.next_u64(), 0);
        assert_eq!(rng.next_u64(), 1_509_978_240);
        assert_eq!(rng.next_u64(), 1_215_971_899_390_074_240);
    }

    #[test]
    fn ranges_are_kept_and_reached() {
        let mut rng = Rng::new(7);
        let mut seen = [0; 5];
        for _ in 0..5000 {
            seen[usize::try_from(rng.range(&(10..15)) - 10).unwrap()] += 1;
        }
        assert!(seen.iter().all(|&count| (800..1200).contains(&count)), "{seen:?}");
        assert_eq!((rng.below(0), rng.range(&(9..9)), rng.index(1)), (0, 9, 0));
        assert_eq!(Rng::new(3), Rng::new(3));
        assert_ne!(rng.fork(), rng.fork());
        let mut items: Vec<_> = (0..50).collect();
        rng.shuffle(&mut items);
        assert!(!items.is_sorted());
        items.sort_unstable();
        assert_eq!(items, (0..50).collect::<Vec<_>>());
    }
}
