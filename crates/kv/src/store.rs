//! The operations of a store.
//!
//! A key's value is in an *item*, which a bucket names. Each operation takes effect by one
//! conditional write:
//!
//! | operation | takes effect when |
//! |---|---|
//! | put of a new key | the bucket names the item |
//! | put of a key with a value of the same size class | the item has the value |
//! | put of another value | the old item says that the new one has the value |
//! | delete | the item says that the key was deleted |
//!
//! What follows after that (a bucket is changed, an item freed) is completed by the client that
//! meets it.
//! So an item that a client remembers is right for as long as it is live.

use std::hash::{BuildHasher, RandomState};

use aquifer_objects::class::{OBJECT_BYTES_MAX, SLOT_BYTES_MAX};
use aquifer_objects::header::HEADER_BYTES;
use aquifer_objects::pointer::Pointer;

use crate::cache::ItemCache;
use crate::catalog::{Catalog, STORES_MAX, is_name};
use crate::index::{FoundBucket, Index};
use crate::layout::{DEAD, Entry, Item, LIVE};
use crate::mutation::Mutation;
use crate::objects::{Objects, Written};

/// Longest key, in bytes.
pub const KEY_BYTES_MAX: usize = 32_000;
/// Longest value, in bytes.
pub const VALUE_BYTES_MAX: usize = OBJECT_BYTES_MAX as usize - KEY_BYTES_MAX - 64;
/// Longest item that is changed in place.
const IN_PLACE_BYTES_MAX: usize = (SLOT_BYTES_MAX - HEADER_BYTES) as usize;
/// Places of the cache, as a power of two.
const CACHE_BITS: u32 = 16;

/// Why an operation of a store failed.
#[derive(Debug, thiserror::Error)]
pub enum KvError<E: std::error::Error> {
    /// The heap failed.
    #[error(transparent)]
    Objects(E),
    /// An object could not be allocated. Nothing was changed.
    #[error(transparent)]
    NotCreated(E),
    /// There is no such store.
    #[error("there is no store of this name: make one (aquifer kv create)")]
    NoStore,
    /// There is one already.
    #[error("there is a store of this name already")]
    Exists,
    /// The name cannot be that of a store.
    #[error("a store has a name of 1 to 48 bytes without control characters")]
    Name,
    /// The heap has too many stores.
    #[error("the heap has {STORES_MAX} stores, which is its limit")]
    TooManyStores,
    /// The key is empty or too long.
    #[error("a key has 1 to {KEY_BYTES_MAX} bytes")]
    Key,
    /// The value is too long.
    #[error("a value has at most {VALUE_BYTES_MAX} bytes")]
    Value,
    /// A bucket cannot grow any more.
    #[error("the store has far more keys than it was made for: make another one for more keys")]
    Full,
    /// An earlier version of this program has made the store.
    #[error(
        "an earlier version of aquifer, with another hash of keys, has made the store: make it anew \
         (aquifer kv drop, aquifer kv create)"
    )]
    Version,
    /// Another program uses the heap's root object for something else.
    #[error("the heap's root object is no catalog of stores: another program uses it")]
    OtherRoot,
    /// What was read is not what a store consists of.
    #[error("the store is damaged")]
    Damaged,
}

/// A store, as one client uses it.
#[derive(Debug)]
pub struct KvStore<O> {
    objects: O,
    index: Index,
    cache: ItemCache,
    bytes: Vec<u8>,
    batch: Vec<Vec<u8>>,
    /// The version of the last bucket in which an item was gone, and the item.
    gone: Option<(u64, Pointer)>,
}

/// What a bucket has of a key.
enum Found {
    /// An item with its value.
    Live { at: usize, pointer: Pointer },
    /// An item that says that it was deleted.
    Dead { at: usize },
    /// Nothing.
    Nothing,
    /// The bucket was changed meanwhile, or had to be: it must be read again.
    Again,
}

/// A key with its value.
pub type KeyValue = (Vec<u8>, Vec<u8>);

