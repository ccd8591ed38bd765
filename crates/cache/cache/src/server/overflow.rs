//! The thread that uses the pool: it copies runs there if memory is short, and fetches items that
//! are read.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::Common;
use super::dealing::WorkerHandle;
use crate::store::item;
use crate::store::pool::{Fetch, Spill};

/// Longest wait for work.
const IDLE_TIMEOUT: Duration = Duration::from_millis(100);
/// The time after a failure during which no run is copied to the pool; runs are evicted instead.
const FAILURE_RETRY_INTERVAL: Duration = Duration::from_secs(1);
/// Bytes of runs that are copied in one batch.
const SPILL_BYTES: u64 = 1 << 20;
/// Bytes of runs that are copied in one batch while items are fetched, because fetches wait for it.
const SPILL_BESIDE_FETCHES_BYTES: u64 = 64 << 10;
/// The time after a fetch during which further fetches are likely, so that batches stay small.
const FETCH_BURST_TIMEOUT: Duration = Duration::from_millis(10);
/// A batch has at most 1/`SPILL_POOL_DIVISOR` of the bytes of the pool.
const SPILL_POOL_DIVISOR: u64 = 4;
/// Bytes that the first read of an item fetches.
const FETCH_BYTES: usize = 4096;
/// Most items that are fetched at a time.
const FETCHES_MAX: usize = 64;

/// Volatile remote memory. Losing its contents loses cached items only.
pub trait RemoteMemory: fmt::Debug + Send {
    /// Stores runs; returns the place of each.
    ///
    /// # Errors
    /// If there is no room for all runs. None is stored then.
    fn store(&mut self, runs: &[&[u8]]) -> Result<Vec<u64>, RemoteError>;

    /// Reads stored bytes, and sets [`RemoteRead::is_done`] of each read that succeeded.
    fn read(&mut self, reads: &mut [RemoteRead<'_>]);

    /// Frees places.
    fn free(&mut self, places: &[u64]);

    /// Bytes of remote memory that a run of this length uses.
    fn bytes_of(&self, len: usize) -> u64;
}

/// A read of stored bytes.
#[derive(Debug)]
pub struct RemoteRead<'a> {
    /// The place.
    pub place: u64,
    /// The offset in the place.
    pub offset: usize,
    /// The buffer for the bytes.
    pub out: &'a mut [u8],
    /// Whether the bytes were read.
    pub is_done: bool,
}

/// The reason why bytes cannot be stored.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{0}")]
pub struct RemoteError(pub String);

/// The state of the thread that uses the pool.
#[derive(Debug)]
pub(super) struct Overflow {
    memory: Box<dyn RemoteMemory>,
    common: Arc<Common>,
    workers: Vec<Arc<WorkerHandle>>,
    bytes_max: u64,
    bytes: u64,
    /// Bytes of remote memory of each place.
    places: HashMap<u64, u64>,
    failed: Option<Instant>,
    /// The time of the last fetch.
    fetched: Option<Instant>,
    has_warned: bool,
}

impl Overflow {
    pub fn new(
        memory: Box<dyn RemoteMemory>,
        common: Arc<Common>,
        workers: Vec<Arc<WorkerHandle>>,
        bytes_max: u64,
    ) -> Self {
        Self {
            memory,
            common,
            workers,
            bytes_max,
            bytes: 0,
            places: HashMap::new(),
            failed: None,
            fetched: None,
            has_warned: false,
        }
    }

    /// Executes work until the server stops.
    pub fn run(mut self) {
        let _closing = PoolCloser(Arc::clone(&self.common));
        self.common.store.pool().set_accepts_runs(true);
        loop {
            let work = self.common.store.pool().next(IDLE_TIMEOUT, FETCHES_MAX);
            self.free(&work.freed);
            if work.stops {
                return;
            }
            if !work.fetches.is_empty() {
                self.fetch(&work.fetches);
                self.fetched = Some(Instant::now());
            }
            if work.is_short {
                self.spill();
            }
        }
    }

