//! The layout of a partition's memory.
//!
//! | part | bytes |
//! |---|---|
//! | header | one page |
//! | table of runs | 64 for each run |
//! | buckets of the index | 64 each |
//! | overflow buckets of the index | 64 each |
//! | runs of the log | 64 KiB each |
//!
//! All parts have their greatest size from the start. Memory that was never written is zero and
//! uses no pages.

use super::index::{BUCKET_BYTES, IndexLayout, IndexState};
use super::memory::PAGE_BYTES;
use super::slot::{BUCKET_BITS_MAX, RUN_BYTES, RUNS_MAX, TAG_LOW_BIT};

/// Bytes of an entry in the table of runs.
pub const RUN_ENTRY_BYTES: usize = 64;
/// Bytes of the limit for each bucket of the largest index: at six items per bucket, items of 21
/// bytes.
const LOG_BYTES_PER_BUCKET: usize = 128;
/// The runs of the log have this many times the limit in addresses, so that long items find a gap.
const ADDRESSES_PER_BYTE: usize = 4;

/// Words of the header, as offsets in bytes.
pub mod header {
    /// [`super::MAGIC`], if the memory is complete: nothing uses it, and it can be adopted.
    pub const MAGIC: usize = 0;
    /// Runs of the log.
    pub const RUNS: usize = 8;
    /// Most buckets of the index.
    pub const BUCKETS_MAX: usize = 16;
    /// The partition's number, and the number of partitions.
    pub const PARTITION: usize = 24;
    /// Whether items have cas numbers.
    pub const HAS_CAS: usize = 32;
    /// The last cas number.
    pub const CAS: usize = 40;
    /// The number of items.
    pub const ITEMS: usize = 48;
    /// The second of the cache's clock at which the memory was completed.
    pub const SECOND: usize = 56;
    /// Buckets of the index.
    pub const BUCKETS: usize = 64;
    /// Overflow buckets ever used.
    pub const OVERFLOW_COUNT: usize = 72;
    /// The list of free overflow buckets.
    pub const OVERFLOW_FREE: usize = 80;
    /// The second since 1970 at which the memory was completed.
    pub const UNIX_SECOND: usize = 88;
    /// The secret of the hash of keys, in two words.
    pub const HASH_SECRET: usize = 96;
    /// The checksum of the words before it.
    pub const CHECKSUM: usize = 112;
}

/// The first word of memory that is complete.
pub const MAGIC: u64 = u64::from_le_bytes(*b"AQCACHE\x02");

/// The layout of a partition's memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Layout {
    /// Runs of the log, including the first, which is not used.
    pub runs: usize,
    buckets: usize,
    overflow: usize,
}

impl Layout {
    /// The layout of a partition that can use the whole limit of a server, in bytes.
    #[must_use]
    pub fn for_limit(limit: u64) -> Self {
        let limit = usize::try_from(limit).unwrap_or(usize::MAX).max(1 << 20);
        let runs = (limit.saturating_mul(ADDRESSES_PER_BYTE) / RUN_BYTES + 2).min(RUNS_MAX);
        let buckets = (limit / LOG_BYTES_PER_BUCKET).next_power_of_two().min(1 << BUCKET_BITS_MAX);
        Self { runs, buckets, overflow: buckets }
    }

    /// A layout with these numbers of runs and of buckets, if they are valid.
    #[must_use]
    pub fn of_parts(runs: usize, buckets: usize) -> Option<Self> {
        let is_possible = (2..=RUNS_MAX).contains(&runs)
            && (1 << TAG_LOW_BIT..=1 << BUCKET_BITS_MAX).contains(&buckets)
            && buckets.is_power_of_two();
        is_possible.then_some(Self { runs, buckets, overflow: buckets })
    }

    /// Whether a partition with these runs and this index fits in this layout.
    #[must_use]
    pub fn fits(&self, runs_end: u32, index: IndexState) -> bool {
        runs_end as usize <= self.runs
            && (1 << TAG_LOW_BIT..=self.buckets as u64).contains(&index.buckets)
            && index.overflow_buckets <= self.overflow as u64
            && index.overflow_free <= index.overflow_buckets
    }

    /// The first byte of the buckets, and that of the overflow buckets.
    #[must_use]
    pub fn index_starts(&self) -> [usize; 2] {
        [self.buckets_start(), self.overflow_start()]
    }

    /// Most buckets of the index.
    #[must_use]
    pub fn buckets_max(&self) -> usize {
        self.buckets
    }

    /// Bytes of the memory.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.log() + self.runs * RUN_BYTES
    }

    /// The entry of a run in the table.
    #[inline]
    #[must_use]
    pub fn run_entry(&self, run: u32) -> usize {
        PAGE_BYTES + run as usize * RUN_ENTRY_BYTES
    }

    /// The first byte of a run.
    #[inline]
    #[must_use]
    pub fn run(&self, run: u32) -> usize {
        self.log() + run as usize * RUN_BYTES
    }

    /// The layout of the index.
    #[must_use]
    pub fn index(&self) -> IndexLayout {
        IndexLayout {
            count: header::BUCKETS / 8,
            overflow_count: header::OVERFLOW_COUNT / 8,
            overflow_free: header::OVERFLOW_FREE / 8,
            buckets: self.buckets_start() / 8,
            buckets_max: self.buckets,
            overflow: self.overflow_start() / 8,
            overflow_max: self.overflow,
        }
    }

    fn buckets_start(&self) -> usize {
        (PAGE_BYTES + self.runs * RUN_ENTRY_BYTES).next_multiple_of(PAGE_BYTES)
    }

    fn overflow_start(&self) -> usize {
        self.buckets_start() + self.buckets * BUCKET_BYTES
    }

    fn log(&self) -> usize {
        (self.overflow_start() + self.overflow * BUCKET_BYTES).next_multiple_of(PAGE_BYTES)
    }
}
