//! The index of a store: a table of pointers to buckets. Its parts are called segments. Each
//! segment and each bucket is an object.
//!
//! A full bucket is replaced by a larger one. The client first writes the pointer to the new bucket
//! into the old one, so that no client adds an entry to it any more, and then changes the segment.
//! A client that reads the old bucket completes the replacement.

use aquifer_objects::pointer::Pointer;

use crate::layout::{self, Bucket, BucketContents, BucketEntry, Head, PointerTable};
use crate::mutation::Mutation;
use crate::objects::{Objects, Written};
use crate::store::KvError;

/// Number of buckets of one segment.
const SEGMENT_BUCKETS: usize = 1024;
/// Capacity of a new bucket in entries.
const INITIAL_CAPACITY: usize = 8;
/// Capacity of the largest bucket in entries: a conditional write has at most 32 KiB.
const ENTRIES_MAX: usize = 1364;
/// Binary logarithm of the maximum number of buckets.
pub const BUCKET_BITS_MAX: u32 = 22;
const SEGMENT_BITS: u32 = SEGMENT_BUCKETS.trailing_zeros();

/// The index of one store.
#[derive(Debug)]
pub struct Index {
    segments: Vec<IndexSegment>,
    /// The secret of the hash; `None` if an earlier version created the store.
    hash_secret: Option<[u64; 2]>,
    bytes: Vec<u8>,
}

/// A segment of the index.
#[derive(Debug)]
struct IndexSegment {
    pointer: Pointer,
    /// The content of the segment at its last read.
    table: Option<PointerTable>,
}

/// A bucket that was read.
#[derive(Debug)]
pub struct FoundBucket {
    /// The number of the bucket in the index.
    number: usize,
    /// The pointer in the segment.
    stored: Pointer,
    pointer: Pointer,
    /// The version of the bucket.
    pub version: u64,
    capacity: usize,
    /// The entries of the bucket.
    pub entries: Vec<BucketEntry>,
}

type Outcome<T, O> = Result<T, KvError<<O as Objects>::Error>>;

impl Index {
    /// Allocates the objects of an index for about `keys` keys. Returns the pointer to its head.
    ///
    /// # Errors
    /// If the heap fails.
    pub fn create<O: Objects>(objects: &mut O, keys: u64, hash_secret: [u64; 2]) -> Outcome<Pointer, O> {
        let buckets = (keys / INITIAL_CAPACITY as u64).next_power_of_two();
        let bits = buckets.trailing_zeros().clamp(SEGMENT_BITS, BUCKET_BITS_MAX);
        let table = PointerTable { first: 1, pointers: vec![None; SEGMENT_BUCKETS] };
        let segment = table.encode(SEGMENT_BUCKETS);
        let mut made = Vec::new();
        let created = (0..1_usize << (bits - SEGMENT_BITS)).try_for_each(|_| {
            made.push(objects.create(&segment)?);
            Ok(())
        });
        let head = Head { segments: made, hash_secret: Some(hash_secret) };
        let created = created.and_then(|()| objects.create(&head.encode()));
        if created.is_err() {
            for segment in head.segments {
                objects.free(segment).map_err(KvError::Objects)?;
            }
        }
        created.map_err(KvError::NotCreated)
    }

    /// Opens the index with this head.
    ///
    /// # Errors
    /// If the object is not a head, or the heap fails.
    pub fn open<O: Objects>(objects: &mut O, mut head: Pointer) -> Outcome<Self, O> {
        let mut bytes = Vec::new();
        let is_there = objects.read(&mut head, &mut bytes).map_err(KvError::Objects)?;
        let head = Head::decode(&bytes).filter(|_| is_there).ok_or(KvError::Damaged)?;
        let Head { segments, hash_secret } = head;
        let segments = segments.into_iter().map(|pointer| IndexSegment { pointer, table: None }).collect();
        Ok(Self { segments, hash_secret, bytes })
    }

