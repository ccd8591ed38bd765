//! The operations of a store.
//!
//! A key's value is in an *item*, which an entry of a bucket points to. Each operation takes effect
//! by one conditional write:
//!
//! | operation | takes effect when |
//! |---|---|
//! | put of a new key | the bucket has an entry for the item |
//! | put of a key with a value of the same size class | the item has the value |
//! | put of another value | the old item is marked as moved to the new one |
//! | delete | the item is marked as dead |
//!
//! The later steps change a bucket and free an item. The next client that finds them undone
//! completes them. So a cached pointer is valid for as long as the item is live.

use std::hash::{BuildHasher, RandomState};

use aquifer_objects::class::{OBJECT_BYTES_MAX, SLOT_BYTES_MAX};
use aquifer_objects::header::HEADER_BYTES;
use aquifer_objects::pointer::Pointer;

use crate::cache::ItemCache;
use crate::catalog::{Catalog, STORES_MAX, is_name};
use crate::index::{FoundBucket, Index};
use crate::layout::{BucketEntry, DEAD, Item, LIVE};
use crate::mutation::Mutation;
use crate::objects::{Objects, Written};

/// Maximum length of a key in bytes.
pub const KEY_BYTES_MAX: usize = 32_000;
/// Maximum length of a value in bytes.
pub const VALUE_BYTES_MAX: usize = OBJECT_BYTES_MAX as usize - KEY_BYTES_MAX - 64;
/// Maximum length in bytes of an item that is changed in place.
const IN_PLACE_BYTES_MAX: usize = (SLOT_BYTES_MAX - HEADER_BYTES) as usize;
/// Binary logarithm of the number of places of the cache.
const CACHE_BITS: u32 = 16;

/// The error of an operation of a store.
#[derive(Debug, thiserror::Error)]
pub enum KvError<E: std::error::Error> {
    /// The heap failed.
    #[error(transparent)]
    Objects(E),
    /// The heap could not allocate an object. Nothing was changed.
    #[error(transparent)]
    NotCreated(E),
    /// No store has this name.
    #[error("there is no store of this name: create one (aquifer kv create)")]
    NoStore,
    /// A store of this name exists already.
    #[error("a store of this name already exists")]
    Exists,
    /// The name of the store is not valid.
    #[error("a store has a name of 1 to 48 bytes without control characters")]
    Name,
    /// The heap has too many stores.
    #[error("the heap already has {STORES_MAX} stores, which is the limit")]
    TooManyStores,
    /// The key is empty or too long.
    #[error("a key has 1 to {KEY_BYTES_MAX} bytes")]
    Key,
    /// The value is too long.
    #[error("a value has at most {VALUE_BYTES_MAX} bytes")]
    Value,
    /// A bucket cannot grow any more.
    #[error("the store has far more keys than it was created for: create another one for more keys")]
    Full,
    /// An earlier version of this program created the store.
    #[error(
        "an earlier version of aquifer, with another hash of keys, created the store: create it again \
         (aquifer kv drop, aquifer kv create)"
    )]
    Version,
    /// Another program uses the heap's root object for something else.
    #[error("the heap's root object is not a catalog of stores: another program uses it")]
    OtherRoot,
    /// An object of the store is missing or malformed.
    #[error("the store is damaged")]
    Damaged,
}

/// One client's access to a store.
#[derive(Debug)]
pub struct KvStore<O> {
    objects: O,
    index: Index,
    cache: ItemCache,
    bytes: Vec<u8>,
    batch: Vec<Vec<u8>>,
    /// The last missing item, with the version of the bucket whose entry points to it.
    last_missing: Option<(u64, Pointer)>,
}

/// The result of a search for a key in a bucket.
enum Found {
    /// An item with the value of the key.
    Live { at: usize, pointer: Pointer },
    /// An item that is marked as dead.
    Dead { at: usize },
    /// The bucket has no item of the key.
    Absent,
    /// The bucket was changed by another client or by this search, and must be read again.
    Changed,
}

/// A key with its value.
pub type KeyValue = (Vec<u8>, Vec<u8>);

/// Decodes an item: the key and the value if it is live, or the pointer if it was moved. `None` if
/// the bytes are damaged.
fn live_item(bytes: &[u8]) -> Option<Result<Option<KeyValue>, Pointer>> {
    Some(match Item::decode(bytes)? {
        Item::Live { key, value } => Ok(Some((key.to_vec(), value.to_vec()))),
        Item::Dead { .. } => Ok(None),
        Item::Moved(to) => Err(to),
    })
}

type Outcome<T, O> = Result<T, KvError<<O as Objects>::Error>>;

