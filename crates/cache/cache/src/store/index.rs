//! The index of a partition: from the hash of a key to the slot of its item.
//!
//! A linear hash table (Litwin, 1980): buckets are added one at a time, so that no request waits
//! for the whole table to grow, and the table is never much larger than its items need. A bucket is
//! a cache line with a head and seven slots. Buckets that are full have a chain of overflow
//! buckets.
//!
//! Readers take no lock. One writer at a time changes the index, under the partition's lock. It
//! replaces an item by one store. While it moves slots from one bucket to another, the version in
//! the head of the chain is odd; a reader that found nothing retries if the version was odd or has
//! changed.

use aquifer_mutation::mutations;
use serde::{Deserialize, Serialize};

use super::slot::{BUCKET_BITS_MAX, Location, Slot, TAG_LOW_BIT};

/// Words of a bucket: its head and its slots.
pub const BUCKET_WORDS: usize = 8;
/// Bytes of a bucket.
pub const BUCKET_BYTES: usize = BUCKET_WORDS * 8;
/// Slots of a bucket.
const SLOTS: usize = BUCKET_WORDS - 1;
/// Buckets of an empty index: one page.
const BUCKETS_MIN: u64 = 1 << TAG_LOW_BIT;
/// A bucket is added when there are more items than this per bucket.
const ITEMS_PER_BUCKET: f64 = 7.0;
/// Searches without a lock after which a reader acquires the partition's lock.
const ATTEMPTS: usize = 16;
/// Most buckets of a chain: an insert makes no longer one, and a search visits no more. A reader
/// that meets more follows links that a writer is changing.
pub const CHAIN_MAX: usize = 64;

mutations! {
    /// Steps of the index that its test breaks on purpose.
    pub enum Mutation {
        /// A bucket is split without a change of its version.
        SplitWithoutVersion,
        /// A reader that found nothing does not check the version.
        IgnoreVersion,
        /// A reader that found nothing does not check the number of buckets.
        IgnoreCount,
        /// An insert makes chains of more than [`CHAIN_MAX`] buckets.
        ChainTooLong,
    }
}

/// The memory of an index: words that readers load while a writer stores.
///
/// A load acquires and a store releases, as [`std::sync::atomic`] defines these orders.
pub trait Words {
    /// Loads a word.
    fn load(&self, at: usize) -> u64;
    /// Stores a word.
    fn store(&self, at: usize, value: u64);
    /// Replaces a word if it has the expected value; returns whether it had.
    fn replace(&self, at: usize, expected: u64, value: u64) -> bool;
    /// Prefetches a word that is soon needed. Only speed depends on it.
    fn prefetch(&self, at: usize);
}

/// The layout of an index in its words.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct IndexLayout {
    /// The word with the number of buckets.
    pub count: usize,
    /// The word with the number of overflow buckets ever used.
    pub overflow_count: usize,
    /// The word with the head of the list of free overflow buckets: its number + 1, or 0.
    pub overflow_free: usize,
    /// The first word of the buckets.
    pub buckets: usize,
    /// The greatest number of buckets.
    pub buckets_max: usize,
    /// The first word of the overflow buckets.
    pub overflow: usize,
    /// The greatest number of overflow buckets.
    pub overflow_max: usize,
}

/// The words of an index that are not in its buckets.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct IndexState {
    /// The number of buckets.
    pub buckets: u64,
    /// The number of overflow buckets that were ever used.
    pub overflow_buckets: u64,
    /// The number + 1 of the first free overflow bucket, or 0.
    pub overflow_free: u64,
}

impl IndexState {
    /// The state of an empty index.
    pub const EMPTY: Self = Self { buckets: BUCKETS_MIN, overflow_buckets: 0, overflow_free: 0 };
}

/// An index in words.
#[derive(Debug)]
pub struct Index<W> {
    words: W,
    layout: IndexLayout,
}

/// A slot that was found, and where.
#[derive(Clone, Copy, Debug)]
pub struct Found {
    at: usize,
    /// The slot as it was read.
    pub slot: Slot,
}

/// The result of a search without the lock.
#[derive(Clone, Copy, Debug)]
pub enum Search {
    /// The item's slot.
    Found(Found),
    /// No item has the key.
    Missing,
    /// A writer is changing the chain: search again with the partition's lock held.
    Inconclusive,
}

/// The probable location of the item of a key.
#[derive(Clone, Copy, Debug)]
pub enum Guess {
    /// The item is probably at this location.
    At(Location),
    /// The slot can only be in this overflow bucket, which begins at this word, or in one after it.
    After(usize),
    /// The index has no slot for the hash.
    None,
}

/// A chain has no room for another slot: it has [`CHAIN_MAX`] buckets, or there is no memory for
/// another overflow bucket.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ChainFull;

