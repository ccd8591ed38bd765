//! A partition: the items of a part of all keys, in memory that any process can map anywhere.

mod eviction;
mod keeping;
mod listing;
mod moving;
mod overflow;
mod run_items;

pub use moving::Departure;
pub use overflow::Spilled;

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};

use parking_lot::{Mutex, MutexGuard};

use self::overflow::Candidates;
use super::clock_offset::ClockOffset;
use super::epochs::{NO_END_US, Pin};
use super::index::{Found, Guess, Index, Search};
use super::item::{self, Header, Item, States};
use super::layout::Layout;
use super::log::{Charge, Log, NewItem, NoRoom, Target};
use super::memory::{Memory, PAGE_BYTES};
use super::presence::PresenceCell;
use super::runs::{Queue, RunEntry, RunState, SharedMemory};
use super::slot::{Location, READS_MAX, Slot};
use super::{Key, Shared};
use crate::clock::boot_us;

/// The sequence of a queue without runs.
const NO_SEQUENCE: u64 = u64::MAX;

/// Bytes of a cache line.
const CACHE_LINE_BYTES: usize = 64;
/// Cache lines after the last item that are prefetched before the next item is written.
const APPEND_LINES: usize = 3;

/// The change that an update makes to the item of a key.
#[derive(Debug)]
pub enum Change<'a> {
    /// The item stays as it is.
    Keep,
    /// The item is removed.
    Remove,
    /// The item is stored, or replaced.
    Put(Put<'a>),
}

/// A value to store for a key, with its fields.
#[derive(Clone, Copy, Debug)]
pub struct Put<'a> {
    /// The client's flags.
    pub client_flags: u32,
    /// The second in which the item expires, or 0.
    pub expires_s: u32,
    /// The states of the item.
    pub states: States,
    /// The cas number.
    pub cas: Cas,
    /// Whether the item counts as read, for an update that keeps the value.
    pub is_fetched: bool,
    /// The value, in two parts.
    pub value: [&'a [u8]; 2],
}

/// The cas number of a stored item.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Cas {
    /// The next cas number of the partition.
    Next,
    /// A given cas number.
    Exactly(u64),
}

/// The reason why a key has no item that can be read now.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Absent {
    /// No item has the key.
    Missing,
    /// The item has expired.
    Expired,
    /// The item was flushed.
    Flushed,
    /// The item may be in the pool, and is being fetched.
    Fetching,
    /// The partition with this number is not on this server.
    Elsewhere(usize),
}

/// The reason why an update cannot be made now.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum UpdateError {
    /// Memory must be freed first.
    NoRoom(NoRoom),
    /// An item in the pool may have the key, and is being fetched.
    Fetching,
    /// The time until which the thread may serve has passed.
    Late,
    /// The index has no room for the key beside keys with nearly the same hash, and none of their
    /// items may be evicted.
    ChainFull,
}

impl From<NoRoom> for UpdateError {
    fn from(no_room: NoRoom) -> Self {
        Self::NoRoom(no_room)
    }
}

/// The items of a part of all keys.
#[derive(Debug)]
pub struct Partition {
    number: usize,
    /// Whether items may be in the pool.
    has_pool: bool,
    presence: PresenceCell,
    clock_offset: ClockOffset,
    memory: SharedMemory,
    layout: Layout,
    index: Index<SharedMemory>,
    log: Mutex<Inner>,
    /// The sequence of the oldest run of each queue.
    oldest: [AtomicU64; 2],
    has_opened: AtomicBool,
    /// The offset of the end of the last item.
    appended: AtomicUsize,
    /// The second of this server for which a flush of all items is scheduled, or 0.
    flush_s: AtomicU32,
}

/// The state that the partition's lock protects.
#[derive(Debug)]
struct Inner {
    log: Log,
    items: u64,
    /// Bytes of the budget that are charged for the index.
    index_charged: u64,
}

/// Counts of items and of their bytes.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Content {
    /// The number of items.
    pub items: u64,
    /// Bytes of their headers, keys and values.
    pub item_bytes: u64,
    /// Bytes of the index.
    pub index_bytes: u64,
    /// The second in which the oldest run was opened, if there is one.
    pub oldest_s: Option<u32>,
}

