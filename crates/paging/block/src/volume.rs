//! The block volume: bytes at offsets, stored as pages by the pager.
//!
//! A write ends when its pages are in the mempool; the [`Pump`](crate::Pump) writes full blocks to
//! memory nodes. A read finds the newest bytes in the mempool, or else on a node, and checks their
//! checksum. One lock guards where each page is. It is never held while a node is read. A reader
//! retains the location that it fetches from, so that no other page is written there meanwhile.

mod room;

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use aquifer_latency::LatencyHistogram;
use aquifer_pager::{
    BlockId, Budget, Connector, FETCH_PAGES_MAX, FetchError, Fetcher, Location, Mempool, Mutation,
    PAGE_BYTES, PageNumber, PageState, RecalledBytes, SealedBlock, SlabSet, TableError, Volume, WrittenBatch,
    is_zero,
};
use parking_lot::{Condvar, Mutex, MutexGuard};
use rustix::event::{EventfdFlags, eventfd};

use crate::error::BlockError;
use crate::page_parts::{PagePart, split_at_pages};
use crate::stats::{Counters, VolumeStats};

/// Size of the largest volume in bytes: the capacity of the slabs of one run.
pub const VOLUME_BYTES_MAX: u64 = 128 << 30;
/// Maximum number of messages that are kept for [`BlockVolume::drain_messages`]. Further ones are
/// only logged.
const MESSAGES_MAX: usize = 64;

/// A block volume. Any number of threads use it, each with a [`VolumeReader`] of its own.
#[derive(Debug)]
pub struct BlockVolume {
    bytes: u64,
    room_timeout: Duration,
    pub(crate) slabs: Arc<SlabSet>,
    pub(crate) mempool: Arc<Mempool>,
    budget: Arc<Budget>,
    state: Mutex<VolumeState>,
    /// Notified when blocks are acknowledged, the volume is closed, or a node goes away or returns.
    changed: Condvar,
    /// Eventfd that wakes the pump.
    wake_event: OwnedFd,
    pub(crate) counters: Counters,
    /// The volume's memory that nodes recall.
    recalled: Mutex<Vec<RecalledBytes>>,
    latencies: Mutex<Vec<Arc<LatencyHistogram>>>,
    messages: Mutex<Vec<String>>,
    /// The reason of the last refusal of a write that found no room.
    last_refusal: Mutex<Option<String>>,
}

#[derive(Debug)]
pub(crate) struct VolumeState {
    pub(crate) volume: Volume,
    open: Option<BlockId>,
    /// Blocks for the pump, the oldest first.
    sealed: VecDeque<SealedBlock>,
    /// Blocks that are not acknowledged yet, numbered in the order in which they were sealed.
    unwritten: Vec<(u64, BlockId)>,
    next_sealed: u64,
    /// The time since which the pool has been full, and its last error.
    pool_full: Option<(Instant, String)>,
    /// A node is away and may return: writes wait without a timeout.
    is_awaiting_node: bool,
    is_closed: bool,
}

/// The buffers that one thread needs for reading.
#[derive(Debug)]
pub struct VolumeReader {
    fetcher: Fetcher,
    latency: Arc<LatencyHistogram>,
    remote_parts: Vec<PagePart>,
    locations: Vec<Location>,
    /// The retained locations, which are all of `locations`.
    retained: Vec<Location>,
}

/// A reference to a location, which is released on drop.
struct PageReference<'a>(&'a SlabSet, Location);

impl Drop for PageReference<'_> {
    fn drop(&mut self) {
        self.0.release(self.1);
    }
}

