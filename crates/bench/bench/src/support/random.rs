//! Reproducible random numbers and distributions of keys.

use super::bytes::float;

/// SplitMix64.
#[derive(Clone, Debug)]
pub struct Random(pub u64);

impl Random {
    /// A generator whose first number is the one at position `seed` of the sequence of seed 0.
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15))
    }

    /// The next number.
    pub fn word(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut word = self.0;
        word = (word ^ (word >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        word ^ (word >> 31)
    }

    /// A number below `bound`, which must not be 0. Small numbers are more probable by `bound` /
    /// 2⁶⁴.
    pub fn below(&mut self, bound: usize) -> usize {
        usize::try_from(self.word() % bound as u64).expect("below a usize")
    }

    /// A number below `bound`, out of the upper 53 bits; 0 if `bound` is 0.
    pub fn word_below(&mut self, bound: u64) -> u64 {
        (self.word() >> 11) % bound.max(1)
    }

    /// A number of at least 0 and less than 1.
    fn share(&mut self) -> f64 {
        float(self.word() >> 12) / float(1 << 52)
    }
}

/// Distribution of the requested keys.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Access {
    /// All keys are equally frequent.
    Uniform,
    /// Zipf: the probability of a key is proportional to its rank to the power of -0.99.
    Zipf,
}

/// Draws keys.
#[derive(Debug)]
pub struct Draw {
    random: Random,
    /// Cumulative probability of each rank; empty for a uniform distribution.
    cumulated: Vec<f64>,
    /// Key of each rank, shuffled, so that frequent keys are spread over the memory.
    keys: Vec<usize>,
}

impl Draw {
    /// A distribution of `keys` keys, at least one.
    pub fn new(access: Access, keys: usize) -> Self {
        const SKEW: f64 = 0.99;
        let mut random = Random(1);
        let mut order: Vec<usize> = (0..keys).collect();
        for at in (1..keys).rev() {
            order.swap(at, random.below(at + 1));
        }
        let mut cumulated = Vec::new();
        if access == Access::Zipf {
            let mut sum = 0.0;
            cumulated.extend((1..=keys).map(|rank| {
                sum += float(rank as u64).powf(-SKEW);
                sum
            }));
            for share in &mut cumulated {
                *share /= sum;
            }
        }
        Self { random, cumulated, keys: order }
    }

    /// Draws a key.
    pub fn key(&mut self) -> usize {
        let rank = if self.cumulated.is_empty() {
            self.random.below(self.keys.len())
        } else {
            let share = self.random.share();
            self.cumulated.partition_point(|&up_to| up_to <= share).min(self.keys.len() - 1)
        };
        self.keys[rank]
    }

    /// True once in `times`, on average.
    pub fn once_in(&mut self, times: usize) -> bool {
        self.random.below(times) == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEYS: usize = 1000;
    const DRAWS: usize = 100_000;

    fn counts(access: Access) -> Vec<usize> {
        let mut draw = Draw::new(access, KEYS);
        let mut counts = vec![0; KEYS];
        for _ in 0..DRAWS {
            counts[draw.key()] += 1;
        }
        counts.sort_unstable_by(|left, right| right.cmp(left));
        counts
    }

    #[test]
    fn uniform_access_prefers_no_key() {
        let counts = counts(Access::Uniform);
        assert!(counts[0] < 2 * DRAWS / KEYS && counts[KEYS - 1] > DRAWS / KEYS / 2, "{counts:?}");
    }

    #[test]
    fn zipf_access_is_as_skewed_as_its_formula() {
        let counts = counts(Access::Zipf);
        let sum: f64 = (1..=1000).map(|rank| f64::from(rank).powf(-0.99)).sum();
        let expected = f64::from(u32::try_from(DRAWS).unwrap()) / sum;
        let first = f64::from(u32::try_from(counts[0]).unwrap());
        assert!((first / expected - 1.0).abs() < 0.1, "{first}, expected {expected}");
        assert!(counts[0] > 50 * counts[KEYS / 2], "{counts:?}");
    }

    #[test]
    fn every_run_draws_the_same_keys() {
        let keys = |access| {
            let mut draw = Draw::new(access, KEYS);
            (0..100).map(|_| draw.key()).collect::<Vec<_>>()
        };
        assert_eq!(keys(Access::Zipf), keys(Access::Zipf));
        assert_ne!(keys(Access::Zipf), keys(Access::Uniform));
    }
}