impl<O: Objects> KvStore<O> {
    /// Creates a store for about `keys` keys. With more keys, it is slower.
    ///
    /// # Errors
    /// If a store of this name exists, or the heap fails.
    pub fn create(objects: &mut O, name: &str, keys: u64) -> Outcome<(), O> {
        let random = RandomState::new();
        Self::create_with_secret(objects, name, keys, [random.hash_one(0_u8), random.hash_one(1_u8)])
    }

    /// Creates a store whose hash has this secret.
    ///
    /// # Errors
    /// If a store of this name exists, or the heap fails.
    pub fn create_with_secret(
        objects: &mut O,
        name: &str,
        keys: u64,
        hash_secret: [u64; 2],
    ) -> Outcome<(), O> {
        if !is_name(name) {
            return Err(KvError::Name);
        }
        let mut head = None;
        loop {
            let mut catalog = Catalog::read(objects)?;
            if catalog.stores.iter().any(|(other, _)| other == name) {
                if let Some(head) = head {
                    Index::open(objects, head)?.free(objects, head)?;
                }
                return Err(KvError::Exists);
            }
            let head = match head {
                Some(head) => head,
                None => *head.insert(Index::create(objects, keys, hash_secret)?),
            };
            catalog.stores.push((name.to_owned(), head));
            if catalog.write(objects)? {
                return Ok(());
            }
        }
    }

    /// Opens a store.
    ///
    /// # Errors
    /// If no store has this name, if an earlier version created it, or if the heap fails.
    pub fn open(objects: O, name: &str) -> Outcome<Self, O> {
        let store = Self::open_any(objects, name)?;
        if store.index.is_current() { Ok(store) } else { Err(KvError::Version) }
    }

    /// Opens a store of this or of an earlier version.
    fn open_any(mut objects: O, name: &str) -> Outcome<Self, O> {
        let catalog = Catalog::read(&mut objects)?;
        let head = catalog.stores.iter().find(|(other, _)| other == name).ok_or(KvError::NoStore)?.1;
        let index = Index::open(&mut objects, head)?;
        let cache = ItemCache::new(CACHE_BITS);
        Ok(Self { objects, index, cache, bytes: Vec::new(), batch: Vec::new(), last_missing: None })
    }

    /// Opens a store, or creates it for about `keys` keys if no store has this name.
    ///
    /// # Errors
    /// If the heap fails.
    pub fn open_or_create(mut objects: O, name: &str, keys: u64) -> Outcome<Self, O> {
        match Self::create(&mut objects, name, keys) {
            Ok(()) | Err(KvError::Exists) => Self::open(objects, name),
            Err(error) => Err(error),
        }
    }

    /// Deletes a store with all its keys. No client may use it afterwards.
    ///
    /// # Errors
    /// If no store has this name, or the heap fails.
    pub fn drop_store(objects: O, name: &str) -> Outcome<(), O> {
        let mut store = Self::open_any(objects, name)?;
        let head = loop {
            let mut catalog = Catalog::read(&mut store.objects)?;
            let at = catalog.stores.iter().position(|(other, _)| other == name).ok_or(KvError::NoStore)?;
            let (_, head) = catalog.stores.remove(at);
            if catalog.write(&mut store.objects)? {
                break head;
            }
        };
        // Opens the removed head, because another client may have created the store again since
        // `open_any`.
        store.index = Index::open(&mut store.objects, head)?;
        for number in 0..store.index.buckets() {
            let Some(bucket) = store.index.bucket(&mut store.objects, number)? else { continue };
            for entry in bucket.entries {
                store.objects.free(entry.item).map_err(KvError::Objects)?;
            }
        }
        store.index.free(&mut store.objects, head)
    }

    /// The heap of the store.
    pub fn objects(&self) -> &O {
        &self.objects
    }

    /// Returns the value of a key; `None` if the store does not have the key.
    ///
    /// # Errors
    /// If the heap fails.
    pub fn get(&mut self, key: &[u8]) -> Outcome<Option<Vec<u8>>, O> {
        let hash = self.index.hash(key);
        if let Some(value) = self.get_cached(key, hash)? {
            return Ok(Some(value));
        }
        self.get_indexed(key, hash)
    }

