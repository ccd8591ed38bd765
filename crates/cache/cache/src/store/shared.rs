//! The state that the partitions of a store share.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

use super::budget::Budget;
use super::epochs::Epochs;
use super::hash::KeyHasher;
use super::pool::PoolQueue;
use super::runs::Queue;
use super::slot::RUN_BYTES;
use super::{LIMIT_MIN, StoreOptions};

/// A partition keeps the pages of evicted runs if the limit has room for at least this many runs in
/// each partition.
const RUNS_TO_KEEP_PAGES: u64 = 64;
/// Difference of the sequences of two runs that were opened in succession. Cleaned runs have
/// sequences in between.
const SEQUENCE_STEP: u64 = 64;
/// The first sequence. Runs that arrive from other servers may have sequences before it.
const SEQUENCE_FIRST: u64 = 1 << 40;
/// Runs of the probation queue are evicted if the queue has more than 1/`PROBATION_DIVISOR` of the
/// memory, and runs of the main queue otherwise.
const PROBATION_DIVISOR: u64 = 10;

/// Counts of removed items.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Removed {
    /// Items that were removed to free memory.
    pub evicted: u64,
    /// Evicted items that no client had read.
    pub evicted_unfetched: u64,
    /// Items that were removed after they had expired.
    pub expired: u64,
    /// Expired items that no client had read.
    pub expired_unfetched: u64,
}

impl Removed {
    /// The items that were removed since an earlier count.
    #[must_use]
    pub fn since(&self, earlier: &Self) -> Self {
        Self {
            evicted: self.evicted - earlier.evicted,
            evicted_unfetched: self.evicted_unfetched - earlier.evicted_unfetched,
            expired: self.expired - earlier.expired,
            expired_unfetched: self.expired_unfetched - earlier.expired_unfetched,
        }
    }
}

/// Numbers of partitions with pending work, each at most once.
#[derive(Debug, Default)]
pub(super) struct PendingPartitions(Mutex<BTreeSet<usize>>);

impl PendingPartitions {
    pub(super) fn note(&self, number: usize) {
        self.0.lock().insert(number);
    }

    pub(super) fn next(&self) -> Option<usize> {
        self.0.lock().pop_first()
    }

    pub(super) fn drain(&self) -> BTreeSet<usize> {
        std::mem::take(&mut *self.0.lock())
    }
}

/// The reason why a write was refused.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Refusal {
    /// The write must be retried.
    Again(Until),
    /// There is no memory, and none can be freed.
    Full,
    /// The partition with this number is not on this server, or the thread may not serve it now.
    Elsewhere(usize),
}

/// The event for which a request waits before it is retried.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Until {
    /// The next turn of the worker: replies must be sent first, or threads must end their turns
    /// before memory is free.
    NextTurn,
    /// The end of a fetch from the pool, which wakes the worker.
    Fetched,
}

/// The state that the partitions of a store share.
#[derive(Debug)]
pub struct Shared {
    pub(super) budget: Budget,
    pub(super) epochs: Epochs,
    pub(super) has_cas: bool,
    /// The hash of keys.
    pub(super) hasher: KeyHasher,
    /// Whether items are evicted if the memory is full.
    pub(super) evicts: bool,
    /// Whether a partition keeps the pages of the runs that it evicts.
    pub(super) keeps_pages: bool,
    /// Bytes of the runs of each queue.
    pub(super) queue_bytes: [AtomicU64; 2],
    /// Difference of successive cas numbers in a partition. Each partition has another remainder,
    /// so that no two items have the same number.
    pub(super) cas_step: u64,
    pub(super) sequence: AtomicU64,
    /// Requests to the thread that uses the pool.
    pub(super) pool: PoolQueue,
    /// Partitions that have retired runs.
    pub(super) retired_in: PendingPartitions,
    /// Partitions that have cleanable runs.
    pub(super) cleanable_in: PendingPartitions,
    /// The age of the items of the run that was evicted last.
    pub(super) evicted_age_s: AtomicU64,
    pub(super) evicted: AtomicU64,
    pub(super) evicted_unfetched: AtomicU64,
    pub(super) expired: AtomicU64,
    pub(super) expired_unfetched: AtomicU64,
}

impl Shared {
    pub(super) fn new(options: &StoreOptions) -> Self {
        let limit = options.limit.max(LIMIT_MIN);
        Self {
            budget: Budget::new(limit),
            epochs: Epochs::new(options.threads),
            has_cas: options.has_cas,
            hasher: options.hasher,
            evicts: options.evicts,
            keeps_pages: limit / RUN_BYTES as u64 >= RUNS_TO_KEEP_PAGES * options.partitions as u64,
            queue_bytes: [AtomicU64::new(0), AtomicU64::new(0)],
            cas_step: options.partitions as u64,
            sequence: AtomicU64::new(SEQUENCE_FIRST),
            pool: PoolQueue::default(),
            retired_in: PendingPartitions::default(),
            cleanable_in: PendingPartitions::default(),
            evicted_age_s: AtomicU64::new(0),
            evicted: AtomicU64::new(0),
            evicted_unfetched: AtomicU64::new(0),
            expired: AtomicU64::new(0),
            expired_unfetched: AtomicU64::new(0),
        }
    }

    pub(super) fn next_sequence(&self) -> u64 {
        self.sequence.fetch_add(SEQUENCE_STEP, Ordering::Relaxed)
    }

    /// Makes all later sequences greater than `last`.
    pub(super) fn advance_sequence(&self, last: u64) {
        self.sequence.fetch_max(last.next_multiple_of(SEQUENCE_STEP) + SEQUENCE_STEP, Ordering::Relaxed);
    }

    pub(super) fn charge_queue(&self, queue: Queue, bytes: usize) {
        self.queue_bytes[queue as usize].fetch_add(bytes as u64, Ordering::Relaxed);
    }

    pub(super) fn free_queue(&self, queue: Queue, bytes: usize) {
        self.queue_bytes[queue as usize].fetch_sub(bytes as u64, Ordering::Relaxed);
    }

    /// Bytes of the budget that no eviction frees, such as those of the index.
    pub(super) fn fixed_bytes(&self) -> u64 {
        let queues = self.queue_bytes.iter().map(|bytes| bytes.load(Ordering::Relaxed)).sum::<u64>();
        self.budget.kept().saturating_sub(queues)
    }

    /// The queue from which the next run is evicted.
    pub(super) fn queue_to_evict(&self) -> Queue {
        let probation = self.queue_bytes[Queue::Probation as usize].load(Ordering::Relaxed);
        if probation > self.budget.limit() / PROBATION_DIVISOR { Queue::Probation } else { Queue::Main }
    }

    pub(super) fn note_evicted_age(&self, age_s: u32) {
        self.evicted_age_s.store(u64::from(age_s), Ordering::Relaxed);
    }

    pub(super) fn count_expired(&self, was_fetched: bool) {
        self.expired.fetch_add(1, Ordering::Relaxed);
        self.expired_unfetched.fetch_add(u64::from(!was_fetched), Ordering::Relaxed);
    }

    pub(super) fn count_evicted(&self, was_fetched: bool) {
        self.evicted.fetch_add(1, Ordering::Relaxed);
        self.evicted_unfetched.fetch_add(u64::from(!was_fetched), Ordering::Relaxed);
    }
}
