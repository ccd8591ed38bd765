//! Numbers by Zipf's law.

use aquifer_bench::support::bytes::float;
use aquifer_bench::support::random::Random;

/// Draws ranks, starting at 0: the probability of rank r is proportional to (r + 1)^-`skew`.
///
/// Rejection-inversion (Hörmann and Derflinger, *Rejection-inversion to generate variates from
/// monotone discrete distributions*, 1996), which needs no table.
#[derive(Debug)]
pub struct Zipf {
    random: Random,
    skew: f64,
    ranks: u32,
    /// The integral of the density up to 3/2, less the probability of the first rank.
    first: f64,
    /// The integral of the density up to the last rank.
    last: f64,
    /// Distance from the drawn number within which a rank is accepted without a comparison.
    accepted: f64,
}

impl Zipf {
    /// A distribution over `ranks` ranks, at least one, with a skew above 0 and other than 1.
    pub fn new(ranks: u32, skew: f64, seed: u64) -> Self {
        let mut zipf = Self { random: Random(seed), skew, ranks, first: 0.0, last: 0.0, accepted: 0.0 };
        zipf.first = zipf.integral(1.5) - 1.0;
        zipf.last = zipf.integral(f64::from(ranks) + 0.5);
        zipf.accepted = 2.0 - zipf.inverse(zipf.integral(2.5) - zipf.density(2.0));
        zipf
    }

    /// Draws a rank.
    pub fn rank(&mut self) -> u32 {
        loop {
            let share = float(self.random.word() >> 12) / float(1 << 52);
            let height = self.last + share * (self.first - self.last);
            let real = self.inverse(height);
            let rank = nearest(real).clamp(1, self.ranks);
            let number = f64::from(rank);
            if number - real <= self.accepted || height >= self.integral(number + 0.5) - self.density(number)
            {
                return rank - 1;
            }
        }
    }

    fn density(&self, number: f64) -> f64 {
        number.powf(-self.skew)
    }

    fn integral(&self, number: f64) -> f64 {
        number.powf(1.0 - self.skew) / (1.0 - self.skew)
    }

    fn inverse(&self, height: f64) -> f64 {
        (height * (1.0 - self.skew)).powf(1.0 / (1.0 - self.skew))
    }
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "clamped to what a u32 holds")]
fn nearest(value: f64) -> u32 {
    value.round().clamp(0.0, f64::from(u32::MAX)) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    const RANKS: u32 = 1000;
    const DRAWS: u32 = 200_000;

    #[test]
    fn frequencies_are_those_of_the_formula() {
        for skew in [0.99, 1.2] {
            let mut zipf = Zipf::new(RANKS, skew, 1);
            let mut counts = vec![0_u32; RANKS as usize];
            for _ in 0..DRAWS {
                counts[zipf.rank() as usize] += 1;
            }
            let sum: f64 = (1..=RANKS).map(|rank| f64::from(rank).powf(-skew)).sum();
            for rank in [1_u32, 2, 3, 10] {
                let expected = f64::from(DRAWS) * f64::from(rank).powf(-skew) / sum;
                let found = f64::from(counts[rank as usize - 1]);
                assert!((found / expected - 1.0).abs() < 0.05, "{skew}, rank {rank}: {found}, {expected}");
            }
            let expected: f64 = (501..=RANKS).map(|rank| f64::from(rank).powf(-skew)).sum::<f64>() / sum;
            let found = f64::from(counts[500..].iter().sum::<u32>()) / f64::from(DRAWS);
            assert!((found / expected - 1.0).abs() < 0.05, "{skew}: {found}, {expected}");
        }
    }

    #[test]
    fn one_rank_is_always_drawn() {
        let mut zipf = Zipf::new(1, 0.99, 1);
        assert!((0..100).all(|_| zipf.rank() == 0));
    }
}