    /// Calls the pool. Meanwhile a request is marked as pending, so that clients can stop waiting.
    fn call_pool<T>(&mut self, ask: impl FnOnce(&mut dyn RemoteMemory) -> T) -> T {
        let pool = self.common.store.pool();
        pool.set_request_pending(true);
        let answer = ask(&mut *self.memory);
        pool.set_request_pending(false);
        answer
    }

    fn free(&mut self, places: &[u64]) {
        for place in places {
            self.bytes -= self.places.remove(place).unwrap_or(0);
        }
        if !places.is_empty() {
            self.call_pool(|memory| memory.free(places));
            self.report();
        }
    }

    fn report(&self) {
        let pool = self.common.store.pool();
        pool.runs.store(self.places.len() as u64, Ordering::Relaxed);
        pool.bytes.store(self.bytes, Ordering::Relaxed);
    }

    /// Copies a batch of runs to the pool, and wakes the workers.
    fn spill(&mut self) {
        if self.failed.is_some_and(|failed| failed.elapsed() < FAILURE_RETRY_INTERVAL) {
            let pool = self.common.store.pool();
            pool.clear_wanted();
            pool.clear_short();
            return;
        }
        self.spill_batch();
        let pool = self.common.store.pool();
        pool.clear_short();
        pool.set_accepts_runs(self.failed.is_none());
        self.common.store.collect_retired();
        // Writes may wait for memory.
        self.workers.iter().for_each(|worker| worker.wake());
    }

    fn spill_batch(&mut self) {
        let store = &self.common.store;
        let now_s = self.common.clock.now_s();
        while store.has_too_many_remote_items() && store.evict_from_pool() {}
        let fetches = self.fetched.is_some_and(|fetched| fetched.elapsed() < FETCH_BURST_TIMEOUT);
        let bytes_max = if fetches { SPILL_BESIDE_FETCHES_BYTES } else { SPILL_BYTES };
        let bytes_max = bytes_max.min(self.bytes_max / SPILL_POOL_DIVISOR);
        let (mut spills, mut bytes) = (Vec::new(), 0);
        while bytes < bytes_max
            && let Some(spill) = store.next_spill(now_s)
        {
            bytes += spill.bytes.len() as u64;
            spills.push(spill);
        }
        if spills.is_empty() {
            if !store.is_short() {
                store.pool().clear_wanted();
            }
            if store.is_short_of_runs() {
                // No run can be copied: runs must be evicted.
                self.failed = Some(Instant::now());
            }
            return;
        }
        let stored = self.make_room(&spills).and_then(|()| {
            let runs: Vec<&[u8]> = spills.iter().map(|spill| &spill.bytes[..]).collect();
            self.call_pool(|memory| memory.store(&runs))
        });
        let places = match stored {
            Ok(places) => places,
            Err(error) => {
                if !std::mem::replace(&mut self.has_warned, true) {
                    tracing::warn!(%error, "the pool has no room for items; they are evicted instead");
                }
                self.failed = Some(Instant::now());
                spills.iter().for_each(|spill| self.common.store.cancel_spill(spill));
                return;
            }
        };
        self.failed = None;
        if std::mem::take(&mut self.has_warned) {
            tracing::info!("the pool has room again");
        }
        let mut unneeded = Vec::new();
        for (spill, place) in spills.into_iter().zip(places) {
            let bytes = self.memory.bytes_of(spill.bytes.len());
            self.bytes += bytes;
            self.places.insert(place, bytes);
            if !self.common.store.finish_spill(spill, place) {
                unneeded.push(place);
            }
        }
        self.free(&unneeded);
        self.report();
        // More runs may have to be copied; pending fetches come first.
        self.common.store.pool().note_short();
    }

    /// Evicts old runs from the pool until it has room for these.
    fn make_room(&mut self, spills: &[Spill]) -> Result<(), RemoteError> {
        let wanted: u64 = spills.iter().map(|spill| self.memory.bytes_of(spill.bytes.len())).sum();
        if wanted > self.bytes_max {
            return Err(RemoteError("the pool is smaller than an item, or a few runs of items".to_owned()));
        }
        while self.bytes + wanted > self.bytes_max {
            if !self.common.store.evict_from_pool() {
                return Err(RemoteError("no run in the pool can be evicted".to_owned()));
            }
            let freed = self.common.store.pool().freed();
            self.free(&freed);
        }
        Ok(())
    }

