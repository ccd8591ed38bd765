//! The items of a server: partitions that share one budget of memory.
//!
//! - [`hash`], [`slot`] and [`index`]: from a key to its item. Readers take no lock.
//! - [`item`], [`runs`], [`classes`], [`log`]: items in a log of runs, grouped by when they expire.
//! - [`memory`] and [`layout`]: the memory of a partition, and where its parts are. [`completed`]:
//!   memory that the next store adopts.
//! - [`epochs`] and [`budget`]: the reuse of memory, and its limit.
//! - [`partition`]: the operations on one part of the keys. `Shared`: the state of all partitions.
//! - [`presence`]: the server of a partition. `moving`: how a partition leaves and arrives.
//!   `clock_offset`: its seconds. `keeping`: how a later store adopts it.
//! - `cas`: the cas numbers of items. [`pool`] and `overflow`: items that are moved to the pool.
//!
//! The design is that of Segcache (NSDI 2021), with exact expiry, an index that grows, and eviction
//! over all partitions in the order of S3-FIFO (SOSP 2023).

pub mod budget;
mod cas;
pub mod classes;
mod clock_offset;
#[cfg(test)]
mod collision_tests;
pub mod completed;
pub mod epochs;
pub mod hash;
pub mod index;
pub mod item;
mod keeping;
pub mod layout;
pub mod log;
pub mod memory;
mod moving;
mod overflow;
pub mod partition;
pub mod pool;
pub mod presence;
pub mod runs;
mod shared;
pub mod slot;
mod sync;
#[cfg(test)]
mod tests;

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use smallvec::SmallVec;

use self::budget::Budget;
use self::completed::Identity;
use self::epochs::Pin;
use self::hash::KeyHasher;
use self::item::Item;
use self::layout::Layout;
use self::log::NoRoom;
use self::memory::Memory;
use self::partition::{Absent, Change, Content, Partition, UpdateError};
use self::runs::Queue;
use self::shared::Shared;
use self::slot::Location;

pub use self::hash::Key;
pub use self::shared::{Refusal, Removed, Until};

/// Default number of partitions.
pub const PARTITIONS: usize = 128;
/// The smallest memory of a store, in bytes.
pub const LIMIT_MIN: u64 = 1 << 20;
/// 1/`RESERVE_DIVISOR` of the memory is kept free, so that a write seldom waits for readers.
const RESERVE_DIVISOR: u64 = 128;
/// A partition evicts its own oldest run if it is among the oldest 1/`OLDEST_DIVISOR` of all runs.
const OLDEST_DIVISOR: u64 = 16;
/// Most runs that one write evicts.
const EVICTIONS_MAX: usize = 8;
/// Most runs of each partition that one call of [`Store::expire`] frees.
const EXPIRED_RUNS_MAX: usize = 64;

/// A buffer for a value of a few bytes.
pub type ShortValue = [u8; 20];

/// Options of a store.
#[derive(Clone, Copy, Debug)]
pub struct StoreOptions {
    /// Bytes of items and their index.
    pub limit: u64,
    /// Partitions, from 1 to 65,536.
    pub partitions: usize,
    /// Threads that use the store.
    pub threads: usize,
    /// Whether items have cas numbers.
    pub has_cas: bool,
    /// Whether items are evicted if the memory is full.
    pub evicts: bool,
    /// Bytes of the pool for items that do not fit in `limit`, or 0.
    pub pool: u64,
    /// The hash of keys.
    pub hasher: KeyHasher,
}

/// The items of a server.
#[derive(Debug)]
pub struct Store {
    partitions: Box<[Partition]>,
    shared: Shared,
    first_limit: u64,
    evicts: bool,
    /// The first second in which a partition is to be flushed, or `u32::MAX`.
    next_flush_s: AtomicU32,
    has_pool: bool,
    /// The partitions whose memory was that of an earlier store.
    adopted: Box<[usize]>,
}

/// The layout of each partition.
fn layout_of(options: &StoreOptions) -> Layout {
    Layout::for_limit(options.limit.max(LIMIT_MIN).saturating_add(options.pool))
}

fn identity(options: &StoreOptions, shared: &Shared, partition: usize) -> Identity {
    let layout = layout_of(options);
    let (partitions, has_cas, hash_secret) = (options.partitions, options.has_cas, shared.hasher.secret());
    Identity { layout, partition, partitions, has_cas, hash_secret }
}

