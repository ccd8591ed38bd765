//! Statistics of a host's segments since its agent started.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use aquifer_arena::calls::{SegmentTotals, TimeSummary};
use hdrhistogram::Histogram;
use parking_lot::Mutex;

/// Longest duration in ns that the histograms can represent; longer ones are recorded as this one.
const DURATION_MAX_NS: u64 = 60_000_000_000;

/// Counts and durations of hand-overs and pulls.
#[derive(Debug, Default)]
pub struct Statistics {
    /// Segments that were handed over.
    pub handed_over: AtomicU64,
    /// Segments that were received.
    pub received: AtomicU64,
    /// Hand-overs that did not take place: the target declined them, or they were retracted.
    pub declined: AtomicU64,
    /// Pages that were pulled when a thread waited for them.
    pub pages_on_touch: AtomicU64,
    /// Pages that were pulled ahead of the program.
    pub pages_ahead: AtomicU64,
    /// Durations from the request to hand a segment over to the end of the hand-over.
    pub transfers: TimesOf,
    /// Durations from the page fault on a missing page to its arrival.
    pub waits: TimesOf,
}

impl Statistics {
    /// Counts a page that was pulled.
    pub fn count_page(&self, is_demanded: bool) {
        let count = if is_demanded { &self.pages_on_touch } else { &self.pages_ahead };
        count.fetch_add(1, Relaxed);
    }

    /// Returns the statistics in the form of an answer to a program.
    #[must_use]
    pub fn totals(&self) -> SegmentTotals {
        SegmentTotals {
            handed_over: self.handed_over.load(Relaxed),
            received: self.received.load(Relaxed),
            declined: self.declined.load(Relaxed),
            pages_on_touch: self.pages_on_touch.load(Relaxed),
            pages_ahead: self.pages_ahead.load(Relaxed),
            transfers: self.transfers.summary(),
            waits: self.waits.summary(),
        }
    }
}

/// A histogram of durations.
#[derive(Debug)]
pub struct TimesOf(Mutex<Recorded>);

#[derive(Debug)]
struct Recorded {
    histogram: Histogram<u64>,
    sum_ns: u64,
}

impl Default for TimesOf {
    fn default() -> Self {
        let histogram = Histogram::new_with_max(DURATION_MAX_NS, 2).expect("the bounds are possible");
        Self(Mutex::new(Recorded { histogram, sum_ns: 0 }))
    }
}

impl TimesOf {
    /// Records a duration.
    pub fn record(&self, time: Duration) {
        let ns = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        let mut recorded = self.0.lock();
        recorded.histogram.saturating_record(ns);
        recorded.sum_ns = recorded.sum_ns.saturating_add(ns);
    }

    fn summary(&self) -> TimeSummary {
        let recorded = self.0.lock();
        let us = |ns: u64| ns.div_ceil(1000);
        TimeSummary {
            count: recorded.histogram.len(),
            p50_us: us(recorded.histogram.value_at_quantile(0.5)),
            p99_us: us(recorded.histogram.value_at_quantile(0.99)),
            longest_us: us(recorded.histogram.max()),
        }
    }

    /// Returns the sum of all durations in ns, and the number of durations in each bucket.
    ///
    /// Bucket k has the durations above bound k - 1 and up to bound k, and the last bucket those
    /// above all bounds. The bounds are in ns, in ascending order.
    #[must_use]
    pub fn between(&self, bounds_ns: &[u64]) -> (u64, Vec<u64>) {
        let recorded = self.0.lock();
        let mut counts = vec![0; bounds_ns.len() + 1];
        for value in recorded.histogram.iter_recorded() {
            let at = bounds_ns.partition_point(|bound| *bound < value.value_iterated_to());
            counts[at] += value.count_at_value();
        }
        (recorded.sum_ns, counts)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_summed_and_counted_by_bucket() {
        let times = TimesOf::default();
        assert_eq!(times.summary(), TimeSummary::default());
        (1..=100).for_each(|at| times.record(Duration::from_micros(at)));
        times.record(Duration::from_secs(3600));
        let TimeSummary { count, p50_us, p99_us, .. } = times.summary();
        assert!(count == 101 && (50..=52).contains(&p50_us) && (99..=102).contains(&p99_us));
        let (sum_ns, counts) = times.between(&[10_500, 200_000]);
        assert_eq!((counts, sum_ns), (vec![10, 90, 1], 5_050_000 + 3_600_000_000_000));
    }
}