/// The result of a walk along a chain.
enum Scan {
    Found(Found),
    Missing,
    /// The chain has more than [`CHAIN_MAX`] buckets.
    TooLong,
}

impl<W: Words> Index<W> {
    /// The index in these words, which is empty if they are all zero.
    ///
    /// # Panics
    /// If the layout has fewer buckets than an empty index needs, or more than the hash bits of
    /// slots can distinguish.
    pub fn new(words: W, layout: IndexLayout) -> Self {
        assert!(layout.buckets_max as u64 >= BUCKETS_MIN && layout.buckets_max <= 1 << BUCKET_BITS_MAX);
        if words.load(layout.count) == 0 {
            words.store(layout.count, BUCKETS_MIN);
        }
        Self { words, layout }
    }

    /// The memory of the index.
    pub fn words(&self) -> &W {
        &self.words
    }

    /// The state. While a writer changes the index, its parts may be inconsistent.
    pub fn state(&self) -> IndexState {
        IndexState {
            buckets: self.words.load(self.layout.count),
            overflow_buckets: self.words.load(self.layout.overflow_count),
            overflow_free: self.words.load(self.layout.overflow_free),
        }
    }

    /// Sets the state, for buckets that another index wrote. No other thread may use the index.
    pub fn restore(&self, state: IndexState) {
        self.words.store(self.layout.count, state.buckets);
        self.words.store(self.layout.overflow_count, state.overflow_buckets);
        self.words.store(self.layout.overflow_free, state.overflow_free);
    }

    /// Bytes of the buckets that are in use.
    pub fn bytes(&self) -> usize {
        let buckets = self.words.load(self.layout.count) + self.words.load(self.layout.overflow_count);
        usize::try_from(buckets).expect("fits the mapping") * BUCKET_BYTES
    }

    /// Searches the slot of a key, without the partition's lock.
    ///
    /// `is_key` compares the key of the item at a location. The location may be that of another
    /// item, but it is always one that was published and that has not been freed.
    #[inline]
    pub fn search(&self, hash: u64, mut is_key: impl FnMut(Location) -> bool) -> Search {
        for _ in 0..ATTEMPTS {
            let count = self.words.load(self.layout.count);
            let bucket = bucket_of(hash, count);
            let head_at = self.bucket(bucket);
            let version = version_of(self.words.load(head_at));
            let scan = self.scan(head_at, hash, &mut is_key);
            if let Scan::Found(found) = scan {
                return Search::Found(found);
            }
            // Items leave this chain only while its version is odd, and the bucket of a split is
            // counted before items leave the chain.
            let same_version = version.is_multiple_of(2) && version_of(self.words.load(head_at)) == version
                || Mutation::IgnoreVersion.is_active();
            let same_bucket = bucket_of(hash, self.words.load(self.layout.count)) == bucket
                || Mutation::IgnoreCount.is_active();
            let is_certain = same_version && same_bucket && matches!(scan, Scan::Missing);
            if is_certain {
                return Search::Missing;
            }
            std::hint::spin_loop();
        }
        Search::Inconclusive
    }

    /// Prefetches the bucket of a key.
    #[inline]
    pub fn prefetch(&self, hash: u64) {
        self.prefetch_bucket(self.bucket(bucket_of(hash, self.words.load(self.layout.count))));
    }

    /// Prefetches the bucket that begins at this word.
    #[inline]
    pub fn prefetch_bucket(&self, bucket: usize) {
        self.words.prefetch(bucket);
    }

    /// The probable location of the item of a key, from the first bucket of its chain alone.
    #[inline]
    pub fn guess(&self, hash: u64) -> Guess {
        let bucket = self.bucket(bucket_of(hash, self.words.load(self.layout.count)));
        match (self.guess_in(bucket, hash), self.next(bucket)) {
            (Some(location), _) => Guess::At(location),
            (None, Some(next)) => Guess::After(next),
            (None, None) => Guess::None,
        }
    }

    /// The location of the first item in this bucket whose key may have this hash.
    #[inline]
    pub fn guess_in(&self, bucket: usize, hash: u64) -> Option<Location> {
        let slots = (bucket + 1..bucket + BUCKET_WORDS).map(|at| Slot(self.words.load(at)));
        slots.into_iter().find(|slot| slot.matches_hash(hash)).map(Slot::location)
    }

    /// Searches the slot of a key. Must be called with the partition's lock held.
    pub fn search_locked(&self, hash: u64, mut is_key: impl FnMut(Location) -> bool) -> Option<Found> {
        let bucket = bucket_of(hash, self.words.load(self.layout.count));
        match self.scan(self.bucket(bucket), hash, &mut is_key) {
            Scan::Found(found) => Some(found),
            Scan::Missing => None,
            Scan::TooLong => {
                debug_assert!(false, "the chain of bucket {bucket} is longer than an insert makes one");
                None
            }
        }
    }

