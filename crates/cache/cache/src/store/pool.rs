//! What a store has in the pool: runs that had no room here. A thread copies them there, and
//! fetches items that are read.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use aquifer_latency::LatencyHistogram;
use parking_lot::{Condvar, Mutex};
use rustix::time::ClockId;

use super::log::RemoteItem;
use super::slot::Location;

/// If memory is short for longer, runs are evicted.
const SHORT_TIMEOUT_MS: u64 = 100;

/// A run that is to be copied to the pool.
#[derive(Debug)]
pub struct Spill {
    /// The partition.
    pub partition: usize,
    /// The run.
    pub run: u32,
    /// Its serial number.
    pub serial: u32,
    /// Its bytes.
    pub bytes: Vec<u8>,
    /// The items of it that are in use.
    pub kept: Box<[RemoteItem]>,
}

/// An item that is to be fetched from the pool.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Fetch {
    /// The partition.
    pub partition: usize,
    /// Where the item was.
    pub location: Location,
    /// The serial number of the run.
    pub serial: u32,
    /// Bytes of the run.
    pub fill: usize,
    /// The hash of the key for which it is fetched.
    pub hash: u64,
}

/// What threads ask of the pool.
#[derive(Debug, Default)]
pub struct PoolQueue {
    state: Mutex<PoolState>,
    has_work: Condvar,
    /// Whether runs can be copied to the pool.
    accepts_runs: AtomicBool,
    /// Since which millisecond of the system's clock memory is short, or 0.
    short_since_ms: AtomicU64,
    /// The most bytes that a write waits for.
    wanted: AtomicU64,
    /// Since which millisecond of the system's clock the pool has not answered, or 0.
    pending_since_ms: AtomicU64,
    /// Milliseconds for which requests wait for an answer of the pool.
    wait_ms: AtomicU64,
    /// Items that the runs in the pool had when they left.
    pub items: AtomicU64,
    /// Runs in the pool.
    pub runs: AtomicU64,
    /// Bytes that the pool has for them.
    pub bytes: AtomicU64,
    /// Items that were fetched.
    pub hits: AtomicU64,
    /// Items that the pool has lost.
    pub losses: AtomicU64,
    /// Times from the first request for an item to its return. One thread writes them.
    pub times: LatencyHistogram,
}

#[derive(Debug, Default)]
struct PoolState {
    fetches: Vec<Fetch>,
    /// What is queued or being fetched, and since when.
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
    /// Places that are free.
    pub freed: Vec<u64>,
    /// Whether memory is short, so that runs are to be copied to the pool.
    pub is_short: bool,
    /// Whether the thread is to end.
    pub stops: bool,
}

impl PoolQueue {
    /// Has an item fetched, unless it is being fetched.
    pub fn fetch(&self, fetch: Fetch) {
        let mut state = self.state.lock();
        if let Entry::Vacant(wanted) = state.wanted.entry(key_of(&fetch)) {
            wanted.insert(Instant::now());
            state.fetches.push(fetch);
            self.has_work.notify_one();
        }
    }

    /// Notes that an item was fetched, or cannot be. Returns how long that was waited for.
    pub fn fetched(&self, fetch: &Fetch) -> Duration {
        let began = self.state.lock().wanted.remove(&key_of(fetch));
        began.map_or(Duration::ZERO, |began| began.elapsed())
    }

    /// Frees a place in the pool.
    pub fn free(&self, place: u64) {
        self.state.lock().freed.push(place);
    }

    /// Whether memory will soon be free because runs are copied to the pool, so that nothing is to
    /// be evicted.
    pub fn is_keeping_up(&self) -> bool {
        let since_ms = self.short_since_ms.load(Ordering::Relaxed);
        let is_late = since_ms != 0 && now_ms().saturating_sub(since_ms) > SHORT_TIMEOUT_MS;
        self.accepts_runs.load(Ordering::Relaxed) && !is_late
    }

    /// Sets the time for which requests wait for an answer of the pool.
    pub fn set_wait(&self, wait: Duration) {
        self.wait_ms.store(u64::try_from(wait.as_millis()).unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    /// Says that the pool is asked for something, or that it has answered.
    pub fn set_request_pending(&self, is_pending: bool) {
        self.pending_since_ms.store(if is_pending { now_ms().max(1) } else { 0 }, Ordering::Relaxed);
    }

    /// Whether the pool has not answered for so long that requests do not wait for it.
    pub fn is_unresponsive(&self) -> bool {
        let since_ms = self.pending_since_ms.load(Ordering::Relaxed);
        since_ms != 0 && now_ms().saturating_sub(since_ms) > self.wait_ms.load(Ordering::Relaxed)
    }

    /// Says whether runs can be copied to the pool.
    pub fn set_accepts_runs(&self, accepts_runs: bool) {
        self.accepts_runs.store(accepts_runs, Ordering::Relaxed);
    }

    /// Says that so much as could be was copied.
    pub fn clear_short(&self) {
        self.short_since_ms.store(0, Ordering::Relaxed);
    }

    /// The most bytes for which a write waits.
    pub fn wanted(&self) -> u64 {
        self.wanted.load(Ordering::Relaxed)
    }

    /// Says that there is as much memory as writes wait for.
    pub fn clear_wanted(&self) {
        self.wanted.store(0, Ordering::Relaxed);
    }

    /// Says that a write waits for so many bytes.
    pub fn note_wanted(&self, bytes: u64) {
        self.wanted.fetch_max(bytes, Ordering::Relaxed);
        self.note_short();
    }

    /// Places that were freed since they were last asked for.
    pub fn freed(&self) -> Vec<u64> {
        std::mem::take(&mut self.state.lock().freed)
    }

    /// Says that memory is short.
    pub fn note_short(&self) {
        let mut state = self.state.lock();
        if !state.is_short {
            state.is_short = true;
            let now_ms = now_ms().max(1);
            let _ = self.short_since_ms.compare_exchange(0, now_ms, Ordering::Relaxed, Ordering::Relaxed);
            self.has_work.notify_one();
        }
    }

    /// Ends the thread.
    pub fn stop(&self) {
        self.state.lock().stops = true;
        self.has_work.notify_one();
    }

    /// The next work, with at most so many items to fetch; waits for it for at most this time.
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

    /// Counts an item that came from the pool after this time. Only the thread that fetches may
    /// call this.
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