    /// Whether keys can be looked up. Otherwise an earlier version with another hash created the
    /// store.
    #[must_use]
    pub fn is_current(&self) -> bool {
        self.hash_secret.is_some()
    }

    /// Hashes a key. Must be called only if the index [is current](Self::is_current).
    #[must_use]
    pub fn hash(&self, key: &[u8]) -> u64 {
        layout::hash(self.hash_secret.unwrap_or_default(), key)
    }

    /// Returns the number of buckets.
    #[must_use]
    pub fn buckets(&self) -> usize {
        self.segments.len() * SEGMENT_BUCKETS
    }

    /// Returns the number of the bucket for a hash. Buckets are in the order of hashes.
    #[must_use]
    pub fn number(&self, hash: u64) -> usize {
        let bits = self.buckets().trailing_zeros();
        usize::try_from(hash >> (u64::BITS - bits)).expect("less than the number of buckets")
    }

    /// Reads a bucket; `None` if it was never allocated.
    ///
    /// # Errors
    /// If the heap fails, or the store is damaged.
    pub fn bucket<O: Objects>(&mut self, objects: &mut O, number: usize) -> Outcome<Option<FoundBucket>, O> {
        let mut last_gone = None;
        loop {
            let Some(stored) = self.stored(objects, number)? else { return Ok(None) };
            if last_gone == Some(stored) {
                return Err(KvError::Damaged);
            }
            let mut pointer = stored;
            if !objects.read(&mut pointer, &mut self.bytes).map_err(KvError::Objects)? {
                // A larger bucket has replaced this one.
                last_gone = Some(stored);
                self.load(objects, number)?;
                continue;
            }
            let Bucket { version, contents } = Bucket::decode(&self.bytes).ok_or(KvError::Damaged)?;
            match contents {
                BucketContents::Moved(to) => {
                    self.replace(objects, number, Some(stored), to)?;
                }
                BucketContents::Entries(entries) => {
                    let capacity =
                        (self.bytes.len() - Bucket::bytes(0)) / (Bucket::bytes(1) - Bucket::bytes(0));
                    let capacity = capacity.min(ENTRIES_MAX);
                    return Ok(Some(FoundBucket { number, stored, pointer, version, capacity, entries }));
                }
            }
        }
    }

    /// Replaces the entries of a bucket, unless it was changed since it was read. Returns whether
    /// the entries were replaced.
    ///
    /// # Errors
    /// If the heap fails, or there are too many entries.
    pub fn write<O: Objects>(
        &mut self,
        objects: &mut O,
        found: &mut FoundBucket,
        entries: &[BucketEntry],
    ) -> Outcome<bool, O> {
        if entries.len() > found.capacity {
            return self.grow(objects, found, entries);
        }
        let bytes = Bucket::encode(found.version.wrapping_add(1), entries);
        let written =
            objects.write_if(&mut found.pointer, found.version, &bytes).map_err(KvError::Objects)?;
        Ok(matches!(written, Written::Done { .. }))
    }

    /// Replaces a bucket by a larger one with these entries, unless the bucket was changed since it
    /// was read. Returns whether the bucket was replaced.
    fn grow<O: Objects>(
        &mut self,
        objects: &mut O,
        found: &mut FoundBucket,
        entries: &[BucketEntry],
    ) -> Outcome<bool, O> {
        if entries.len() > ENTRIES_MAX {
            return Err(KvError::Full);
        }
        let larger = create_bucket(objects, (2 * found.capacity).clamp(entries.len(), ENTRIES_MAX), entries)?;
        let bytes = Bucket::encode_moved(found.version.wrapping_add(1), larger);
        let mut mark_moved = || objects.write_if(&mut found.pointer, found.version, &bytes);
        let is_done = Mutation::GrowUnmarked.is_active()
            || matches!(mark_moved().map_err(KvError::Objects)?, Written::Done { .. });
        if is_done {
            self.replace(objects, found.number, Some(found.stored), larger)?;
        } else {
            objects.free(larger).map_err(KvError::Objects)?;
        }
        Ok(is_done)
    }