    /// Returns the values of several keys, as [`Self::get`]. Items with a cached pointer are read
    /// concurrently.
    ///
    /// # Errors
    /// If the heap fails.
    pub fn get_many(&mut self, keys: &[&[u8]]) -> Outcome<Vec<Option<Vec<u8>>>, O> {
        let mut values = vec![None; keys.len()];
        let known =
            keys.iter().enumerate().filter_map(|(at, key)| Some((at, self.cache.get(self.index.hash(key))?)));
        let (places, mut pointers): (Vec<usize>, Vec<Pointer>) = known.unzip();
        self.batch.resize_with(self.batch.len().max(places.len()), Vec::new);
        let outs = &mut self.batch[..places.len()];
        if self.objects.read_many(&mut pointers, outs).map_err(KvError::Objects)? {
            for (at, bytes) in places.into_iter().zip(outs) {
                if let Some(Item::Live { key, value }) = Item::decode(bytes)
                    && key == keys[at]
                {
                    values[at] = Some(value.to_vec());
                }
            }
        }
        for (value, key) in values.iter_mut().zip(keys) {
            if value.is_none() {
                *value = self.get(key)?;
            }
        }
        Ok(values)
    }

    /// Reads a value with the cached pointer; `None` if there is no valid one.
    fn get_cached(&mut self, key: &[u8], hash: u64) -> Outcome<Option<Vec<u8>>, O> {
        let Some(mut pointer) = self.cache.get(hash) else { return Ok(None) };
        loop {
            let is_there = self.read(&mut pointer)?;
            match if is_there { Item::decode(&self.bytes) } else { None } {
                Some(Item::Live { key: found, value }) if found == key => {
                    let value = value.to_vec();
                    self.cache.put(hash, pointer, self.cache.is_old(hash));
                    return Ok(Some(value));
                }
                Some(Item::Moved(to)) => pointer = to,
                _ => {
                    self.cache.remove(hash);
                    return Ok(None);
                }
            }
        }
    }

    /// Reads a value with the index.
    fn get_indexed(&mut self, key: &[u8], hash: u64) -> Outcome<Option<Vec<u8>>, O> {
        let number = self.index.number(hash);
        loop {
            let Some(mut bucket) = self.index.bucket(&mut self.objects, number)? else { return Ok(None) };
            match self.find(&mut bucket, key, hash)? {
                Found::Live { pointer, .. } => {
                    self.cache.put(hash, pointer, false);
                    return match Item::decode(&self.bytes) {
                        Some(Item::Live { value, .. }) => Ok(Some(value.to_vec())),
                        _ => Err(KvError::Damaged),
                    };
                }
                Found::Dead { .. } | Found::Absent => return Ok(None),
                Found::Changed => {}
            }
        }
    }

    /// Sets the value of a key.
    ///
    /// # Errors
    /// If the heap is full or fails. Then the key has the old or the new value.
    pub fn put(&mut self, key: &[u8], value: &[u8]) -> Outcome<(), O> {
        if key.is_empty() || key.len() > KEY_BYTES_MAX {
            return Err(KvError::Key);
        }
        if value.len() > VALUE_BYTES_MAX {
            return Err(KvError::Value);
        }
        let (hash, item) = (self.index.hash(key), Item::encode(key, value));
        // An item at an old address is replaced, so that the address becomes free.
        let is_old = self.cache.is_old(hash);
        if !is_old && self.put_cached(key, hash, &item)? {
            return Ok(());
        }
        let number = self.index.number(hash);
        let mut staged = None;
        let done = loop {
            match self.try_put(key, (hash, number), (&item, !is_old), &mut staged) {
                Ok(false) => {}
                Ok(true) => break Ok(()),
                Err(error) => break Err(error),
            }
        };
        // After any other error, a bucket may have an entry for the item.
        let is_unused = matches!(done, Ok(()) | Err(KvError::NotCreated(_) | KvError::Full));
        if let Some(unused) = staged.filter(|_| is_unused) {
            let freed = self.objects.free(unused).map_err(KvError::Objects);
            return done.and(freed);
        }
        done
    }

    /// Writes a value in place with the cached pointer. Returns false if there is no valid pointer.
    fn put_cached(&mut self, key: &[u8], hash: u64, item: &[u8]) -> Outcome<bool, O> {
        let Some(mut pointer) = self.cache.get(hash).filter(|pointer| self.fits_in_place(*pointer, item))
        else {
            return Ok(false);
        };
        // Another key may have the same hash.
        if !self.read(&mut pointer)? {
            return Ok(false);
        }
        match Item::decode(&self.bytes) {
            Some(Item::Live { key: found, .. }) if found == key => self.write_in_place(pointer, hash, item),
            _ => Ok(false),
        }
    }

    fn fits_in_place(&self, pointer: Pointer, item: &[u8]) -> bool {
        item.len() <= IN_PLACE_BYTES_MAX && self.objects.is_of_class(pointer, item.len())
    }

