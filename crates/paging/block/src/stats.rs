//! Statistics of a block volume.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Counters to which any thread adds.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub(crate) zero_pages: AtomicU64,
    pub(crate) mempool_hits: AtomicU64,
    pub(crate) staging_hits: AtomicU64,
    pub(crate) cache_hits: AtomicU64,
    pub(crate) remote_reads: AtomicU64,
    pub(crate) remote_read_trips: AtomicU64,
    pub(crate) remote_writes: AtomicU64,
    pub(crate) remote_write_trips: AtomicU64,
    pub(crate) written_pages: AtomicU64,
    pub(crate) discarded_pages: AtomicU64,
    pub(crate) lost_pages: AtomicU64,
    pub(crate) repacked_pages: AtomicU64,
    pub(crate) vacated_slabs: AtomicU64,
    pub(crate) moved_bytes: AtomicU64,
}

impl Counters {
    pub(crate) fn add(counter: &AtomicU64, count: u64) {
        counter.fetch_add(count, Relaxed);
    }
}

/// The statistics of one volume.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct VolumeStats {
    /// Pages read or written that were all zeros.
    pub zero_pages: u64,
    /// Pages read from the reclaimable queue of the mempool.
    pub mempool_hits: u64,
    /// Pages read from the mempool before a memory node had acknowledged them.
    pub staging_hits: u64,
    /// Pages read from the page cache.
    pub cache_hits: u64,
    /// Pages read from memory nodes.
    pub remote_reads: u64,
    /// READs posted for `remote_reads`.
    pub remote_read_trips: u64,
    /// Pages written to memory nodes.
    pub remote_writes: u64,
    /// WRITEs posted for `remote_writes`.
    pub remote_write_trips: u64,
    /// Pages that the front end wrote.
    pub written_pages: u64,
    /// Pages that the front end discarded.
    pub discarded_pages: u64,
    /// Pages that could not be read back.
    pub lost_pages: u64,
    /// Pages that were moved out of slabs that were being vacated.
    pub repacked_pages: u64,
    /// Slabs that were vacated.
    pub vacated_slabs: u64,
    /// Bytes that were copied to other memory nodes, because their nodes recall memory.
    pub moved_bytes: u64,
    /// Bytes of the mempool in use.
    pub mempool_bytes: u64,
    /// Bytes in use on memory nodes.
    pub remote_bytes: u64,
    /// The maximum of `remote_bytes` so far.
    pub remote_peak_bytes: u64,
    /// Latency of reads in nanoseconds: quantiles 0.5, 0.99 and 0.999.
    pub read_latency_ns: [u64; 3],
}

impl Counters {
    /// The present values. Fields without a counter are zero.
    pub(crate) fn stats(&self) -> VolumeStats {
        let load = |counter: &AtomicU64| counter.load(Relaxed);
        VolumeStats {
            zero_pages: load(&self.zero_pages),
            mempool_hits: load(&self.mempool_hits),
            staging_hits: load(&self.staging_hits),
            cache_hits: load(&self.cache_hits),
            remote_reads: load(&self.remote_reads),
            remote_read_trips: load(&self.remote_read_trips),
            remote_writes: load(&self.remote_writes),
            remote_write_trips: load(&self.remote_write_trips),
            written_pages: load(&self.written_pages),
            discarded_pages: load(&self.discarded_pages),
            lost_pages: load(&self.lost_pages),
            repacked_pages: load(&self.repacked_pages),
            vacated_slabs: load(&self.vacated_slabs),
            moved_bytes: load(&self.moved_bytes),
            ..VolumeStats::default()
        }
    }
}
