//! Counters of a thread. Each thread has its own, so that threads share no cache line.

use std::sync::atomic::{AtomicU64, Ordering};

use aquifer_latency::LatencyHistogram;

/// A counter that one thread writes and others read.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    /// Adds to the counter. Must be called by the thread that owns it.
    #[inline]
    pub fn add(&self, count: u64) {
        self.0.store(self.0.load(Ordering::Relaxed).wrapping_add(count), Ordering::Relaxed);
    }

    /// The value.
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

macro_rules! counters {
    ($($(#[$about:meta])* $name:ident,)*) => {
        /// Counters of a thread.
        #[derive(Debug, Default)]
        #[repr(align(128))]
        pub struct Counters {
            $($(#[$about])* pub $name: Counter,)*
            /// Requests for the keys of each partition.
            requests: Box<[Counter]>,
            /// Latencies of hits that needed no item of the pool. Measured if there is a pool.
            pub local_times: LatencyHistogram,
        }

        /// Sums of the counters of all threads.
        #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
        pub struct Sums {
            $($(#[$about])* pub $name: u64,)*
        }

        impl Sums {
            /// Adds the counters of a thread.
            pub fn add(&mut self, counters: &Counters) {
                $(self.$name = self.$name.wrapping_add(counters.$name.get());)*
            }

            /// The differences from earlier sums.
            #[must_use]
            pub fn since(&self, earlier: &Self) -> Self {
                Self { $($name: self.$name.wrapping_sub(earlier.$name),)* }
            }
        }
    };
}

impl Counters {
    /// Counters for a store with this many partitions.
    #[must_use]
    pub fn new(partitions: usize) -> Self {
        let requests = (0..partitions).map(|_| Counter::default()).collect();
        Self { requests, ..Self::default() }
    }

    /// Counts a request for a key of a partition.
    #[inline]
    pub fn count_request(&self, partition: usize) {
        if let Some(requests) = self.requests.get(partition) {
            requests.add(1);
        }
    }

    /// The number of requests for the keys of a partition.
    #[must_use]
    pub fn requests(&self, partition: usize) -> u64 {
        self.requests.get(partition).map_or(0, Counter::get)
    }
}

counters! {
    /// Keys that clients read and whose item was found.
    get_hits,
    /// Hits of requests that have waited for items of the pool.
    fetched_hits,
    /// Keys that clients read and whose item is missing.
    get_misses,
    /// Misses of keys whose item had expired.
    get_expired,
    /// Misses of keys whose item was flushed.
    get_flushed,
    /// Storage commands.
    cmd_set,
    /// Items stored.
    total_items,
    /// Commands `touch`, `gat` and `gats`, for each key.
    cmd_touch,
    /// Touched items.
    touch_hits,
    /// Keys to touch that are missing.
    touch_misses,
    /// Commands `flush_all`.
    cmd_flush,
    /// Meta commands.
    cmd_meta,
    /// Items deleted.
    delete_hits,
    /// Keys to delete that are missing.
    delete_misses,
    /// Counters increased.
    incr_hits,
    /// Counters to increase that are missing.
    incr_misses,
    /// Counters decreased.
    decr_hits,
    /// Counters to decrease that are missing.
    decr_misses,
    /// Commands `cas` that stored an item.
    cas_hits,
    /// Commands `cas` whose key is missing.
    cas_misses,
    /// Commands `cas` with another cas number than the item's.
    cas_badval,
    /// Attempts to authenticate.
    auth_cmds,
    /// Attempts to authenticate that failed.
    auth_errors,
    /// Items refused because they are too large.
    store_too_large,
    /// Items refused for lack of memory.
    store_no_memory,
    /// Bytes received from clients.
    bytes_read,
    /// Bytes sent to clients.
    bytes_written,
    /// Keys that were read as missing because no server may answer for their partition.
    partition_misses,
    /// Commands that have failed because no server may answer for a partition.
    partition_errors,
    /// Turns that ended at the limit of requests of a connection.
    conn_yields,
    /// Connections closed because they were idle.
    idle_kicks,
}