impl BlockVolume {
    /// Creates a volume of zeros. `budget` sets its share of the mempool. A write fails if it finds
    /// no room for `room_timeout`. While a node is away, a write waits without a timeout, unless
    /// `room_timeout` is zero.
    ///
    /// # Errors
    /// If there is no memory for its tables.
    ///
    /// # Panics
    /// If the size is not a multiple of a page, or is more than [`VOLUME_BYTES_MAX`].
    pub fn new(
        bytes: u64,
        mempool: Arc<Mempool>,
        budget: Arc<Budget>,
        room_timeout: Duration,
    ) -> Result<Arc<Self>, TableError> {
        assert!(bytes.is_multiple_of(PAGE_BYTES as u64) && bytes <= VOLUME_BYTES_MAX, "{bytes} bytes");
        let slabs = Arc::new(SlabSet::new()?);
        slabs.set_cache(mempool.new_cache_index()?);
        let volume = Volume::new(Arc::clone(&slabs), Arc::clone(&mempool), Arc::clone(&budget))?;
        let wake_event =
            eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(std::io::Error::from)?;
        Ok(Arc::new(Self {
            bytes,
            room_timeout,
            slabs,
            mempool,
            budget,
            state: Mutex::new(VolumeState {
                volume,
                open: None,
                sealed: VecDeque::new(),
                unwritten: Vec::new(),
                next_sealed: 0,
                pool_full: None,
                is_awaiting_node: false,
                is_closed: false,
            }),
            changed: Condvar::new(),
            wake_event,
            counters: Counters::default(),
            recalled: Mutex::default(),
            latencies: Mutex::default(),
            messages: Mutex::default(),
            last_refusal: Mutex::default(),
        }))
    }

    /// The size in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// A reader that reaches the nodes through `connector`.
    ///
    /// # Errors
    /// If there is no memory for its buffer.
    pub fn reader(&self, connector: Arc<dyn Connector>) -> std::io::Result<VolumeReader> {
        let latency = Arc::new(LatencyHistogram::default());
        self.latencies.lock().push(Arc::clone(&latency));
        Ok(VolumeReader {
            fetcher: Fetcher::new(connector)?,
            latency,
            remote_parts: Vec::with_capacity(FETCH_PAGES_MAX),
            locations: Vec::with_capacity(FETCH_PAGES_MAX),
            retained: Vec::with_capacity(FETCH_PAGES_MAX),
        })
    }

    /// Reads bytes, and returns how many of them could be read, counted from the first.
    ///
    /// # Errors
    /// If the first page cannot be read, or the range is not inside the volume.
    pub fn read(&self, reader: &mut VolumeReader, offset: u64, out: &mut [u8]) -> Result<usize, BlockError> {
        self.check(offset, out.len())?;
        let started = Instant::now();
        let mut done = 0;
        while done < out.len() {
            let here = offset + done as u64;
            let within = usize::try_from(here % PAGE_BYTES as u64).expect("below a page");
            let len = (FETCH_PAGES_MAX * PAGE_BYTES - within).min(out.len() - done);
            let (whole, error) = self.read_some(reader, here, &mut out[done..done + len]);
            done += whole;
            match error {
                Some(error) if done == 0 => return Err(error),
                Some(_) => break,
                None => {}
            }
        }
        let nanoseconds = u64::try_from(started.elapsed().as_nanos()).unwrap_or(u64::MAX);
        reader.latency.record(nanoseconds);
        Ok(done)
    }

    /// Reads at most [`FETCH_PAGES_MAX`] pages. Returns the number of bytes that were read, and the
    /// error that stopped it, if any.
    fn read_some(
        &self,
        reader: &mut VolumeReader,
        offset: u64,
        out: &mut [u8],
    ) -> (usize, Option<BlockError>) {
        let (mut whole, mut error) = self.plan(reader, offset, out);
        let reads_before = reader.fetcher.reads();
        let mut at = 0;
        while at < reader.locations.len() {
            match reader.fetcher.fetch(&self.slabs, &reader.locations[at..]) {
                Ok(fetched) => {
                    for (number, part) in reader.remote_parts[at..at + fetched].iter().enumerate() {
                        let from = number * PAGE_BYTES + part.within;
                        reader.fetcher.buffer().read(from, &mut out[part.at..part.at + part.len]);
                    }
                    at += fetched;
                }
                Err(cause) => {
                    let PagePart { page, at: bad, .. } = reader.remote_parts[at];
                    whole = bad;
                    error = Some(self.page_lost(page, reader.locations[at], cause));
                    break;
                }
            }
        }
        Counters::add(&self.counters.remote_reads, at as u64);
        Counters::add(&self.counters.remote_read_trips, reader.fetcher.reads() - reads_before);
        for location in reader.retained.drain(..) {
            self.slabs.release(location);
        }
        self.wake_pump_if_emptied();
        (whole, error)
    }

