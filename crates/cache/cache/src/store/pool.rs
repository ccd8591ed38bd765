//! Requests to the thread that uses the pool: it copies runs there if memory is short, and fetches
//! items that are read.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use aquifer_latency::LatencyHistogram;
use parking_lot::{Condvar, Mutex};
use rustix::time::ClockId;

use super::log::RemoteItem;
use super::slot::Location;

/// If memory is short for longer than this, in milliseconds, runs are evicted.
const SHORT_TIMEOUT_MS: u64 = 100;

/// A run to copy to the pool.
#[derive(Debug)]
pub struct Spill {
    /// The partition.
    pub partition: usize,
    /// The run.
    pub run: u32,
    /// The serial number of the run.
    pub serial: u32,
    /// The filled bytes of the run.
    pub bytes: Vec<u8>,
    /// The items of the run that are in use.
    pub kept: Box<[RemoteItem]>,
}

/// An item to fetch from the pool.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Fetch {
    /// The partition.
    pub partition: usize,
    /// The location of the item before its run was moved to the pool.
    pub location: Location,
    /// The serial number of the run.
    pub serial: u32,
    /// The filled bytes of the run.
    pub fill: usize,
    /// The hash of the key for which the item is fetched.
    pub hash: u64,
}

/// Requests of threads to the pool, and counts of its use.
#[derive(Debug, Default)]
pub struct PoolQueue {
    state: Mutex<PoolState>,
    has_work: Condvar,
    /// Whether runs can be copied to the pool.
    accepts_runs: AtomicBool,
    /// The millisecond of the monotonic clock since which memory is short, or 0.
    short_since_ms: AtomicU64,
    /// The most bytes for which a write waits.
    wanted: AtomicU64,
    /// The millisecond of the monotonic clock at which the pending request to the pool began, or 0.
    pending_since_ms: AtomicU64,
    /// Milliseconds for which requests of clients wait for the pool.
    wait_ms: AtomicU64,
    /// Items that the runs in the pool had when they were copied.
    pub items: AtomicU64,
    /// Runs in the pool.
    pub runs: AtomicU64,
    /// Bytes of the pool that these runs use.
    pub bytes: AtomicU64,
    /// Items that were fetched.
    pub hits: AtomicU64,
    /// Items that the pool has lost.
    pub losses: AtomicU64,
    /// Times from the first request for an item to the end of its fetch. Written by one thread.
    pub times: LatencyHistogram,
}

#[derive(Debug, Default)]
struct PoolState {
    fetches: Vec<Fetch>,
    /// The items that are queued or being fetched, with the time at which each was queued.
    wanted: BTreeMap<(usize, u32, u32), Instant>,
    freed: Vec<u64>,
    is_short: bool,
    stops: bool,
}

/// Work for the thread that uses the pool.
#[derive(Debug, Default)]
pub struct PoolWork {
    /// Items to fetch.
    pub fetches: Vec<Fetch>,
    /// Places to free.
    pub freed: Vec<u64>,
    /// Whether memory is short, so that runs must be copied to the pool.
    pub is_short: bool,
    /// Whether the thread must end.
    pub stops: bool,
}

impl PoolQueue {
    /// Queues the fetch of an item, unless it is queued or being fetched.
    pub fn fetch(&self, fetch: Fetch) {
        let mut state = self.state.lock();
        if let Entry::Vacant(wanted) = state.wanted.entry(key_of(&fetch)) {
            wanted.insert(Instant::now());
            state.fetches.push(fetch);
            self.has_work.notify_one();
        }
    }

    /// Notes that an item was fetched, or cannot be. Returns the time since it was queued.
    pub fn fetched(&self, fetch: &Fetch) -> Duration {
        let began = self.state.lock().wanted.remove(&key_of(fetch));
        began.map_or(Duration::ZERO, |began| began.elapsed())
    }

    /// Frees a place in the pool.
    pub fn free(&self, place: u64) {
        self.state.lock().freed.push(place);
    }

