//! Latency histogram that one thread writes and any thread may read.

#![forbid(unsafe_code)]

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Sub-buckets per power of two: quantiles are exact to 6 %.
const FINE: u64 = 16;
const BUCKETS: usize = 40 * 16;

/// A histogram of durations in nanoseconds, with a relative error of at most 6 %.
#[derive(Debug)]
pub struct LatencyHistogram(Box<[AtomicU64; BUCKETS]>);

impl Default for LatencyHistogram {
    fn default() -> Self {
        Self(Box::new([const { AtomicU64::new(0) }; BUCKETS]))
    }
}

impl LatencyHistogram {
    /// Counts one duration. Only one thread may call this.
    pub fn record(&self, nanoseconds: u64) {
        self.record_several(nanoseconds, 1);
    }

    /// Counts several durations that are equal. Only one thread may call this.
    pub fn record_several(&self, nanoseconds: u64, times: u64) {
        let count = &self.0[Self::bucket(nanoseconds)];
        count.store(count.load(Relaxed) + times, Relaxed);
    }

    fn bucket(nanoseconds: u64) -> usize {
        let value = nanoseconds.max(1);
        let power = u64::from(value.ilog2());
        let fine = if power < 4 { value } else { value >> (power - 4) } - if power < 4 { 0 } else { FINE };
        let bucket = if power < 4 { fine } else { (power - 3) * FINE + fine };
        usize::try_from(bucket).unwrap_or(usize::MAX).min(BUCKETS - 1)
    }

    fn lower_bound(bucket: usize) -> u64 {
        let bucket = bucket as u64;
        let (power, fine) = (bucket / FINE, bucket % FINE);
        if power == 0 { fine } else { (FINE + fine) << (power - 1) }
    }

    /// The quantile of the durations at `share` (0 to 1), in nanoseconds; 0 if none was counted.
    #[must_use]
    #[allow(clippy::cast_precision_loss, clippy::cast_possible_truncation, clippy::cast_sign_loss)]
    pub fn quantile(&self, share: f64) -> u64 {
        let total: u64 = self.0.iter().map(|bucket| bucket.load(Relaxed)).sum();
        let wanted = (total as f64 * share).ceil() as u64;
        let mut seen = 0;
        for (number, bucket) in self.0.iter().enumerate() {
            seen += bucket.load(Relaxed);
            if seen >= wanted && seen > 0 {
                return Self::lower_bound(number);
            }
        }
        0
    }

    /// Adds all counts of `other`. Buckets that are 0, which are most, are skipped.
    pub fn merge(&self, other: &Self) {
        for (mine, theirs) in self.0.iter().zip(other.0.iter()) {
            let count = theirs.load(Relaxed);
            if count > 0 {
                mine.fetch_add(count, Relaxed);
            }
        }
    }

    /// The number of durations between neighbouring bounds: element `i` counts those above bound `i
    /// - 1` and not above bound `i`; the last counts those above all bounds.
    ///
    /// `bounds_ns` is ascending. The relative error of a duration is at most 6 %.
    #[must_use]
    pub fn between(&self, bounds_ns: &[u64]) -> Vec<u64> {
        let mut counts = vec![0; bounds_ns.len() + 1];
        for (number, bucket) in self.0.iter().enumerate() {
            counts[bounds_ns.partition_point(|bound| *bound < Self::lower_bound(number))] +=
                bucket.load(Relaxed);
        }
        counts
    }

    /// The sum of all durations in nanoseconds, with a relative error of at most 6 %.
    #[must_use]
    pub fn sum(&self) -> u128 {
        let of = |(number, bucket): (usize, &AtomicU64)| {
            u128::from(Self::lower_bound(number)) * u128::from(bucket.load(Relaxed))
        };
        self.0.iter().enumerate().map(of).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_and_sum_match_the_recorded_durations() {
        let latencies = LatencyHistogram::default();
        assert_eq!((latencies.between(&[1, 10]), latencies.sum()), (vec![0, 0, 0], 0));
        for value in [1, 2, 15, 16, 1 << 20, u64::MAX] {
            latencies.record(value);
        }
        assert_eq!(latencies.between(&[0, 2, 15, 16, 1 << 20]), [0, 2, 1, 1, 1, 1]);
        assert_eq!(latencies.between(&[]), [6]);
        let whole = latencies.sum();
        latencies.record(1000);
        assert!((941..=1000).contains(&(latencies.sum() - whole)));
    }

    #[test]
    fn buckets_are_narrow_and_in_order() {
        let mut last = 0;
        for value in (1..5000u64).chain((0..1000).map(|step| 5000 + step * 977_131)) {
            let bucket = LatencyHistogram::bucket(value);
            let low = LatencyHistogram::lower_bound(bucket);
            assert!(low <= value && value - low <= value / 16, "{value} in bucket from {low}");
            assert!(bucket >= last);
            last = bucket;
        }
        assert_eq!(LatencyHistogram::bucket(u64::MAX), BUCKETS - 1);
    }
}