    /// Copies the parts that are zero or in the mempool, and retains the locations of the others.
    /// Returns the same as [`Self::read_some`].
    fn plan(&self, reader: &mut VolumeReader, offset: u64, out: &mut [u8]) -> (usize, Option<BlockError>) {
        reader.remote_parts.clear();
        reader.locations.clear();
        let (mut zero_pages, mut mempool_hits, mut staging_hits, mut cache_hits) = (0, 0, 0, 0);
        let mut lost = None;
        let mut state = self.lock();
        for part in split_at_pages(offset, out.len()) {
            let bytes = &mut out[part.at..part.at + part.len];
            match state.volume.state(part.page) {
                PageState::Zero => {
                    bytes.fill(0);
                    zero_pages += 1;
                }
                PageState::Staged(slot) => {
                    self.mempool.memory().read(slot.offset() + part.within, bytes);
                    staging_hits += 1;
                }
                PageState::Reclaimable(slot) => {
                    self.mempool.memory().read(slot.offset() + part.within, bytes);
                    mempool_hits += 1;
                }
                PageState::Remote(_) if self.read_cached(&mut state.volume, part, bytes) => cache_hits += 1,
                PageState::Remote(location) => {
                    if !Mutation::FetchUnreferenced.is_active() {
                        self.slabs.retain(location);
                        reader.retained.push(location);
                    }
                    reader.remote_parts.push(part);
                    reader.locations.push(location);
                }
                PageState::Lost => {
                    lost = Some(part);
                    break;
                }
                PageState::Held | PageState::Leaving | PageState::Doubtful => panic_page_in_program(),
            }
        }
        drop(state);
        Counters::add(&self.counters.zero_pages, zero_pages);
        Counters::add(&self.counters.mempool_hits, mempool_hits);
        Counters::add(&self.counters.staging_hits, staging_hits);
        Counters::add(&self.counters.cache_hits, cache_hits);
        let error = lost.map(|part| BlockError::StillLost { offset: part.page * PAGE_BYTES as u64 });
        (lost.map_or(out.len(), |part| part.at), error)
    }

    /// Copies a part of a remote page from the page cache. Returns whether it is there.
    fn read_cached(&self, volume: &mut Volume, part: PagePart, out: &mut [u8]) -> bool {
        let PageState::Remote(location) = volume.state(part.page) else { return false };
        let Some(cache) = self.slabs.cache() else { return false };
        let Some(pinned) = cache.pin(location) else { return false };
        if volume.cached_pages(part.page, pinned.slot(), 1) == 0 {
            return false;
        }
        self.mempool.memory().read(pinned.slot().offset() + part.within, out);
        cache.count_hit(pinned.slot());
        true
    }

    /// Writes bytes, which are visible to every reader when this returns.
    ///
    /// # Errors
    /// If there was no room for the timeout of the volume, or if the rest of a page that is written
    /// in part cannot be read. Then some pages may have the new bytes and others the old ones.
    pub fn write(&self, reader: &mut VolumeReader, offset: u64, data: &[u8]) -> Result<(), BlockError> {
        self.check(offset, data.len())?;
        let mut state = self.lock();
        for part in split_at_pages(offset, data.len()) {
            let bytes = &data[part.at..part.at + part.len];
            if part.len == PAGE_BYTES {
                state = self.with_room(state)?;
                self.store(&mut state, part.page, bytes);
            } else {
                drop(state);
                self.modify(reader, part, bytes)?;
                state = self.lock();
            }
        }
        Ok(())
    }

