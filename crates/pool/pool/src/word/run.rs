//! Aligned runs of chunks of a span, or of spans of a section.

/// An aligned run: 2^`order` chunks of a span, or spans of a section, from `first` on.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct AlignedRun {
    first: u8,
    order: u8,
}

impl AlignedRun {
    /// All spans of a section.
    pub const SECTION: Self = Self { first: 0, order: 4 };

    /// The run of 2^`order` places from `first` on; `None` if it is not aligned, or ends above 32.
    #[must_use]
    pub const fn new(first: u8, order: u8) -> Option<Self> {
        if order <= 5 && first < 32 && first.trailing_zeros() >= order as u32 {
            Some(Self { first, order })
        } else {
            None
        }
    }

    /// The run of one place.
    ///
    /// # Panics
    /// If `first` is 32 or more.
    #[must_use]
    pub const fn single(first: u8) -> Self {
        assert!(first < 32, "a word has 32 places");
        Self { first, order: 0 }
    }

    /// The first place.
    #[must_use]
    pub const fn first(self) -> u8 {
        self.first
    }

    /// The exponent of the length.
    #[must_use]
    pub const fn order(self) -> u8 {
        self.order
    }

    /// The number of places.
    #[must_use]
    pub const fn len(self) -> u8 {
        1 << self.order
    }

    /// Always false: a run has at least one place.
    #[must_use]
    pub const fn is_empty(self) -> bool {
        false
    }

    /// The mask with a bit for each place.
    #[must_use]
    pub const fn mask(self) -> u32 {
        let ones = if self.order >= 5 { u32::MAX } else { (1 << (1 << self.order)) - 1 };
        ones << self.first
    }

    /// Whether two runs share a place.
    #[must_use]
    pub const fn overlaps(self, other: Self) -> bool {
        self.mask() & other.mask() != 0
    }

    /// The number among all aligned runs of a word of `places` (16 or 32).
    ///
    /// The runs are the nodes of a binary tree whose root, the whole word, has the number 1. Six
    /// bits hold the number.
    #[must_use]
    pub(super) const fn number(self, places: u8) -> u32 {
        ((places >> self.order) + (self.first >> self.order)) as u32
    }

    /// The run with this number; `None` if there is none.
    pub(super) fn from_number(number: u32, places: u8) -> Option<Self> {
        let depth = u8::try_from(number.checked_ilog2()?).ok()?;
        let depth_max = u8::try_from(places.ilog2()).ok()?;
        let order = depth_max.checked_sub(depth)?;
        let first = u8::try_from((number << order) - u32::from(places)).ok()?;
        Some(Self { first, order })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_run_has_its_own_number() {
        for places in [16_u8, 32] {
            let mut seen = 0_u64;
            for number in 1..u32::from(places) * 2 {
                let run = AlignedRun::from_number(number, places).expect("a number of the tree");
                assert_eq!(run.number(places), number);
                assert_eq!(AlignedRun::new(run.first(), run.order()), Some(run));
                assert!(u32::from(run.first()) + u32::from(run.len()) <= u32::from(places));
                assert_eq!(run.mask().count_ones(), u32::from(run.len()));
                assert_eq!(seen & (1 << number), 0);
                seen |= 1 << number;
            }
            assert_eq!(AlignedRun::from_number(0, places), None);
            assert_eq!(AlignedRun::from_number(u32::from(places) * 2, places), None);
        }
    }

    #[test]
    fn unaligned_runs_are_refused() {
        assert_eq!(AlignedRun::new(1, 1), None);
        assert_eq!(AlignedRun::new(32, 0), None);
        assert_eq!(AlignedRun::new(0, 6), None);
        assert!(AlignedRun::new(24, 3).is_some());
    }
}