    /// Adds a bucket with one entry, unless another client has added it. Returns whether it was
    /// added.
    ///
    /// # Errors
    /// If the heap fails, or the store is damaged.
    pub fn add_bucket<O: Objects>(
        &mut self,
        objects: &mut O,
        number: usize,
        entry: BucketEntry,
    ) -> Outcome<bool, O> {
        let bucket = create_bucket(objects, INITIAL_CAPACITY, &[entry])?;
        let is_done = self.replace(objects, number, None, bucket)?;
        if !is_done {
            objects.free(bucket).map_err(KvError::Objects)?;
        }
        Ok(is_done)
    }

    /// Replaces the pointer to bucket `number` in its segment, if the pointer is `last`, and frees
    /// `last`. Returns whether the pointer was replaced.
    fn replace<O: Objects>(
        &mut self,
        objects: &mut O,
        number: usize,
        last: Option<Pointer>,
        next: Pointer,
    ) -> Outcome<bool, O> {
        loop {
            let slot = number % SEGMENT_BUCKETS;
            let mut table = self.load(objects, number)?.clone();
            if table.pointers[slot] != last {
                return Ok(false);
            }
            let version = table.first;
            table.first = table.first.wrapping_add(1);
            table.pointers[slot] = Some(next);
            let segment = &mut self.segments[number / SEGMENT_BUCKETS];
            let bytes = table.encode(slot + 1);
            match objects.write_if(&mut segment.pointer, version, &bytes).map_err(KvError::Objects)? {
                Written::Done { .. } => {
                    segment.table = Some(table);
                    if let Some(last) = last {
                        objects.free(last).map_err(KvError::Objects)?;
                    }
                    return Ok(true);
                }
                Written::Changed => {}
                Written::Gone => return Err(KvError::Damaged),
            }
        }
    }

    /// Returns the pointer to a bucket. Trusts a cached pointer, but reads a cached absence again.
    fn stored<O: Objects>(&mut self, objects: &mut O, number: usize) -> Outcome<Option<Pointer>, O> {
        let slot = number % SEGMENT_BUCKETS;
        let known = self.segments[number / SEGMENT_BUCKETS].table.as_ref();
        if let Some(pointer) = known.and_then(|table| table.pointers[slot]) {
            return Ok(Some(pointer));
        }
        Ok(self.load(objects, number)?.pointers[slot])
    }

    /// Reads the segment of a bucket.
    fn load<O: Objects>(&mut self, objects: &mut O, number: usize) -> Outcome<&PointerTable, O> {
        let segment = &mut self.segments[number / SEGMENT_BUCKETS];
        if !objects.read(&mut segment.pointer, &mut self.bytes).map_err(KvError::Objects)? {
            return Err(KvError::Damaged);
        }
        let table = PointerTable::decode(&self.bytes, SEGMENT_BUCKETS).ok_or(KvError::Damaged)?;
        Ok(segment.table.insert(table))
    }

    /// Frees all buckets, the segments, and the head. No client may use the store afterwards.
    ///
    /// # Errors
    /// If the heap fails.
    pub fn free<O: Objects>(mut self, objects: &mut O, head: Pointer) -> Outcome<(), O> {
        for number in (0..self.buckets()).step_by(SEGMENT_BUCKETS) {
            let buckets: Vec<Pointer> =
                self.load(objects, number)?.pointers.iter().flatten().copied().collect();
            for pointer in buckets {
                objects.free(pointer).map_err(KvError::Objects)?;
            }
            objects.free(self.segments[number / SEGMENT_BUCKETS].pointer).map_err(KvError::Objects)?;
        }
        objects.free(head).map_err(KvError::Objects)
    }
}

fn create_bucket<O: Objects>(
    objects: &mut O,
    capacity: usize,
    entries: &[BucketEntry],
) -> Outcome<Pointer, O> {
    let mut bytes = Bucket::encode(1, entries);
    bytes.resize(Bucket::bytes(capacity), 0);
    objects.create(&bytes).map_err(KvError::NotCreated)
}