    /// Writes a part of a page. Reads the rest first, and again if the page was written in the
    /// meantime.
    fn modify(&self, reader: &mut VolumeReader, part: PagePart, bytes: &[u8]) -> Result<(), BlockError> {
        let mut page = [0; PAGE_BYTES];
        // The location from which `page` was read. While it is retained it cannot belong to another
        // page.
        let mut fetched: Option<PageReference<'_>> = None;
        let mut state = self.lock();
        loop {
            state = self.with_room(state)?;
            match state.volume.state(part.page) {
                PageState::Zero => page.fill(0),
                PageState::Staged(slot) | PageState::Reclaimable(slot) => {
                    self.mempool.memory().read(slot.offset(), &mut page);
                }
                PageState::Remote(location) if fetched.as_ref().is_some_and(|read| read.1 == location) => {}
                PageState::Remote(location) => {
                    self.slabs.retain(location);
                    fetched = Some(PageReference(&self.slabs, location));
                    drop(state);
                    if let Err(cause) = reader.fetcher.fetch(&self.slabs, &[location]) {
                        return Err(self.page_lost(part.page, location, cause));
                    }
                    reader.fetcher.buffer().read(0, &mut page);
                    state = self.lock();
                    continue;
                }
                PageState::Lost => {
                    return Err(BlockError::StillLost { offset: part.page * PAGE_BYTES as u64 });
                }
                PageState::Held | PageState::Leaving | PageState::Doubtful => panic_page_in_program(),
            }
            page[part.within..part.within + part.len].copy_from_slice(bytes);
            self.store(&mut state, part.page, &page);
            return Ok(());
        }
    }

    /// Stores the bytes of a whole page. A block must be open.
    fn store(&self, state: &mut VolumeState, page: PageNumber, bytes: &[u8]) {
        Counters::add(&self.counters.written_pages, 1);
        if is_zero(bytes) {
            Counters::add(&self.counters.zero_pages, 1);
            state.volume.discard(page, page + 1);
            self.wake_pump_if_emptied();
            return;
        }
        self.absorb_page(state, page, bytes);
    }

    /// Copies the bytes of a page into the open block. A block must be open.
    pub(crate) fn absorb_page(&self, state: &mut VolumeState, page: PageNumber, bytes: &[u8]) {
        let open = state.open.expect("the caller opened a block");
        let slot = state.volume.absorb(open, page);
        self.mempool.memory().write(slot.offset(), bytes);
        if state.volume.is_full(open) {
            self.seal(state);
        }
    }

    fn seal(&self, state: &mut VolumeState) {
        let Some(open) = state.open.take() else { return };
        let sealed = state.volume.seal(open);
        state.sealed.push_back(sealed);
        let number = state.next_sealed;
        state.unwritten.push((number, open));
        state.next_sealed += 1;
        self.wake_pump();
    }

    /// Discards bytes: they read as zeros, and their memory is freed.
    ///
    /// # Errors
    /// The same as of [`Self::write`], if the range begins or ends inside a page.
    pub fn discard(&self, reader: &mut VolumeReader, offset: u64, len: u64) -> Result<(), BlockError> {
        let length = usize::try_from(len).unwrap_or(usize::MAX);
        self.check(offset, length)?;
        let page_bytes = PAGE_BYTES as u64;
        let end = offset + len;
        let (first, last) = (offset.div_ceil(page_bytes), end / page_bytes);
        if first < last {
            self.lock().volume.discard(first, last);
            Counters::add(&self.counters.discarded_pages, last - first);
            self.wake_pump_if_emptied();
        }
        let edges = if first <= last {
            [(offset, first * page_bytes), (last * page_bytes, end)]
        } else {
            [(offset, end), (end, end)]
        };
        for (start, end) in edges {
            let len = usize::try_from(end - start).expect("less than a page");
            self.write(reader, start, &[0; PAGE_BYTES][..len])?;
        }
        Ok(())
    }

    /// Closes the volume for writes. Writes that wait fail.
    pub fn close(&self) {
        self.lock().is_closed = true;
        self.changed.notify_all();
    }

    /// Returns the messages for users since the last call.
    #[must_use]
    pub fn drain_messages(&self) -> Vec<String> {
        std::mem::take(&mut *self.messages.lock())
    }

    /// The reason of the last refusal of a write that found no room, if there was one. The writer
    /// may not be able to report it.
    #[must_use]
    pub fn last_refusal(&self) -> Option<String> {
        self.last_refusal.lock().clone()
    }

