//! The middle of several measurements, and how far they lie apart.

use serde::Serialize;

/// Least, middle and greatest of several measurements of the same thing.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub struct Spread {
    /// The least.
    pub min: f64,
    /// The middle one; of an even number, the mean of the two in the middle.
    pub median: f64,
    /// The greatest.
    pub max: f64,
}

impl Spread {
    /// `None` if there is no measurement, or one that is no number.
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

    /// The spread of `ours[round] / theirs[round]`: both of a pair were measured in the same round,
    /// so that what slows the whole machine cancels out.
    pub fn of_ratios(ours: &[f64], theirs: &[f64]) -> Option<Self> {
        let ratios: Vec<f64> = ours.iter().zip(theirs).map(|(ours, theirs)| ours / theirs).collect();
        Self::of(&ratios)
    }
}

/// `12.3 (11.0–15.1)`; only the number, if nothing was spread.
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

/// Three digits that matter, as people write them.
pub fn short(value: f64) -> String {
    let size = value.abs();
    let digits = match size {
        _ if size >= 100.0 => 0,
        _ if size >= 10.0 => 1,
        _ => 2,
    };
    format!("{value:.digits$}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_middle_of_odd_and_even_numbers() {
        assert_eq!(Spread::of(&[3.0, 1.0, 2.0]), Some(Spread { min: 1.0, median: 2.0, max: 3.0 }));
        assert_eq!(Spread::of(&[4.0, 1.0, 2.0, 3.0]), Some(Spread { min: 1.0, median: 2.5, max: 4.0 }));
        assert_eq!(Spread::of(&[7.0]), Some(Spread { min: 7.0, median: 7.0, max: 7.0 }));
        assert_eq!(Spread::of(&[]), None);
        assert_eq!(Spread::of(&[1.0, f64::NAN]), None);
    }

    #[test]
    fn ratios_are_taken_within_a_round() {
        // The second round was three times slower for both: the ratio does not show it.
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