    /// Counts a read of a found item, up to [`READS_MAX`](super::slot::READS_MAX). Does nothing if
    /// the slot has changed.
    #[inline]
    pub fn count_read(&self, found: Found) {
        let read = found.slot.with_read();
        if read != found.slot {
            self.words.replace(found.at, found.slot.0, read.0);
        }
    }

    /// Publishes another slot for a found item. Must be called with the partition's lock held.
    pub fn replace(&self, found: Found, slot: Slot) {
        self.words.store(found.at, slot.0);
    }

    /// Removes a found item. Must be called with the partition's lock held.
    pub fn remove(&self, found: Found) {
        self.words.store(found.at, Slot::EMPTY.0);
    }

    /// Adds an item whose key is not in the index. Must be called with the partition's lock held.
    ///
    /// # Errors
    /// If the key's chain has no room. Nothing has changed then.
    pub fn insert(&self, hash: u64, slot: Slot) -> Result<(), ChainFull> {
        let bucket = bucket_of(hash, self.words.load(self.layout.count));
        self.insert_into(self.bucket(bucket), slot)
    }

    /// Whether a bucket should be added, for this number of items.
    #[must_use]
    pub fn wants_split(&self, items: u64) -> bool {
        let count = self.words.load(self.layout.count);
        let buckets_max = self.layout.buckets_max as u64;
        #[expect(clippy::cast_precision_loss, reason = "the numbers are far below 2^52")]
        let is_loaded = items as f64 > count as f64 * ITEMS_PER_BUCKET;
        is_loaded && count < buckets_max
    }

    /// Adds a bucket, and moves to it the items that belong there. Must be called with the
    /// partition's lock held.
    pub fn split(&self) {
        let count = self.words.load(self.layout.count);
        let size = prev_power_of_two(count);
        let (from, to) = (self.bucket(count - size), self.bucket(count));
        let moves = |slot: Slot| slot.hash_bits() & size != 0;
        self.advance_version(from);
        let mut stays: smallvec::SmallVec<[u64; 32]> = smallvec::SmallVec::new();
        let mut at = Some(from);
        while let Some(bucket) = at {
            for place in bucket + 1..bucket + BUCKET_WORDS {
                let slot = Slot(self.words.load(place));
                if slot.is_empty() {
                } else if !moves(slot) {
                    stays.push(slot.0);
                } else if self.insert_into(to, slot).is_err() {
                    // There is no memory for the new chain: nothing is moved, and the table is not
                    // split.
                    self.clear(to);
                    self.advance_version(from);
                    return;
                }
            }
            at = self.next(bucket);
        }
        self.words.store(self.layout.count, count + 1);
        self.rewrite(from, &stays);
        self.advance_version(from);
    }

    /// Calls `visit` for each slot. Must be called with the partition's lock held.
    pub fn for_each(&self, mut visit: impl FnMut(Found)) {
        for bucket in 0..self.words.load(self.layout.count) {
            self.for_each_of_chain(self.bucket(bucket), &mut visit);
        }
    }

    /// Calls `visit` for each slot in the chain of a bucket, and returns the number of the next
    /// bucket; `None` after the last one. Slots that move go to later buckets. Must be called with
    /// the partition's lock held.
    pub fn for_each_of_bucket(&self, bucket: u64, mut visit: impl FnMut(Found)) -> Option<u64> {
        let count = self.words.load(self.layout.count);
        if bucket < count {
            self.for_each_of_chain(self.bucket(bucket), &mut visit);
        }
        Some(bucket + 1).filter(|next| *next < count)
    }

    /// Calls `visit` for each slot in the chain of a key. Must be called with the partition's lock
    /// held.
    pub fn for_each_beside(&self, hash: u64, mut visit: impl FnMut(Found)) {
        let bucket = bucket_of(hash, self.words.load(self.layout.count));
        self.for_each_of_chain(self.bucket(bucket), &mut visit);
    }

    fn for_each_of_chain(&self, head_at: usize, visit: &mut impl FnMut(Found)) {
        let mut at = Some(head_at);
        while let Some(bucket) = at {
            for place in bucket + 1..bucket + BUCKET_WORDS {
                let slot = Slot(self.words.load(place));
                if !slot.is_empty() {
                    visit(Found { at: place, slot });
                }
            }
            at = self.next(bucket);
        }
    }

    #[inline]
    fn scan(&self, head_at: usize, hash: u64, is_key: &mut impl FnMut(Location) -> bool) -> Scan {
        let mut bucket = head_at;
        for _ in 0..CHAIN_MAX {
            for at in bucket + 1..bucket + BUCKET_WORDS {
                let slot = Slot(self.words.load(at));
                if slot.matches_hash(hash) && is_key(slot.location()) {
                    return Scan::Found(Found { at, slot });
                }
            }
            let Some(next) = self.next(bucket) else { return Scan::Missing };
            bucket = next;
        }
        Scan::TooLong
    }