    fn write_in_place(&mut self, mut pointer: Pointer, hash: u64, item: &[u8]) -> Outcome<bool, O> {
        match self.objects.write_if(&mut pointer, LIVE, item).map_err(KvError::Objects)? {
            Written::Done { is_old } => {
                self.cache.put(hash, pointer, is_old);
                Ok(true)
            }
            Written::Changed | Written::Gone => Ok(false),
        }
    }

    /// Tries once to set the value of a key, in place if `may_stay` and the value fits. Returns
    /// whether it was set. `staged`: an item with the value that no bucket has an entry for yet.
    fn try_put(
        &mut self,
        key: &[u8],
        (hash, number): (u64, usize),
        (item, may_stay): (&[u8], bool),
        staged: &mut Option<Pointer>,
    ) -> Outcome<bool, O> {
        let bucket = self.index.bucket(&mut self.objects, number)?;
        let (mut bucket, found) = match bucket {
            Some(mut bucket) => {
                let found = self.find(&mut bucket, key, hash)?;
                (Some(bucket), found)
            }
            None => (None, Found::Absent),
        };
        if let Found::Changed = found {
            return Ok(false);
        }
        if let Found::Live { pointer, .. } = found
            && may_stay
            && self.fits_in_place(pointer, item)
        {
            return self.write_in_place(pointer, hash, item);
        }
        let new = match *staged {
            Some(staged) => staged,
            None => *staged.insert(self.objects.create(item).map_err(KvError::NotCreated)?),
        };
        let entry = BucketEntry { hash, item: new };
        let is_done = match (&mut bucket, found) {
            (None, _) => self.index.add_bucket(&mut self.objects, number, entry)?,
            (Some(bucket), Found::Live { at, mut pointer }) => {
                let moved = Item::encode_moved(new);
                let is_done = Mutation::ReplaceUnmarked.is_active() || self.mark(&mut pointer, &moved)?;
                if is_done {
                    *staged = None;
                    if !self.replace_entry(bucket, at, Some(entry))? {
                        self.remove_dead(key, (hash, number))?;
                    }
                }
                is_done
            }
            (Some(bucket), Found::Dead { at }) => self.replace_entry(bucket, at, Some(entry))?,
            (Some(bucket), _) => {
                let mut entries = bucket.entries.clone();
                entries.push(entry);
                self.index.write(&mut self.objects, bucket, &entries)?
            }
        };
        if is_done {
            *staged = None;
            self.cache.put(hash, new, false);
        }
        Ok(is_done)
    }

    /// Deletes a key. Returns whether it had a value.
    ///
    /// # Errors
    /// If the heap fails. Then the key may have been deleted.
    pub fn delete(&mut self, key: &[u8]) -> Outcome<bool, O> {
        let hash = self.index.hash(key);
        let number = self.index.number(hash);
        self.cache.remove(hash);
        loop {
            let Some(mut bucket) = self.index.bucket(&mut self.objects, number)? else { return Ok(false) };
            match self.find(&mut bucket, key, hash)? {
                Found::Live { at, mut pointer } => {
                    if Mutation::DeleteUnmarked.is_active() || self.mark(&mut pointer, &DEAD.to_le_bytes())? {
                        if !self.replace_entry(&mut bucket, at, None)? {
                            self.remove_dead(key, (hash, number))?;
                        }
                        return Ok(true);
                    }
                }
                Found::Dead { .. } => {
                    self.remove_dead(key, (hash, number))?;
                    return Ok(false);
                }
                Found::Absent => return Ok(false),
                Found::Changed => {}
            }
        }
    }

    /// Marks an item by new first bytes, if it is live. Returns whether it was marked.
    fn mark(&mut self, pointer: &mut Pointer, bytes: &[u8]) -> Outcome<bool, O> {
        let written = self.objects.write_if(pointer, LIVE, bytes).map_err(KvError::Objects)?;
        Ok(matches!(written, Written::Done { .. }))
    }

    /// Removes a dead item of a key from its bucket, and completes replacements of moved ones.
    fn remove_dead(&mut self, key: &[u8], (hash, number): (u64, usize)) -> Outcome<(), O> {
        loop {
            let Some(mut bucket) = self.index.bucket(&mut self.objects, number)? else { return Ok(()) };
            match self.find(&mut bucket, key, hash)? {
                Found::Dead { at } if self.replace_entry(&mut bucket, at, None)? => return Ok(()),
                Found::Dead { .. } | Found::Changed => {}
                Found::Live { .. } | Found::Absent => return Ok(()),
            }
        }
    }