/// The key and the value of a live item, or where it was moved; `None` if the bytes are damaged.
fn live_item(bytes: &[u8]) -> Option<Result<Option<KeyValue>, Pointer>> {
    Some(match Item::decode(bytes)? {
        Item::Live { key, value } => Ok(Some((key.to_vec(), value.to_vec()))),
        Item::Dead { .. } => Ok(None),
        Item::Moved(to) => Err(to),
    })
}

type Outcome<T, O> = Result<T, KvError<<O as Objects>::Error>>;

impl<O: Objects> KvStore<O> {
    /// Makes a store for about `keys` keys. It may have more, and is slower then.
    ///
    /// # Errors
    /// If there is one of this name, or the heap fails.
    pub fn create(objects: &mut O, name: &str, keys: u64) -> Outcome<(), O> {
        let random = RandomState::new();
        Self::create_with_secret(objects, name, keys, [random.hash_one(0_u8), random.hash_one(1_u8)])
    }

    /// Makes a store whose hash has this secret.
    ///
    /// # Errors
    /// If there is one of this name, or the heap fails.
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
    /// If there is none of this name, if an earlier version has made it, or if the heap fails.
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
        Ok(Self { objects, index, cache, bytes: Vec::new(), batch: Vec::new(), gone: None })
    }

    /// Opens a store, and makes it for about `keys` keys if there is none of this name.
    ///
    /// # Errors
    /// If the heap fails.
    pub fn open_or_create(mut objects: O, name: &str, keys: u64) -> Outcome<Self, O> {
        match Self::create(&mut objects, name, keys) {
            Ok(()) | Err(KvError::Exists) => Self::open(objects, name),
            Err(error) => Err(error),
        }
    }

    /// Deletes a store with all its keys. No client may use it any more.
    ///
    /// # Errors
    /// If there is none of this name, or the heap fails.
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
        // Of the name that was removed: another client may have made the store anew.
        store.index = Index::open(&mut store.objects, head)?;
        for number in 0..store.index.buckets() {
            let Some(bucket) = store.index.bucket(&mut store.objects, number)? else { continue };
            for entry in bucket.entries {
                store.objects.free(entry.item).map_err(KvError::Objects)?;
            }
        }
        store.index.free(&mut store.objects, head)
    }

    /// The heap.
    pub fn objects(&self) -> &O {
        &self.objects
    }

    /// The value of a key; `None` if it has none.
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

    /// The values of several keys, as [`Self::get`] finds them. The items that this client
    /// remembers are read side by side.
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
                Found::Dead { .. } | Found::Nothing => return Ok(None),
                Found::Again => {}
            }
        }
    }

    /// Gives a key a value.
    ///
    /// # Errors
    /// If the heap is full or fails. Then the key has either value.
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
        // After another error a bucket may name the item.
        let is_unused = matches!(done, Ok(()) | Err(KvError::NotCreated(_) | KvError::Full));
        if let Some(unused) = staged.filter(|_| is_unused) {
            let freed = self.objects.free(unused).map_err(KvError::Objects);
            return done.and(freed);
        }
        done
    }

    /// Writes a value into the item that this client remembers, if it is that of the key. Returns
    /// whether it was done.
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

    /// Tries once to give a key a value, in place if that is possible and permitted. Returns
    /// whether it was done. `staged`: an item with the value that no bucket names yet.
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
            None => (None, Found::Nothing),
        };
        if let Found::Again = found {
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
        let entry = Entry { hash, item: new };
        let is_done = match (&mut bucket, found) {
            (None, _) => self.index.add_bucket(&mut self.objects, number, entry)?,
            (Some(bucket), Found::Live { at, mut pointer }) => {
                let moved = Item::encode_moved(new);
                let is_done = Mutation::ReplaceUnmarked.is_active() || self.mark(&mut pointer, &moved)?;
                if is_done {
                    *staged = None;
                    if !self.replace_entry(bucket, at, Some(entry))? {
                        self.tidy(key, (hash, number))?;
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
                            self.tidy(key, (hash, number))?;
                        }
                        return Ok(true);
                    }
                }
                Found::Dead { .. } => {
                    self.tidy(key, (hash, number))?;
                    return Ok(false);
                }
                Found::Nothing => return Ok(false),
                Found::Again => {}
            }
        }
    }

    /// Writes the first bytes of an item that is live. Returns whether it was.
    fn mark(&mut self, pointer: &mut Pointer, bytes: &[u8]) -> Outcome<bool, O> {
        let written = self.objects.write_if(pointer, LIVE, bytes).map_err(KvError::Objects)?;
        Ok(matches!(written, Written::Done { .. }))
    }

    /// Removes what operations on a key have left in its bucket: items that are dead or moved.
    fn tidy(&mut self, key: &[u8], (hash, number): (u64, usize)) -> Outcome<(), O> {
        loop {
            let Some(mut bucket) = self.index.bucket(&mut self.objects, number)? else { return Ok(()) };
            match self.find(&mut bucket, key, hash)? {
                Found::Dead { at } if self.replace_entry(&mut bucket, at, None)? => return Ok(()),
                Found::Dead { .. } | Found::Again => {}
                Found::Live { .. } | Found::Nothing => return Ok(()),
            }
        }
    }

    /// The keys of one bucket with their values, and the number of the next bucket; `None` after
    /// the last one. Each key that the store has during the whole scan is found once.
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
                self.note_gone(bucket.version, first.item)?;
            }
        }
    }

    /// The live items of a bucket; `None` if the bucket was changed since it was read.
    fn items(&mut self, entries: &[Entry]) -> Outcome<Option<Vec<KeyValue>>, O> {
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

    /// The item to which another one was moved, if it is live; `None` if it was freed.
    fn moved_item(&mut self, mut pointer: Pointer) -> Outcome<Option<Option<KeyValue>>, O> {
        while self.read(&mut pointer)? {
            match live_item(&self.bytes).ok_or(KvError::Damaged)? {
                Ok(item) => return Ok(Some(item)),
                Err(moved) => pointer = moved,
            }
        }
        Ok(None)
    }

    /// Where a scan that begins at a key finds its first bucket.
    #[must_use]
    pub fn bucket_of(&self, key: &[u8]) -> usize {
        self.index.number(self.index.hash(key))
    }

    /// Notes that an item of a bucket was gone. Items are freed after their bucket was changed, so
    /// the same is not found twice.
    fn note_gone(&mut self, version: u64, item: Pointer) -> Outcome<(), O> {
        match self.gone.replace((version, item)) {
            last if last == Some((version, item)) => Err(KvError::Damaged),
            _ => Ok(()),
        }
    }

    fn read(&mut self, pointer: &mut Pointer) -> Outcome<bool, O> {
        self.objects.read(pointer, &mut self.bytes).map_err(KvError::Objects)
    }

    /// Looks for a key in a bucket. The bytes of a live item are in `self.bytes`. Completes the
    /// replacement of items that it meets.
    fn find(&mut self, bucket: &mut FoundBucket, key: &[u8], hash: u64) -> Outcome<Found, O> {
        for at in 0..bucket.entries.len() {
            let Entry { hash: other, item } = bucket.entries[at];
            if other != hash {
                continue;
            }
            let mut pointer = item;
            if !self.read(&mut pointer)? {
                self.note_gone(bucket.version, item)?;
                return Ok(Found::Again);
            }
            match Item::decode(&self.bytes).ok_or(KvError::Damaged)? {
                Item::Live { key: found, .. } if found == key => return Ok(Found::Live { at, pointer }),
                Item::Dead { key: found } if found == key => return Ok(Found::Dead { at }),
                Item::Live { .. } | Item::Dead { .. } => {}
                Item::Moved(to) => {
                    self.replace_entry(bucket, at, Some(Entry { hash, item: to }))?;
                    return Ok(Found::Again);
                }
            }
        }
        Ok(Found::Nothing)
    }

    /// Replaces an entry of a bucket, or removes it, and frees its item. Returns whether it was
    /// done; otherwise the bucket was changed since it was read.
    fn replace_entry(
        &mut self,
        bucket: &mut FoundBucket,
        at: usize,
        next: Option<Entry>,
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
