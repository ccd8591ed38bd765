//! Counters and latencies of one program's faults. One thread writes, any may read.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Sub-buckets per power of two: quantiles are exact to 6 %.
const FINE: u64 = 16;
const BUCKETS: usize = 40 * 16;

/// What happened so far.
#[derive(Debug, Default)]
pub struct FaultStats {
    /// Faults served.
    pub faults: AtomicU64,
    /// Pages filled with zeros.
    pub zero_pages: AtomicU64,
    /// Pages filled from the reclaimable queue.
    pub mempool_hits: AtomicU64,
    /// Pages filled from the staging queue.
    pub staging_hits: AtomicU64,
    /// Pages filled from memory nodes.
    pub remote_reads: AtomicU64,
    /// Of those, pages that nobody had asked for yet.
    pub prefetched: AtomicU64,
    /// READs that took.
    pub remote_read_trips: AtomicU64,
    /// Pages taken out of the program.
    pub evictions: AtomicU64,
    /// Pages that could not be read back.
    pub lost_pages: AtomicU64,
    /// From reading a fault to its page's being there.
    pub latency: Latencies,
}

impl FaultStats {
    /// Add to a counter that only the calling thread writes.
    pub fn add(counter: &AtomicU64, count: usize) {
        counter.store(counter.load(Relaxed) + count as u64, Relaxed);
    }

    /// Add everything that `other` counted.
    pub fn merge(&self, other: &Self) {
        for (mine, theirs) in self.counters().into_iter().zip(other.counters()) {
            merge(mine, theirs);
        }
        self.latency.merge(&other.latency);
    }

    fn counters(&self) -> [&AtomicU64; 9] {
        [
            &self.faults,
            &self.zero_pages,
            &self.mempool_hits,
            &self.staging_hits,
            &self.remote_reads,
            &self.prefetched,
            &self.remote_read_trips,
            &self.evictions,
            &self.lost_pages,
        ]
    }
}

/// A histogram of durations, in nanoseconds, to 6 %.
#[derive(Debug)]
pub struct Latencies(Box<[AtomicU64; BUCKETS]>);

impl Default for Latencies {
    fn default() -> Self {
        Self(Box::new([const { AtomicU64::new(0) }; BUCKETS]))
    }
}

impl Latencies {
    /// Count one. Only one thread does.
    pub fn record(&self, nanoseconds: u64) {
        FaultStats::add(&self.0[Self::bucket(nanoseconds)], 1);
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

    /// The duration that the given share of all (0 to 1) do not exceed, in nanoseconds; 0 if none was counted.
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

    fn merge(&self, other: &Self) {
        for (mine, theirs) in self.0.iter().zip(other.0.iter()) {
            merge(mine, theirs);
        }
    }

    /// For each of some bounds in nanoseconds, in order, how many were above the one before and not above it, to 6 %, and last how many
    /// were above them all.
    #[must_use]
    pub fn between(&self, bounds_ns: &[u64]) -> Vec<u64> {
        let mut counts = vec![0; bounds_ns.len() + 1];
        for (number, bucket) in self.0.iter().enumerate() {
            counts[bounds_ns.partition_point(|bound| *bound < Self::lower_bound(number))] +=
                bucket.load(Relaxed);
        }
        counts
    }

    /// The sum of all, in nanoseconds, to 6 %.
    #[must_use]
    pub fn sum(&self) -> u128 {
        let of = |(number, bucket): (usize, &AtomicU64)| {
            u128::from(Self::lower_bound(number)) * u128::from(bucket.load(Relaxed))
        };
        self.0.iter().enumerate().map(of).sum()
    }
}

/// Add what another counted. Most of it is nothing.
fn merge(mine: &AtomicU64, theirs: &AtomicU64) {
    let count = theirs.load(Relaxed);
    if count > 0 {
        mine.fetch_add(count, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_are_close_and_in_order() {
        let mut last = 0;
        for value in (1..5000u64).chain((0..1000).map(|step| 5000 + step * 977_131)) {
            let bucket = Latencies::bucket(value);
            let low = Latencies::lower_bound(bucket);
            assert!(low <= value && value - low <= value / 16, "{value} in bucket from {low}");
            assert!(bucket >= last);
            last = bucket;
        }
        assert_eq!(Latencies::bucket(u64::MAX), BUCKETS - 1);
    }

    #[test]
    fn counts_between_bounds_and_their_sum() {
        let latencies = Latencies::default();
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
    fn quantiles_and_merging() {
        let one = FaultStats::default();
        assert_eq!(one.latency.quantile(0.5), 0);
        for value in 1..=1000u64 {
            one.latency.record(value * 1000);
        }
        let both = FaultStats::default();
        FaultStats::add(&one.faults, 3);
        both.merge(&one);
        both.merge(&one);
        assert_eq!(both.faults.load(Relaxed), 6);
        let median = both.latency.quantile(0.5);
        assert!((470_000..=500_000).contains(&median), "{median}");
        assert!(both.latency.quantile(0.999) > 930_000);
    }
}