    fn fetch(&mut self, fetches: &[Fetch]) {
        let store = &self.common.store;
        let places: Vec<Option<u64>> = fetches.iter().map(|fetch| store.place_in_pool(fetch)).collect();
        let mut buffers: Vec<Vec<u8>> = fetches
            .iter()
            .map(|fetch| vec![0; FETCH_BYTES.min(fetch.fill - fetch.location.offset as usize)])
            .collect();
        let are_done = self.read(fetches, &places, &mut buffers, 0);
        for (at, fetch) in fetches.iter().enumerate() {
            let mut buffer = std::mem::take(&mut buffers[at]);
            let is_done = are_done[at] && self.complete(fetch, places[at], &mut buffer);
            // An item without a place was removed meanwhile.
            let has_returned = places[at].is_some() && self.fetched(fetch, is_done.then_some(&buffer));
            let pool = self.common.store.pool();
            let time = pool.fetched(fetch);
            if has_returned {
                pool.count_hit(time);
            }
        }
        self.workers.iter().for_each(|worker| worker.wake());
    }

    /// Truncates the read bytes to the length of the item, or reads the remaining bytes of the
    /// item; returns whether the buffer has a whole item.
    fn complete(&mut self, fetch: &Fetch, place: Option<u64>, buffer: &mut Vec<u8>) -> bool {
        let len = item_len(buffer).filter(|len| *len <= fetch.fill - fetch.location.offset as usize);
        let Some(len) = len else { return false };
        let read = buffer.len();
        buffer.resize(len, 0);
        len <= read || self.read(&[*fetch], &[place], std::slice::from_mut(buffer), read)[0]
    }

    /// Stores an item that was read, or removes the run of one that could not be. Returns whether
    /// it was read.
    fn fetched(&self, fetch: &Fetch, item: Option<&Vec<u8>>) -> bool {
        let store = &self.common.store;
        if let Some(item) = item {
            store.bring_back(fetch, item, self.common.clock.now_s());
        } else {
            store.lose(fetch);
            store.pool().losses.fetch_add(1, Ordering::Relaxed);
        }
        item.is_some()
    }

    /// Reads the bytes of each buffer from offset `from` on. Returns whether each was read.
    fn read(
        &mut self,
        fetches: &[Fetch],
        places: &[Option<u64>],
        buffers: &mut [Vec<u8>],
        from: usize,
    ) -> Vec<bool> {
        let mut ats = Vec::new();
        let mut reads = Vec::new();
        for ((at, place), buffer) in places.iter().enumerate().zip(buffers) {
            if let Some(place) = place {
                let offset = fetches[at].location.offset as usize + from;
                reads.push(RemoteRead { place: *place, offset, out: &mut buffer[from..], is_done: false });
                ats.push(at);
            }
        }
        self.call_pool(|memory| memory.read(&mut reads));
        let mut are_done = vec![false; fetches.len()];
        for (at, read) in ats.into_iter().zip(reads) {
            are_done[at] = read.is_done;
        }
        are_done
    }
}

/// Closes the queue of the pool when the thread ends, so that no request waits for the thread.
struct PoolCloser(Arc<Common>);

impl Drop for PoolCloser {
    fn drop(&mut self) {
        let store = &self.0.store;
        store.pool().set_accepts_runs(false);
        if std::thread::panicking() {
            // The items in the pool cannot be fetched any more.
            while store.evict_from_pool() {}
        }
    }
}

/// The length of the item that begins with these bytes; `None` if they are too few or invalid.
fn item_len(bytes: &[u8]) -> Option<usize> {
    let prefix = bytes.get(..item::PREFIX_BYTES)?;
    if !(1..=item::KEY_MAX).contains(&item::key_len(prefix)) {
        return None;
    }
    if !item::has_long_value(prefix) {
        return Some(item::len(prefix));
    }
    bytes.get(..item::LONG_PREFIX_BYTES).map(item::len)
}