impl Store {
    /// Creates an empty store.
    ///
    /// # Errors
    /// If the system has no memory or descriptors for it.
    pub fn new(options: &StoreOptions) -> io::Result<Self> {
        let layout = layout_of(options);
        let partitions = (0..options.partitions)
            .map(|number| Partition::create(number, layout, cas::before_first(number, 0), options.pool > 0))
            .collect::<io::Result<_>>()?;
        Ok(Self::with_partitions(options, partitions, Shared::new(options)))
    }

    /// Opens the store in a file of [`Self::file_bytes`] bytes, with the items that an earlier
    /// store with the same options has completed there, and with its hash secret. Returns the
    /// second of the earlier store's clock and the same second since 1970, if it has such items.
    ///
    /// # Errors
    /// If the file cannot be mapped, or if it is damaged.
    pub fn open(options: &StoreOptions, file: OwnedFd) -> io::Result<(Self, Option<(u32, i64)>)> {
        let layout = layout_of(options);
        let file = Arc::new(file);
        let map = |number: usize| {
            Memory::map(Arc::clone(&file), number as u64 * layout.bytes() as u64, layout.bytes())
        };
        let first = map(0)?;
        if let Some(version) = completed::other_version(&first) {
            tracing::warn!(version, "the memory file has another format version; its items are dropped");
        }
        let secret = completed::hash_secret(&first);
        let hasher = secret.map_or(options.hasher, |secret| options.hasher.with_secret(secret));
        let shared = Shared::new(&StoreOptions { hasher, ..*options });
        let mut seconds = None;
        let mut partitions = Vec::new();
        for number in 0..options.partitions {
            let (partition, completed) = Partition::adopt(
                &shared,
                map(number)?,
                &identity(options, &shared, number),
                cas::before_first(number, 0),
                options.pool > 0,
            )?;
            partitions.push(partition);
            seconds = completed.map_or(seconds, |completed| Some((completed.now_s, completed.unix_s)));
        }
        Ok((Self::with_partitions(options, partitions.into(), shared), seconds))
    }

    /// Bytes of the file of a store with these options. Most of them are never written.
    #[must_use]
    pub fn file_bytes(options: &StoreOptions) -> u64 {
        options.partitions as u64 * layout_of(options).bytes() as u64
    }

    /// Marks the memory as complete, so that another store with the same options can adopt it. No
    /// thread may use the store any more.
    pub fn complete(&self, options: &StoreOptions, now_s: u32, unix_s: i64) {
        for (number, partition) in self.partitions.iter().enumerate() {
            partition.complete(&self.shared, &identity(options, &self.shared, number), now_s, unix_s);
        }
    }

    fn with_partitions(options: &StoreOptions, partitions: Box<[Partition]>, shared: Shared) -> Self {
        let first_limit = options.limit.max(LIMIT_MIN);
        let next_flush_s = AtomicU32::new(u32::MAX);
        let (evicts, has_pool) = (options.evicts, options.pool > 0);
        Self { partitions, shared, first_limit, evicts, next_flush_s, has_pool, adopted: Box::default() }
    }