    /// Bytes in use on memory nodes.
    #[must_use]
    pub fn remote_bytes(&self) -> u64 {
        self.slabs.bytes().0
    }

    /// The volume's memory that nodes recall.
    #[must_use]
    pub fn recalled(&self) -> Vec<RecalledBytes> {
        self.recalled.lock().clone()
    }

    /// Sets the volume's memory that nodes recall.
    pub(crate) fn set_recalled(&self, recalled: &[RecalledBytes]) {
        let mut present = self.recalled.lock();
        if *present != recalled {
            recalled.clone_into(&mut present);
        }
    }

    /// The present statistics.
    #[must_use]
    pub fn stats(&self) -> VolumeStats {
        let latency = LatencyHistogram::default();
        for one in self.latencies.lock().iter() {
            latency.merge(one);
        }
        let (remote_bytes, remote_peak_bytes) = self.slabs.bytes();
        VolumeStats {
            mempool_bytes: self.budget.mempool_bytes(),
            remote_bytes,
            remote_peak_bytes,
            read_latency_ns: [0.5, 0.99, 0.999].map(|share| latency.quantile(share)),
            ..self.counters.stats()
        }
    }

    /// Removes the oldest sealed block, for the pump.
    pub(crate) fn next_sealed_block(&self) -> Option<SealedBlock> {
        self.lock().sealed.pop_front()
    }

    pub(crate) fn has_sealed(&self) -> bool {
        !self.lock().sealed.is_empty()
    }

    /// Records that memory nodes have acknowledged these batches.
    pub(crate) fn written(&self, done: &[WrittenBatch]) {
        let mut state = self.lock();
        for written in done {
            state.volume.written(written.block, &written.locations[..written.count]);
            state.unwritten.retain(|(_, block)| *block != written.block);
        }
        drop(state);
        self.changed.notify_all();
    }

    /// Releases all pages. The pump must not have a block any more.
    pub(crate) fn forget_all(&self) {
        let mut state = self.lock();
        state.open = None;
        state.sealed.clear();
        state.unwritten.clear();
        state.volume.close();
    }

    pub(crate) fn wake_event(&self) -> BorrowedFd<'_> {
        self.wake_event.as_fd()
    }

    pub(crate) fn wake_pump(&self) {
        // A write to an eventfd fails only if its counter is full; then the pump is awake already.
        let _ = rustix::io::write(&self.wake_event, &1_u64.to_ne_bytes());
    }

    pub(crate) fn wake_pump_if_emptied(&self) {
        if self.slabs.consume_emptied_notification() {
            self.wake_pump();
        }
    }

    /// Records that a page could not be read back, unless it was written again meanwhile.
    fn page_lost(&self, page: PageNumber, location: Location, cause: FetchError) -> BlockError {
        let offset = page * PAGE_BYTES as u64;
        let mut state = self.lock();
        let is_still_there = state.volume.state(page) == PageState::Remote(location);
        if is_still_there {
            state.volume.mark_lost(page);
        }
        drop(state);
        let error = BlockError::Lost { offset, cause };
        if is_still_there {
            self.counters.lost_pages.fetch_add(1, Relaxed);
            self.report(&error);
        }
        error
    }

    /// Logs an error, and keeps it for [`Self::drain_messages`].
    fn report(&self, error: &BlockError) {
        tracing::error!(%error, "lost a page of a block volume");
        let mut messages = self.messages.lock();
        if messages.len() < MESSAGES_MAX {
            messages.push(error.to_string());
        }
    }

    fn check(&self, offset: u64, len: usize) -> Result<(), BlockError> {
        let end = offset.checked_add(len as u64);
        if end.is_some_and(|end| end <= self.bytes) {
            Ok(())
        } else {
            Err(BlockError::OutOfRange { offset, len, bytes: self.bytes })
        }
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, VolumeState> {
        self.state.lock()
    }
}

fn panic_page_in_program() -> ! {
    panic!("a page of a block volume is held by a program: the page table is corrupt")
}
