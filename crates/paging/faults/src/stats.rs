//! Counters and latencies of the faults of one program. One thread writes; any thread may read.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use aquifer_latency::LatencyHistogram;

/// The reason for which a fault has waited.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum FaultWait {
    /// For nothing but its resolution: a page of zeros, or a protected one.
    #[default]
    Nothing,
    /// For a page in the mempool or in the page cache.
    Host,
    /// For a memory node.
    Node,
    /// For room below the limit, or for the page's own eviction.
    Room,
}

impl FaultWait {
    /// All values, in their order.
    pub const ALL: [Self; 4] = [Self::Nothing, Self::Host, Self::Node, Self::Room];
}

/// Counters of one program since its start.
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
    /// Pages filled from the page cache.
    pub cache_hits: AtomicU64,
    /// Pages filled from memory nodes.
    pub remote_reads: AtomicU64,
    /// Pages filled from memory nodes ahead of a fault.
    pub prefetched: AtomicU64,
    /// READ trips to memory nodes for filled pages.
    pub remote_read_trips: AtomicU64,
    /// Pages evicted from the program.
    pub evictions: AtomicU64,
    /// Pages that no replica could provide.
    pub lost_pages: AtomicU64,
    /// Pages moved between slabs.
    pub repacked: AtomicU64,
    /// Time from the read of a fault to its resolution, in nanoseconds, by [`FaultWait`].
    latencies: [LatencyHistogram; 4],
}

impl FaultStats {
    /// Adds to a counter that only the calling thread writes.
    pub fn add(counter: &AtomicU64, count: usize) {
        counter.store(counter.load(Relaxed) + count as u64, Relaxed);
    }

    /// Adds the counts and latencies of `other`.
    pub fn merge(&self, other: &Self) {
        for (mine, theirs) in self.counters().into_iter().zip(other.counters()) {
            mine.fetch_add(theirs.load(Relaxed), Relaxed);
        }
        for (mine, theirs) in self.latencies.iter().zip(&other.latencies) {
            mine.merge(theirs);
        }
    }

    /// Time from the read of a fault to its resolution, in nanoseconds, of the faults that have
    /// waited for this.
    #[must_use]
    pub fn latency_of(&self, wait: FaultWait) -> &LatencyHistogram {
        &self.latencies[wait as usize]
    }

    /// Time from the read of a fault to its resolution, in nanoseconds, of all faults.
    #[must_use]
    pub fn latency(&self) -> LatencyHistogram {
        let all = LatencyHistogram::default();
        self.latencies.iter().for_each(|of_wait| all.merge(of_wait));
        all
    }

    fn counters(&self) -> [&AtomicU64; 11] {
        [
            &self.faults,
            &self.zero_pages,
            &self.mempool_hits,
            &self.staging_hits,
            &self.cache_hits,
            &self.remote_reads,
            &self.prefetched,
            &self.remote_read_trips,
            &self.evictions,
            &self.lost_pages,
            &self.repacked,
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn merging_adds_counters_and_latencies() {
        let one = FaultStats::default();
        assert_eq!(one.latency().quantile(0.5), 0);
        for value in 1..=1000u64 {
            let wait = FaultWait::ALL[usize::try_from(value % 4).unwrap()];
            one.latency_of(wait).record(value * 1000);
        }
        let both = FaultStats::default();
        FaultStats::add(&one.faults, 3);
        both.merge(&one);
        both.merge(&one);
        assert_eq!(both.faults.load(Relaxed), 6);
        let median = both.latency().quantile(0.5);
        assert!((470_000..=500_000).contains(&median), "{median}");
        assert!(both.latency_of(FaultWait::Nothing).quantile(0.999) > 930_000);
    }
}
