//! Minimum, median and maximum of several measurements.

use serde::Serialize;

/// Minimum, median and maximum of several measurements.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub struct Spread {
    /// Minimum.
    pub min: f64,
    /// Median; for an even number of values, the mean of the two middle ones.
    pub median: f64,
    /// Maximum.
    pub max: f64,
}

impl Spread {
    /// The spread of values; `None` if there are none, or one is not finite.
    pub fn of(values: &[f64]) -> Option<Self> {
        if values.is_empty() || values.iter().any(|value| !value.is_finite()) {
            return None;
        }
        let mut sorted = values.to_vec();
        sorted.sort_by(f64::total_cmp);
        let last = sorted.len() - 1;
        let median = f64::midpoint(sorted[last / 2], sorted[last.div_ceil(2)]);
        Some(Self { min: sorted[0], median, max: sorted[last] })
    }

    /// The spread of one measurement.
    pub const fn one(value: f64) -> Self {
        Self { min: value, median: value, max: value }
    }

    /// The spread of `ours[round] / theirs[round]`. Both values of a pair are from the same round,
    /// so that a slow machine affects both.
    pub fn of_ratios(ours: &[f64], theirs: &[f64]) -> Option<Self> {
        let ratios: Vec<f64> = ours.iter().zip(theirs).map(|(ours, theirs)| ours / theirs).collect();
        Self::of(&ratios)
    }
}

/// Writes `12.3 (11.0–15.1)`, or only the median if minimum and maximum are equal.
impl std::fmt::Display for Spread {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { min, median, max } = *self;
        let text = if short(min) == short(max) {
            short(median)
        } else {
            format!("{} ({}–{})", short(median), short(min), short(max))
        };
        f.pad(&text)
    }
}

/// A number with three significant digits.
pub fn short(value: f64) -> String {
    let size = value.abs();
    let digits = match size {
        _ if size >= 100.0 => 0,
        _ if size >= 10.0 => 1,
        _ => 2,
    };
    format!("{value:.digits$}")
}

/// The mean in µs.
#[expect(clippy::cast_precision_loss, reason = "far below 2^52")]
pub fn mean_us(times_ns: &[u64]) -> f64 {
    times_ns.iter().sum::<u64>() as f64 / times_ns.len() as f64 / 1e3
}

/// A quantile of sorted times in µs; the median is 500.
#[expect(clippy::cast_precision_loss, reason = "far below 2^52")]
pub fn permille_us(sorted_ns: &[u64], permille: usize) -> f64 {
    let last = sorted_ns.len().saturating_sub(1);
    sorted_ns.get(last * permille / 1000).map_or(f64::NAN, |ns| *ns as f64 / 1e3)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_of_odd_and_even_counts() {
        assert_eq!(Spread::of(&[3.0, 1.0, 2.0]), Some(Spread { min: 1.0, median: 2.0, max: 3.0 }));
        assert_eq!(Spread::of(&[4.0, 1.0, 2.0, 3.0]), Some(Spread { min: 1.0, median: 2.5, max: 4.0 }));
        assert_eq!(Spread::of(&[7.0]), Some(Spread { min: 7.0, median: 7.0, max: 7.0 }));
        assert_eq!(Spread::of(&[]), None);
        assert_eq!(Spread::of(&[1.0, f64::NAN]), None);
    }

    #[test]
    fn ratios_are_taken_within_a_round() {
        // The second round was three times slower for both, so the ratio is the same.
        let ratios = Spread::of_ratios(&[10.0, 30.0], &[5.0, 15.0]);
        assert_eq!(ratios, Some(Spread { min: 2.0, median: 2.0, max: 2.0 }));
        assert_eq!(Spread::of_ratios(&[1.0], &[0.0]), None);
    }

    #[test]
    fn numbers_are_shown_with_three_digits() {
        assert_eq!(short(1234.5), "1234");
        assert_eq!(short(12.34), "12.3");
        assert_eq!(short(0.5), "0.50");
        let spread = Spread { min: 1.0, median: 2.0, max: 3.0 };
        assert_eq!(spread.to_string(), "2.00 (1.00–3.00)");
        assert_eq!(Spread { min: 2.0, median: 2.0, max: 2.001 }.to_string(), "2.00");
        assert_eq!(format!("{spread:>18}").chars().count(), 18);
    }
}