    /// Returns the keys of one bucket with their values, and the number of the next bucket, or
    /// `None` after the last one. A scan returns each key that exists during all of it once.
    ///
    /// # Errors
    /// If the heap fails.
    pub fn scan(&mut self, number: usize) -> Outcome<(Vec<KeyValue>, Option<usize>), O> {
        let next = Some(number + 1).filter(|next| *next < self.index.buckets());
        loop {
            let Some(bucket) = self.index.bucket(&mut self.objects, number)? else {
                return Ok((Vec::new(), next));
            };
            if let Some(items) = self.items(&bucket.entries)? {
                return Ok((items, next));
            }
            if let Some(first) = bucket.entries.first() {
                self.record_missing(bucket.version, first.item)?;
            }
        }
    }

    /// Reads the live items of a bucket; `None` if the bucket was changed since it was read.
    fn items(&mut self, entries: &[BucketEntry]) -> Outcome<Option<Vec<KeyValue>>, O> {
        let mut pointers: Vec<Pointer> = entries.iter().map(|entry| entry.item).collect();
        self.batch.resize_with(self.batch.len().max(entries.len()), Vec::new);
        let outs = &mut self.batch[..entries.len()];
        if !self.objects.read_many(&mut pointers, outs).map_err(KvError::Objects)? {
            return Ok(None);
        }
        let mut items = Vec::with_capacity(entries.len());
        for at in 0..entries.len() {
            match live_item(&self.batch[at]).ok_or(KvError::Damaged)? {
                Ok(item) => items.extend(item),
                Err(moved) => match self.moved_item(moved)? {
                    Some(item) => items.extend(item),
                    None => return Ok(None),
                },
            }
        }
        Ok(Some(items))
    }

    /// Reads the replacement of a moved item, and returns it if it is live; `None` if it was freed.
    fn moved_item(&mut self, mut pointer: Pointer) -> Outcome<Option<Option<KeyValue>>, O> {
        while self.read(&mut pointer)? {
            match live_item(&self.bytes).ok_or(KvError::Damaged)? {
                Ok(item) => return Ok(Some(item)),
                Err(moved) => pointer = moved,
            }
        }
        Ok(None)
    }

    /// Returns the number of a key's bucket, with which a scan may begin.
    #[must_use]
    pub fn bucket_of(&self, key: &[u8]) -> usize {
        self.index.number(self.index.hash(key))
    }

    /// Records a missing item of a bucket. Clients change the bucket before they free an item, so
    /// the same item cannot be missing in the same version twice.
    ///
    /// # Errors
    /// [`KvError::Damaged`] if it was the last missing item, too.
    fn record_missing(&mut self, version: u64, item: Pointer) -> Outcome<(), O> {
        match self.last_missing.replace((version, item)) {
            last if last == Some((version, item)) => Err(KvError::Damaged),
            _ => Ok(()),
        }
    }

    fn read(&mut self, pointer: &mut Pointer) -> Outcome<bool, O> {
        self.objects.read(pointer, &mut self.bytes).map_err(KvError::Objects)
    }

    /// Searches a bucket for a key. The bytes of a live item are in `self.bytes`. Completes the
    /// replacement of a moved item.
    fn find(&mut self, bucket: &mut FoundBucket, key: &[u8], hash: u64) -> Outcome<Found, O> {
        for at in 0..bucket.entries.len() {
            let BucketEntry { hash: other, item } = bucket.entries[at];
            if other != hash {
                continue;
            }
            let mut pointer = item;
            if !self.read(&mut pointer)? {
                self.record_missing(bucket.version, item)?;
                return Ok(Found::Changed);
            }
            match Item::decode(&self.bytes).ok_or(KvError::Damaged)? {
                Item::Live { key: found, .. } if found == key => return Ok(Found::Live { at, pointer }),
                Item::Dead { key: found } if found == key => return Ok(Found::Dead { at }),
                Item::Live { .. } | Item::Dead { .. } => {}
                Item::Moved(to) => {
                    self.replace_entry(bucket, at, Some(BucketEntry { hash, item: to }))?;
                    return Ok(Found::Changed);
                }
            }
        }
        Ok(Found::Absent)
    }

    /// Replaces or removes an entry of a bucket, and frees its item. Returns false if the bucket
    /// was changed since it was read.
    fn replace_entry(
        &mut self,
        bucket: &mut FoundBucket,
        at: usize,
        next: Option<BucketEntry>,
    ) -> Outcome<bool, O> {
        let mut entries = bucket.entries.clone();
        let last = match next {
            Some(next) => std::mem::replace(&mut entries[at], next),
            None => entries.swap_remove(at),
        };
        let is_done = self.index.write(&mut self.objects, bucket, &entries)?;
        if is_done {
            self.objects.free(last.item).map_err(KvError::Objects)?;
        }
        Ok(is_done)
    }
}