    /// Whether the copies to the pool free memory fast enough, so that nothing must be evicted.
    pub fn is_keeping_up(&self) -> bool {
        let since_ms = self.short_since_ms.load(Ordering::Relaxed);
        let is_late = since_ms != 0 && now_ms().saturating_sub(since_ms) > SHORT_TIMEOUT_MS;
        self.accepts_runs.load(Ordering::Relaxed) && !is_late
    }

    /// Sets the time for which requests of clients wait for the pool.
    pub fn set_wait(&self, wait: Duration) {
        self.wait_ms.store(u64::try_from(wait.as_millis()).unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    /// Notes that a request to the pool begins, or that it has ended.
    pub fn set_request_pending(&self, is_pending: bool) {
        self.pending_since_ms.store(if is_pending { now_ms().max(1) } else { 0 }, Ordering::Relaxed);
    }

    /// Whether the pending request to the pool exceeds the wait time, so that clients do not wait.
    pub fn is_unresponsive(&self) -> bool {
        let since_ms = self.pending_since_ms.load(Ordering::Relaxed);
        since_ms != 0 && now_ms().saturating_sub(since_ms) > self.wait_ms.load(Ordering::Relaxed)
    }

    /// Sets whether runs can be copied to the pool.
    pub fn set_accepts_runs(&self, accepts_runs: bool) {
        self.accepts_runs.store(accepts_runs, Ordering::Relaxed);
    }

    /// Resets the time since which memory is short.
    pub fn clear_short(&self) {
        self.short_since_ms.store(0, Ordering::Relaxed);
    }

    /// The most bytes for which a write waits.
    pub fn wanted(&self) -> u64 {
        self.wanted.load(Ordering::Relaxed)
    }

    /// Resets the bytes for which writes wait to 0.
    pub fn clear_wanted(&self) {
        self.wanted.store(0, Ordering::Relaxed);
    }

    /// Notes that a write waits for `bytes`.
    pub fn note_wanted(&self, bytes: u64) {
        self.wanted.fetch_max(bytes, Ordering::Relaxed);
        self.note_short();
    }

    /// Takes the places that were freed since the previous call.
    pub fn freed(&self) -> Vec<u64> {
        std::mem::take(&mut self.state.lock().freed)
    }

    /// Notes that memory is short, and wakes the thread.
    pub fn note_short(&self) {
        let mut state = self.state.lock();
        if !state.is_short {
            state.is_short = true;
            let now_ms = now_ms().max(1);
            let _ = self.short_since_ms.compare_exchange(0, now_ms, Ordering::Relaxed, Ordering::Relaxed);
            self.has_work.notify_one();
        }
    }

    /// Stops the thread.
    pub fn stop(&self) {
        self.state.lock().stops = true;
        self.has_work.notify_one();
    }

    /// Waits for work for at most `time`; returns it, with at most `fetches_max` items to fetch.
    pub fn next(&self, time: Duration, fetches_max: usize) -> PoolWork {
        let is_idle = |state: &mut PoolState| state.fetches.is_empty() && !state.is_short && !state.stops;
        let mut state = self.state.lock();
        let _timeout = self.has_work.wait_while_for(&mut state, is_idle, time);
        let fetches = state.fetches.len().min(fetches_max);
        let fetches = state.fetches.drain(..fetches).collect();
        let freed = std::mem::take(&mut state.freed);
        let is_short = std::mem::take(&mut state.is_short);
        PoolWork { fetches, freed, is_short, stops: state.stops }
    }

    /// Counts an item that was fetched in this time. Only the thread that fetches may call this.
    pub fn count_hit(&self, time: Duration) {
        self.hits.fetch_add(1, Ordering::Relaxed);
        self.times.record(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX));
    }
}

fn now_ms() -> u64 {
    let now = rustix::time::clock_gettime(ClockId::MonotonicCoarse);
    now.tv_sec.unsigned_abs() * 1000 + now.tv_nsec.unsigned_abs() / 1_000_000
}

fn key_of(fetch: &Fetch) -> (usize, u32, u32) {
    (fetch.partition, fetch.location.run, fetch.location.offset)
}