    /// Begins a turn of a thread: items that it sees stay valid until the pin is dropped.
    #[must_use]
    pub fn pin(&self, thread: usize) -> Pin<'_> {
        if self.shared.budget.has_retired() {
            self.collect();
        }
        self.shared.epochs.pin(thread)
    }

    /// Frees retired memory that no thread can access any more.
    fn collect(&self) {
        for number in self.shared.retired_in.drain() {
            if self.partitions[number].collect(&self.shared) {
                self.shared.retired_in.note(number);
            }
        }
    }

    /// Cleans one run of a partition that has cleanable runs; returns whether a run was cleaned.
    fn clean(&self, now_s: u32) -> bool {
        while let Some(number) = self.shared.cleanable_in.next() {
            let partition = &self.partitions[number];
            let is_cleaned = partition.clean(&self.shared, now_s, false);
            if partition.has_cleanable() {
                self.shared.cleanable_in.note(number);
            }
            if is_cleaned {
                return true;
            }
        }
        false
    }

    /// Reads the item of a key; the read is counted if `counts`.
    ///
    /// # Errors
    /// The reason why the key has no item here.
    #[inline]
    pub fn look_up<'p>(
        &'p self,
        pin: &'p Pin<'_>,
        key: Key<'_>,
        now_s: u32,
        counts: bool,
    ) -> Result<Item<'p>, Absent> {
        self.partition(key).look_up(&self.shared, pin, key, now_s, counts)
    }

    /// The second in which an item was stored, by the hash of its key and its place.
    #[must_use]
    pub fn stored_s(&self, pin: &Pin<'_>, hash: u64, place: Location) -> u32 {
        self.partition_of(hash).stored_s(pin, place)
    }

    /// Prefetches the memory that the next operations on these keys need, in parallel. The boolean
    /// of a key says whether an item is stored for it.
    pub fn prefetch(&self, keys: &[(u64, bool)]) {
        for (hash, is_stored) in keys {
            let partition = self.partition_of(*hash);
            partition.prefetch_bucket(*hash);
            if *is_stored {
                partition.prefetch_append();
            }
        }
        let mut after: SmallVec<[(u64, usize); 32]> = SmallVec::new();
        for (hash, _) in keys {
            after.extend(self.partition_of(*hash).prefetch_item(*hash).map(|bucket| (*hash, bucket)));
        }
        for (hash, bucket) in after {
            self.partition_of(hash).prefetch_item_after(bucket, hash);
        }
    }

    /// Changes the item of a key atomically, as `decide` returns; returns the cas number of the
    /// stored item, or 0. `decide` may be called more than once.
    ///
    /// # Errors
    /// A [`Refusal`].
    pub fn update<'p>(
        &'p self,
        pin: &'p Pin<'_>,
        key: Key<'_>,
        now_s: u32,
        decide: impl FnMut(Option<&Item<'p>>) -> Change<'p>,
    ) -> Result<u64, Refusal> {
        self.update_or_replace(pin, key, now_s, false, decide)
    }

    /// Like [`Self::update`]. If the update `replaces` any item, no item is fetched from the pool:
    /// `decide` may be called with `None` for an item there.
    ///
    /// # Errors
    /// A [`Refusal`].
    pub fn update_or_replace<'p>(
        &'p self,
        pin: &'p Pin<'_>,
        key: Key<'_>,
        now_s: u32,
        replaces: bool,
        mut decide: impl FnMut(Option<&Item<'p>>) -> Change<'p>,
    ) -> Result<u64, Refusal> {
        let partition = self.partition(key);
        self.with_room(partition, now_s, || {
            partition.update(&self.shared, pin, key, now_s, replaces, &mut decide)
        })
    }

    /// Like [`Self::update`], with a buffer for a short value.
    ///
    /// # Errors
    /// A [`Refusal`].
    pub fn update_short(
        &self,
        pin: &Pin<'_>,
        key: Key<'_>,
        now_s: u32,
        mut decide: impl for<'b> FnMut(Option<&Item<'b>>, &'b mut ShortValue) -> Change<'b>,
    ) -> Result<u64, Refusal> {
        let partition = self.partition(key);
        self.with_room(partition, now_s, || {
            let mut buffer = ShortValue::default();
            let (buffer, decide) = (&mut buffer, &mut decide);
            partition.update(&self.shared, pin, key, now_s, false, move |item| decide(item, buffer))
        })
    }

    /// Tries a write, and retries it once after memory was freed.
    fn with_room(
        &self,
        partition: &Partition,
        now_s: u32,
        mut write: impl FnMut() -> Result<u64, UpdateError>,
    ) -> Result<u64, Refusal> {
        if !partition.is_here() {
            return Err(Refusal::Elsewhere(partition.number()));
        }
        let outcome = write().or_else(|error| {
            let bytes = match error {
                UpdateError::NoRoom(NoRoom { bytes }) => bytes,
                UpdateError::Fetching => return Err(Refusal::Again(Until::Fetched)),
                UpdateError::Late => return Err(Refusal::Elsewhere(partition.number())),
                UpdateError::ChainFull => return Err(Refusal::Full),
            };
            if self.waits_for_pool(bytes) {
                return Err(Refusal::Again(Until::Fetched));
            }
            if !self.evicts && !self.clean_for(bytes as u64, now_s) {
                return Err(Refusal::Full);
            }
            if self.evicts && !self.make_room(partition, bytes, now_s) {
                return Err(Refusal::Full);
            }
            write().map_err(|error| match error {
                UpdateError::ChainFull => Refusal::Full,
                UpdateError::Late => Refusal::Elsewhere(partition.number()),
                UpdateError::NoRoom(_) | UpdateError::Fetching => Refusal::Again(Until::NextTurn),
            })
        });
        if partition.has_opened() {
            self.replenish(partition, now_s);
        }
        outcome
    }

    /// Cleans runs until `bytes` are available; returns whether they are.
    fn clean_for(&self, bytes: u64, now_s: u32) -> bool {
        while self.shared.budget.available() < bytes {
            if !self.clean(now_s) {
                return false;
            }
        }
        self.collect();
        true
    }

    /// Evicts until `bytes` are available, beside the reserve. Returns false if they never can be.
    ///
    /// Another thread may use them before this one does.
    fn make_room(&self, partition: &Partition, bytes: usize, now_s: u32) -> bool {
        if !self.evict_for(bytes as u64, now_s) {
            return false;
        }
        // Long items need consecutive runs. A log has several times as many runs as the memory can
        // fill, so that this is rare.
        for _ in 0..EVICTIONS_MAX {
            if partition.has_gap(bytes) {
                break;
            }
            for queue in Queue::ALL {
                partition.evict(&self.shared, queue, now_s, false);
            }
        }
        self.collect();
        true
    }

    /// Evicts until `bytes` are available, beside the reserve. Returns false, and evicts nothing,
    /// if they never can be.
    fn evict_for(&self, bytes: u64, now_s: u32) -> bool {
        let budget = &self.shared.budget;
        let wanted = bytes + self.reserve();
        if bytes + self.shared.fixed_bytes() > budget.limit() {
            // Nothing is evicted for an item that can never fit.
            return false;
        }
        // Each time that an item survives, its count of reads decreases, so that this ends.
        while budget.available() < wanted {
            let (queue, coldest) = self.coldest();
            if !self.clean(now_s) && !coldest.evict(&self.shared, queue, now_s, false) {
                break;
            }
        }
        true
    }

    /// Evicts about as many bytes as were written, so that the next writes find memory.
    fn replenish(&self, written: &Partition, now_s: u32) {
        let shared = &self.shared;
        self.note_if_short();
        if self.has_pool && self.shared.pool.is_keeping_up() {
            // The copies to the pool free memory.
            written.clear_opened();
            written.clean_unused(shared, now_s);
            return;
        }
        for _ in 0..EVICTIONS_MAX {
            written.clear_opened();
            if !self.evicts || shared.budget.available() >= self.reserve() {
                written.clean_unused(shared, now_s);
                return;
            }
            let (queue, coldest) = self.coldest();
            let newest = shared.sequence.load(Ordering::Relaxed);
            let slack = newest.saturating_sub(coldest.oldest(queue)) / OLDEST_DIVISOR;
            let is_cold = written.oldest(queue) <= coldest.oldest(queue).saturating_add(slack);
            if written.clean(shared, now_s, shared.keeps_pages) {
            } else if self.clean(now_s) {
                continue;
            } else if shared.keeps_pages && is_cold {
                written.evict(shared, queue, now_s, true);
            } else {
                coldest.evict(shared, queue, now_s, false);
                continue;
            }
            if shared.keeps_pages && !written.has_opened() {
                return;
            }
        }
    }

    /// The queue from which the next run is evicted, and the partition that has its oldest run.
    fn coldest(&self) -> (Queue, &Partition) {
        let oldest = |queue| {
            let partitions = self.partitions.iter();
            partitions.min_by_key(|partition| partition.oldest(queue)).expect("at least one partition")
        };
        let queue = self.shared.queue_to_evict();
        let coldest = oldest(queue);
        if coldest.oldest(queue) != u64::MAX {
            return (queue, coldest);
        }
        let other = if queue == Queue::Main { Queue::Probation } else { Queue::Main };
        (other, oldest(other))
    }

    fn reserve(&self) -> u64 {
        self.shared.budget.limit() / RESERVE_DIVISOR
    }

    /// Frees expired and flushed items, and retired memory. Called every second.
    pub fn expire(&self, now_s: u32) {
        for partition in &self.partitions {
            partition.expire(&self.shared, now_s, EXPIRED_RUNS_MAX);
        }
    }

    /// Flushes all items of a partition; returns false if the partition is not on this server, or
    /// if the thread may not serve any more.
    pub fn flush(&self, pin: &Pin<'_>, partition: usize) -> bool {
        self.partitions[partition].flush(&self.shared, pin)
    }

    /// Schedules the flush of all items of a partition for this second; 0 cancels it.
    pub fn flush_at(&self, partition: usize, flush_s: u32) {
        self.partitions[partition].set_flush_s(flush_s);
        if flush_s != 0 {
            self.next_flush_s.fetch_min(flush_s, Ordering::Relaxed);
        }
    }

    /// Flushes the partitions whose scheduled second has come.
    #[inline]
    pub fn flush_due(&self, now_s: u32) {
        if self.next_flush_s.load(Ordering::Relaxed) <= now_s {
            self.flush_all_due(now_s);
        }
    }

    #[cold]
    fn flush_all_due(&self, now_s: u32) {
        self.next_flush_s.store(u32::MAX, Ordering::Relaxed);
        for partition in &self.partitions {
            let later_s = partition.flush_if_due(&self.shared, now_s);
            if later_s != 0 {
                self.next_flush_s.fetch_min(later_s, Ordering::Relaxed);
            }
        }
    }

    /// The items and bytes of all partitions.
    #[must_use]
    pub fn content(&self) -> Content {
        let mut sum = Content::default();
        for content in self.partitions.iter().map(Partition::content) {
            sum.items += content.items;
            sum.item_bytes += content.item_bytes;
            sum.index_bytes += content.index_bytes;
            sum.oldest_s = [sum.oldest_s, content.oldest_s].into_iter().flatten().min();
        }
        sum
    }

    /// The age in seconds of the items of the run that was evicted last.
    #[must_use]
    pub fn evicted_age_s(&self) -> u64 {
        self.shared.evicted_age_s.load(Ordering::Relaxed)
    }

    /// Counts of removed items.
    #[must_use]
    pub fn removed(&self) -> Removed {
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Removed {
            evicted: load(&self.shared.evicted),
            evicted_unfetched: load(&self.shared.evicted_unfetched),
            expired: load(&self.shared.expired),
            expired_unfetched: load(&self.shared.expired_unfetched),
        }
    }

    /// Sets another limit, up to twice the first one; returns whether the limit is allowed.
    pub fn set_limit(&self, limit: u64) -> bool {
        let is_possible = (LIMIT_MIN..=2 * self.first_limit).contains(&limit);
        if is_possible {
            self.shared.budget.set_limit(limit);
        }
        is_possible
    }

    /// Whether items are evicted if the memory is full.
    #[must_use]
    pub fn evicts(&self) -> bool {
        self.evicts
    }

    /// The budget of memory that the partitions share.
    #[must_use]
    pub fn budget(&self) -> &Budget {
        &self.shared.budget
    }

    /// Whether items have cas numbers.
    #[must_use]
    pub fn has_cas(&self) -> bool {
        self.shared.has_cas
    }

    /// The partitions.
    #[must_use]
    pub fn partitions(&self) -> &[Partition] {
        &self.partitions
    }

    /// A key with its hash.
    #[inline]
    #[must_use]
    pub fn key<'a>(&self, bytes: &'a [u8]) -> Key<'a> {
        Key { bytes, hash: self.hash(bytes) }
    }

    /// The hash of a key.
    #[inline]
    #[must_use]
    pub fn hash(&self, key: &[u8]) -> u64 {
        self.shared.hasher.hash(key)
    }

    #[inline]
    fn partition(&self, key: Key<'_>) -> &Partition {
        self.partition_of(key.hash)
    }

    /// The number of the partition of a key with this hash.
    #[inline]
    #[must_use]
    pub fn partition_number(&self, hash: u64) -> usize {
        let number = ((hash >> 32) * self.partitions.len() as u64) >> 32;
        usize::try_from(number).expect("64 bits")
    }

    #[inline]
    fn partition_of(&self, hash: u64) -> &Partition {
        &self.partitions[self.partition_number(hash)]
    }
}