    fn insert_into(&self, head_at: usize, slot: Slot) -> Result<(), ChainFull> {
        let mut bucket = head_at;
        let mut length = 1;
        loop {
            for at in bucket + 1..bucket + BUCKET_WORDS {
                if self.words.load(at) == 0 {
                    self.words.store(at, slot.0);
                    return Ok(());
                }
            }
            match self.next(bucket) {
                Some(next) => bucket = next,
                None if length < CHAIN_MAX || Mutation::ChainTooLong.is_active() => break,
                None => return Err(ChainFull),
            }
            length += 1;
        }
        let added = self.allocate_overflow()?;
        let at = self.overflow(added);
        self.words.store(at, 0);
        self.words.store(at + 1, slot.0);
        let head = self.words.load(bucket);
        self.words.store(bucket, head & !LINK_MASK | (added + 1));
        Ok(())
    }

    /// Stores these slots into a chain that has at least as many, and frees the buckets that become
    /// empty. The chain's version must be odd.
    fn rewrite(&self, head_at: usize, slots: &[u64]) {
        let mut left = slots.iter();
        let mut bucket = head_at;
        loop {
            for at in bucket + 1..bucket + BUCKET_WORDS {
                self.words.store(at, left.next().copied().unwrap_or(0));
            }
            if left.len() == 0 {
                break;
            }
            bucket = self.next(bucket).expect("the chain had as many slots");
        }
        self.cut(bucket);
    }

    /// Empties a chain that readers cannot reach.
    fn clear(&self, head_at: usize) {
        for at in head_at + 1..head_at + BUCKET_WORDS {
            self.words.store(at, 0);
        }
        self.cut(head_at);
    }

    /// Frees the overflow buckets after this one.
    fn cut(&self, bucket: usize) {
        let mut next = self.words.load(bucket) & LINK_MASK;
        self.words.store(bucket, self.words.load(bucket) & !LINK_MASK);
        while next != 0 {
            let at = self.overflow(next - 1);
            let after = self.words.load(at) & LINK_MASK;
            for place in at + 1..at + BUCKET_WORDS {
                self.words.store(place, 0);
            }
            self.words.store(at, self.words.load(self.layout.overflow_free));
            self.words.store(self.layout.overflow_free, next);
            next = after;
        }
    }

    fn allocate_overflow(&self) -> Result<u64, ChainFull> {
        let free = self.words.load(self.layout.overflow_free);
        if free != 0 {
            let after = self.words.load(self.overflow(free - 1)) & LINK_MASK;
            self.words.store(self.layout.overflow_free, after);
            return Ok(free - 1);
        }
        let used = self.words.load(self.layout.overflow_count);
        if used >= self.layout.overflow_max as u64 {
            return Err(ChainFull);
        }
        self.words.store(self.layout.overflow_count, used + 1);
        Ok(used)
    }

    #[inline]
    fn next(&self, bucket: usize) -> Option<usize> {
        let link = self.words.load(bucket) & LINK_MASK;
        if link == 0 { None } else { Some(self.overflow(link - 1)) }
    }

    #[inline]
    fn bucket(&self, number: u64) -> usize {
        self.layout.buckets + usize::try_from(number).expect("64 bits") * BUCKET_WORDS
    }

    #[inline]
    fn overflow(&self, number: u64) -> usize {
        self.layout.overflow + usize::try_from(number).expect("64 bits") * BUCKET_WORDS
    }

    fn advance_version(&self, head_at: usize) {
        if Mutation::SplitWithoutVersion.is_active() {
            return;
        }
        self.words.store(head_at, self.words.load(head_at).wrapping_add(VERSION_ONE));
    }
}

/// The bits of a head with the number + 1 of the next overflow bucket, or 0.
const LINK_MASK: u64 = u32::MAX as u64;
/// The lowest bit of the version in a head; the version has the upper 32 bits.
const VERSION_ONE: u64 = 1 << 32;

#[inline]
fn version_of(head: u64) -> u64 {
    head >> 32
}

/// The bucket of a key, for a number of buckets.
#[inline]
fn bucket_of(hash: u64, count: u64) -> u64 {
    let size = prev_power_of_two(count);
    let bucket = hash & (2 * size - 1);
    if bucket < count { bucket } else { bucket & (size - 1) }
}

#[inline]
fn prev_power_of_two(count: u64) -> u64 {
    1 << count.ilog2()
}

const _: () = assert!(SLOTS == 7 && BUCKET_BYTES == 64);
