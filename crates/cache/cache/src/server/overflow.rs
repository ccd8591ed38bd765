//! The thread that uses the pool: copies runs there that have no room here, and fetches items that
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

/// Longest pause without work.
const IDLE_TIMEOUT: Duration = Duration::from_millis(100);
/// After a failure no run is copied to the pool for so long; runs are evicted instead.
const FAILURE_RETRY_INTERVAL: Duration = Duration::from_secs(1);
/// Runs are copied at a time until they have so many bytes.
const SPILL_BYTES: u64 = 1 << 20;
/// Fewer are copied while items are fetched, which wait meanwhile.
const SPILL_BESIDE_FETCHES_BYTES: u64 = 64 << 10;
/// Fetches are likely to come so soon after others.
const FETCH_BURST_TIMEOUT: Duration = Duration::from_millis(10);
/// At most one part in so many of the pool is copied at a time.
const SPILL_POOL_DIVISOR: u64 = 4;
/// Bytes of an item that are fetched at first.
const FETCH_BYTES: usize = 4096;
/// Items that are fetched at a time.
const FETCHES_MAX: usize = 64;

/// Memory elsewhere that outlives nothing: what is lost is a missing item.
pub trait RemoteMemory: fmt::Debug + Send {
    /// Stores bytes; returns the places where they are.
    ///
    /// # Errors
    /// If there is no room for all of them. None is stored then.
    fn store(&mut self, runs: &[&[u8]]) -> Result<Vec<u64>, RemoteError>;

    /// Reads bytes that were stored. Each read says by itself whether it was done.
    fn read(&mut self, reads: &mut [RemoteRead<'_>]);

    /// Frees places.
    fn free(&mut self, places: &[u64]);

    /// Bytes of memory that something of this length has there.
    fn bytes_of(&self, len: usize) -> u64;
}

/// Bytes that are to be read.
#[derive(Debug)]
pub struct RemoteRead<'a> {
    /// The place.
    pub place: u64,
    /// The offset in it.
    pub offset: usize,
    /// Where the bytes go.
    pub out: &'a mut [u8],
    /// Whether they were read.
    pub is_done: bool,
}

/// Why bytes cannot be stored.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{0}")]
pub struct RemoteError(pub String);

/// The thread's state.
#[derive(Debug)]
pub(super) struct Overflow {
    memory: Box<dyn RemoteMemory>,
    common: Arc<Common>,
    workers: Vec<Arc<WorkerHandle>>,
    bytes_max: u64,
    bytes: u64,
    /// Bytes of each place.
    places: HashMap<u64, u64>,
    failed: Option<Instant>,
    /// When items were fetched last.
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

    /// Works until the server stops.
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

    /// Asks the pool for something. Requests see how long the answer takes.
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

    /// Copies runs to the pool until there is enough memory, or others wait for the thread.
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
                // There is nothing to copy: what is needed must be evicted.
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
        // There may be more; what waits to be fetched comes first.
        self.common.store.pool().note_short();
    }

    /// Gives up old runs in the pool until there is room for these.
    fn make_room(&mut self, spills: &[Spill]) -> Result<(), RemoteError> {
        let wanted: u64 = spills.iter().map(|spill| self.memory.bytes_of(spill.bytes.len())).sum();
        if wanted > self.bytes_max {
            return Err(RemoteError("the pool is smaller than an item, or a few runs of items".to_owned()));
        }
        while self.bytes + wanted > self.bytes_max {
            if !self.common.store.evict_from_pool() {
                return Err(RemoteError("nothing in the pool can be given up".to_owned()));
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
            // Without a place it was removed meanwhile.
            let has_returned = places[at].is_some() && self.fetched(fetch, is_done.then_some(&buffer));
            let pool = self.common.store.pool();
            let time = pool.fetched(fetch);
            if has_returned {
                pool.count_hit(time);
            }
        }
        self.workers.iter().for_each(|worker| worker.wake());
    }

    /// Cuts what was read to the length of the item, or reads the rest of it; returns whether the
    /// buffer has an item.
    fn complete(&mut self, fetch: &Fetch, place: Option<u64>, buffer: &mut Vec<u8>) -> bool {
        let len = item_len(buffer).filter(|len| *len <= fetch.fill - fetch.location.offset as usize);
        let Some(len) = len else { return false };
        let read = buffer.len();
        buffer.resize(len, 0);
        len <= read || self.read(&[*fetch], &[place], std::slice::from_mut(buffer), read)[0]
    }

    /// Uses an item that was read, or gives up one that could not be. Returns whether it was read.
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

    /// Reads the rest of the buffers from this byte on. Returns which were read.
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

/// Has requests not wait for the thread when it has ended.
struct PoolCloser(Arc<Common>);

impl Drop for PoolCloser {
    fn drop(&mut self) {
        let store = &self.0.store;
        store.pool().set_accepts_runs(false);
        if std::thread::panicking() {
            // What is there cannot be fetched any more.
            while store.evict_from_pool() {}
        }
    }
}

/// The length of the item that begins with these bytes, if they are enough to tell.
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