impl Partition {
    /// Creates an empty partition in a new memfd. Its cas numbers begin after `cas`.
    ///
    /// # Errors
    /// If the system has no memory or descriptor for it.
    pub fn create(number: usize, layout: Layout, cas: u64, has_pool: bool) -> io::Result<Self> {
        let memory = Arc::new(Memory::create(&format!("aquifer-cache-{number}"), layout.bytes())?);
        let log = Log::new(number, Arc::clone(&memory), layout, cas);
        Ok(Self { has_pool, ..Self::with_log(number, memory, layout, log, 0) })
    }

    fn with_log(number: usize, memory: SharedMemory, layout: Layout, log: Log, items: u64) -> Self {
        Self {
            number,
            has_pool: false,
            presence: PresenceCell::here(),
            clock_offset: ClockOffset::default(),
            flush_s: AtomicU32::new(0),
            index: Index::new(Arc::clone(&memory), layout.index()),
            memory,
            layout,
            log: Mutex::new(Inner { log, items, index_charged: 0 }),
            oldest: [AtomicU64::new(NO_SEQUENCE), AtomicU64::new(NO_SEQUENCE)],
            has_opened: AtomicBool::new(false),
            appended: AtomicUsize::new(0),
        }
    }

    /// Reads the item of a key; the read is counted if `counts`.
    ///
    /// # Errors
    /// The reason why the key has no item here.
    #[inline]
    pub fn look_up<'p>(
        &'p self,
        shared: &Shared,
        pin: &'p Pin<'_>,
        key: Key<'_>,
        now_s: u32,
        counts: bool,
    ) -> Result<Item<'p>, Absent> {
        if !self.is_here() || pin.serves_until_us() == 0 {
            return Err(Absent::Elsewhere(self.number));
        }
        let now_s = self.clock_offset.to_partition(now_s);
        let candidates = Candidates::default();
        let found = match self.index.search(key.hash, |at| self.is_key(at, key.bytes, &candidates)) {
            Search::Found(found) => found,
            Search::Missing => return Err(self.absent(shared, key, &candidates)),
            Search::Inconclusive => {
                let _lock = self.log.lock();
                let found = self.index.search_locked(key.hash, |at| self.is_key(at, key.bytes, &candidates));
                found.ok_or_else(|| self.absent(shared, key, &candidates))?
            }
        };
        let item = self.usable(found, now_s)?;
        if counts {
            self.index.count_read(found);
        }
        Ok(self.for_server(item))
    }

    /// Prefetches the bucket of a key.
    #[inline]
    pub fn prefetch_bucket(&self, hash: u64) {
        if self.is_here() {
            self.index.prefetch(hash);
        }
    }

    /// Prefetches the start of the item that a key probably has. If its slot can only be in an
    /// overflow bucket, prefetches that bucket instead, and returns it for
    /// [`Self::prefetch_item_after`].
    #[inline]
    pub fn prefetch_item(&self, hash: u64) -> Option<usize> {
        if !self.is_here() {
            return None;
        }
        match self.index.guess(hash) {
            Guess::At(location) => self.prefetch_at(location),
            Guess::After(bucket) => {
                self.index.prefetch_bucket(bucket);
                return Some(bucket);
            }
            Guess::None => {}
        }
        None
    }

    /// Prefetches the start of the item that a key probably has in an overflow bucket.
    #[inline]
    pub fn prefetch_item_after(&self, bucket: usize, hash: u64) {
        if let Some(location) = self.index.guess_in(bucket, hash) {
            self.prefetch_at(location);
        }
    }

    #[inline]
    fn prefetch_at(&self, location: Location) {
        let start = self.layout.run(location.run) + location.offset as usize;
        self.memory.prefetch(start);
        // The end of the key, if it is in the next line.
        self.memory.prefetch(start + CACHE_LINE_BYTES / 2);
    }

    /// Prefetches the memory to which the next item is probably written.
    #[inline]
    pub fn prefetch_append(&self) {
        let at = self.appended.load(Ordering::Relaxed);
        for line in 0..APPEND_LINES {
            self.memory.prefetch(at + line * CACHE_LINE_BYTES);
        }
    }

    /// Changes the item of a key as `decide` returns, under the partition's lock; returns the cas
    /// number of the stored item, or 0.
    ///
    /// # Errors
    /// An [`UpdateError`]. `decide` may have been called; nothing has changed.
    pub fn update<'p, 'c>(
        &'p self,
        shared: &Shared,
        pin: &'p Pin<'_>,
        key: Key<'_>,
        now_s: u32,
        replaces: bool,
        decide: impl FnOnce(Option<&Item<'p>>) -> Change<'c>,
    ) -> Result<u64, UpdateError> {
        let now_s = self.clock_offset.to_partition(now_s);
        let mut inner = self.log.lock();
        if !may_change(pin) {
            return Err(UpdateError::Late);
        }
        let candidates = Candidates::default();
        let found = self.index.search_locked(key.hash, |at| self.is_key(at, key.bytes, &candidates));
        if found.is_none() && !candidates.borrow().is_empty() {
            if !replaces && !shared.pool.is_unresponsive() {
                self.fetches(key.hash, &candidates).into_iter().for_each(|fetch| shared.pool.fetch(fetch));
                return Err(UpdateError::Fetching);
            }
            self.remove_candidates(shared, &mut inner, key.hash, &candidates);
        }
        let item = found.and_then(|found| self.usable(found, now_s).ok());
        let item = item.map(|item| self.for_server(item));
        match decide(item.as_ref()) {
            Change::Keep => Ok(0),
            Change::Remove => {
                if let Some(found) = found {
                    self.remove(shared, &mut inner, found);
                }
                Ok(0)
            }
            Change::Put(put) => self.put(shared, &mut inner, key, now_s, found, &put),
        }
    }

    /// The reason why a key has no item here. Queues fetches of the items in the pool that may have
    /// the key.
    #[cold]
    fn absent(&self, shared: &Shared, key: Key<'_>, candidates: &Candidates) -> Absent {
        if candidates.borrow().is_empty() || shared.pool.is_unresponsive() {
            return Absent::Missing;
        }
        self.fetches(key.hash, candidates).into_iter().for_each(|fetch| shared.pool.fetch(fetch));
        Absent::Fetching
    }

    fn put(
        &self,
        shared: &Shared,
        inner: &mut Inner,
        key: Key<'_>,
        now_s: u32,
        found: Option<Found>,
        put: &Put<'_>,
    ) -> Result<u64, UpdateError> {
        let cas = match put.cas {
            Cas::Exactly(cas) => cas,
            Cas::Next if shared.has_cas => inner.log.next_cas(shared),
            Cas::Next => 0,
        };
        let expires_s = self.clock_offset.to_partition(put.expires_s);
        let header = Header { client_flags: put.client_flags, expires_s, cas, states: put.states };
        let new = NewItem { header, key: key.bytes, value: put.value, stored_s: now_s, tolerance_s: 0 };
        // A value that replaces another one inherits its queue and its count of reads.
        let known = found.filter(|found| self.usable(*found, now_s).is_ok());
        let queue = known.map_or(Queue::Probation, |found| self.entry(found.slot.location().run).queue());
        let location = inner.log.append(shared, now_s, &new, Target::Newest(queue), Charge::IfFree)?;
        let end = self.layout.run(location.run) + self.entry(location.run).fill();
        self.appended.store(end, Ordering::Relaxed);
        if put.cas == Cas::Next {
            inner.log.cas = inner.log.next_cas(shared);
        }
        let old = known.map_or(Slot::EMPTY, |found| found.slot);
        let is_read_now = put.is_fetched && !old.is_fetched();
        let reads = (old.reads() + u64::from(is_read_now)).min(READS_MAX);
        let slot = Slot::new(key.hash, location, reads).with_fetched(put.is_fetched);
        if let Some(found) = found {
            self.index.replace(found, slot);
            self.release(shared, inner, found.slot.location());
        } else if self.index.insert(key.hash, slot).is_ok() {
            inner.items += 1;
            self.grow(shared, inner);
        } else if let Some(evicted) = self.evict_beside(shared, key.hash, now_s) {
            self.index.replace(evicted, slot);
            self.release(shared, inner, evicted.slot.location());
        } else {
            let len = self.item_len(location);
            inner.log.release(shared, location.run, len);
            return Err(UpdateError::ChainFull);
        }
        if inner.log.opened != 0 {
            self.publish_oldest(inner);
        }
        Ok(cas)
    }

    /// Adds a bucket to the index if the index is loaded, and charges for the memory.
    fn grow(&self, shared: &Shared, inner: &mut Inner) {
        if self.index.wants_split(inner.items) {
            self.index.split();
        }
        self.charge_index(shared, inner);
    }

    fn charge_index(&self, shared: &Shared, inner: &mut Inner) {
        let bytes = self.index.bytes().next_multiple_of(PAGE_BYTES) as u64;
        if bytes > inner.index_charged {
            shared.budget.charge_always(bytes - inner.index_charged);
            inner.index_charged = bytes;
        }
    }

    fn remove(&self, shared: &Shared, inner: &mut Inner, found: Found) {
        self.index.remove(found);
        inner.items -= 1;
        self.release(shared, inner, found.slot.location());
    }

    fn release(&self, shared: &Shared, inner: &mut Inner, location: Location) {
        if inner.log.is_remote(location.run) {
            return inner.log.release_remote(shared, location.run);
        }
        inner.log.release(shared, location.run, self.item_len(location));
    }

    /// The sequence of the oldest run of a queue, or of an older run that is free now; `u64::MAX`
    /// if the queue has none.
    pub fn oldest(&self, queue: Queue) -> u64 {
        self.oldest[queue as usize].load(Ordering::Relaxed)
    }

    /// Whether runs were opened since the last call of [`Self::clear_opened`].
    pub fn has_opened(&self) -> bool {
        self.has_opened.load(Ordering::Relaxed)
    }

    /// Resets the number of opened runs, before others are evicted for them.
    pub fn clear_opened(&self) {
        if let Some(mut inner) = self.lock_here() {
            inner.log.opened = 0;
            self.has_opened.store(false, Ordering::Relaxed);
        }
    }

    /// Frees retired memory that no thread can read any more; returns whether some remains.
    pub fn collect(&self, shared: &Shared) -> bool {
        self.lock_here().is_some_and(|mut inner| inner.log.collect(shared))
    }

    /// Flushes all items; returns false if the partition is not on this server, or if the thread
    /// may not serve any more. The memory of the items is freed later.
    pub fn flush(&self, shared: &Shared, pin: &Pin<'_>) -> bool {
        let inner = self.lock_here().filter(|_| may_change(pin));
        inner.map(|mut inner| inner.log.flush(shared)).is_some()
    }

    /// Flushes all items if the scheduled second has come. Returns that second if it is later, or
    /// 0.
    pub fn flush_if_due(&self, shared: &Shared, now_s: u32) -> u32 {
        let Some(mut inner) = self.lock_here() else { return 0 };
        let flush_s = self.flush_s.load(Ordering::Relaxed);
        if flush_s == 0 || flush_s > now_s {
            return flush_s;
        }
        self.flush_s.store(0, Ordering::Relaxed);
        inner.log.flush(shared);
        0
    }

    /// Whether the log has a gap for this many bytes.
    pub fn has_gap(&self, bytes: usize) -> bool {
        self.log.lock().log.has_gap(bytes)
    }

    /// Whether any run should be cleaned.
    pub fn has_cleanable(&self) -> bool {
        self.lock_here().is_some_and(|inner| inner.log.has_cleanable())
    }

    /// Items in the pool.
    pub fn items_in_pool(&self) -> u64 {
        self.log.lock().log.items_in_pool()
    }

    /// The items and bytes of the partition.
    pub fn content(&self) -> Content {
        let inner = self.log.lock();
        Content {
            items: inner.items,
            item_bytes: inner.log.live_bytes,
            index_bytes: self.index.bytes() as u64,
            oldest_s: Queue::ALL
                .into_iter()
                .filter_map(|queue| inner.log.oldest(queue))
                .map(|(_, run)| self.clock_offset.to_server(self.entry(run).times().0))
                .min(),
        }
    }

    /// The second in which an item was stored. Scans the item's run from its start.
    pub fn stored_s(&self, _pin: &Pin<'_>, place: Location) -> u32 {
        let mut stored_s = self.entry(place.run).times().0;
        let mut offset = 0;
        while offset < place.offset {
            let location = Location { run: place.run, offset };
            let prefix = self.prefix(location);
            let len = match item::marked_s(prefix) {
                Some(second) => {
                    stored_s = second;
                    item::MARK_BYTES
                }
                None => self.item_len(location),
            };
            offset += u32::try_from(len).expect("shorter than a run");
        }
        self.clock_offset.to_server(stored_s)
    }

    /// Converts the expiry of an item to a second of the server.
    #[inline]
    fn for_server<'p>(&self, mut item: Item<'p>) -> Item<'p> {
        item.header.expires_s = self.clock_offset.to_server(item.header.expires_s);
        item
    }

    /// The item of a slot, unless it has expired or was flushed. All seconds are the partition's
    /// own.
    #[inline]
    fn usable(&self, found: Found, now_s: u32) -> Result<Item<'_>, Absent> {
        let location = found.slot.location();
        let entry = self.entry(location.run);
        match entry.state() {
            RunState::Flushed => return Err(Absent::Flushed),
            // The run was moved to the pool since the slot was found: the request is retried.
            RunState::Remote => return Err(Absent::Fetching),
            RunState::Lost => return Err(Absent::Missing),
            _ => {}
        }
        let mut item = item::decode(self.item_bytes(location), entry.cas_base());
        item.is_fetched = found.slot.is_fetched();
        item.place = Some(location);
        if is_expired(&item.header, now_s) { Err(Absent::Expired) } else { Ok(item) }
    }

    #[inline]
    fn has_key(&self, location: Location, key: &[u8]) -> bool {
        item::key_and_len(self.item_bytes(location)).0 == key
    }

    fn item_len(&self, location: Location) -> usize {
        self.item_bytes(location).len()
    }

    /// The first bytes of an item or a mark.
    #[inline]
    fn prefix(&self, location: Location) -> &[u8] {
        let start = self.layout.run(location.run) + location.offset as usize;
        // SAFETY: as in `item_bytes`; a mark has as many bytes as the shortest header.
        unsafe { self.memory.bytes(start, item::PREFIX_BYTES) }
    }

    /// The bytes of the item at a location that is in the index, or was while the epoch was pinned.
    #[inline]
    fn item_bytes(&self, location: Location) -> &[u8] {
        let start = self.layout.run(location.run) + location.offset as usize;
        // SAFETY: an item is written before its location is in the index, and its bytes are never
        // changed before its run is free. The run is not freed while the caller has pinned an
        // epoch, or while it holds the partition's lock and has not retired the run. Every item has
        // the bytes of the shortest header; one with a large value has those of the next field.
        unsafe {
            let prefix = self.memory.bytes(start, item::PREFIX_BYTES);
            let len = if item::has_long_value(prefix) {
                item::len(self.memory.bytes(start, item::LONG_PREFIX_BYTES))
            } else {
                item::len(prefix)
            };
            self.memory.bytes(start, len)
        }
    }

    #[inline]
    fn entry(&self, run: u32) -> RunEntry<'_> {
        RunEntry::new(&self.memory, &self.layout, run)
    }

    fn publish_oldest(&self, inner: &mut Inner) {
        let is_here = self.is_here();
        for queue in Queue::ALL {
            // Nothing is evicted from a partition that is about to leave.
            let oldest = inner.log.oldest(queue).filter(|_| is_here);
            let oldest = oldest.map_or(NO_SEQUENCE, |(sequence, _)| sequence);
            self.oldest[queue as usize].store(oldest, Ordering::Relaxed);
        }
        self.has_opened.store(inner.log.opened != 0, Ordering::Relaxed);
    }

    /// Acquires the lock; `None` if the partition is not on this server or about to leave.
    fn lock_here(&self) -> Option<MutexGuard<'_, Inner>> {
        let inner = self.log.lock();
        self.presence.is_here().then_some(inner)
    }
}

/// Whether a thread may change items. Must be called with the partition's lock held, so that a
/// change that another server acknowledges after the time has passed follows this one.
fn may_change(pin: &Pin<'_>) -> bool {
    match pin.serves_until_us() {
        NO_END_US => true,
        end_us => boot_us() < end_us,
    }
}

fn is_expired(header: &Header, now_s: u32) -> bool {
    header.expires_s != 0 && header.expires_s <= now_s
}
