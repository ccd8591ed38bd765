//! A hash map in a segment.

use std::borrow::Borrow;
use std::fmt;
use std::hash::{BuildHasher, Hash, RandomState};

use foldhash::quality::FixedState;
use hashbrown::HashMap;

use crate::allocator::{SegmentAllocator, SegmentFull};

/// A hash map in a segment. The random seed of its hash function is in the segment, too.
///
/// The table always has memory in the segment: hashbrown's empty table is a static of the program,
/// at another address in each process.
pub struct Map<K, V> {
    table: HashMap<K, V, FixedState, SegmentAllocator>,
}

impl<K: Eq + Hash, V> Map<K, V> {
    /// Creates an empty map.
    ///
    /// # Errors
    /// If the segment is full.
    pub fn new(allocator: SegmentAllocator) -> Result<Self, SegmentFull> {
        Self::with_capacity(allocator, 1)
    }

    /// Creates an empty map with room for `keys` keys.
    ///
    /// # Errors
    /// If the segment is full.
    pub fn with_capacity(allocator: SegmentAllocator, keys: usize) -> Result<Self, SegmentFull> {
        let seed = RandomState::new().hash_one(keys);
        let mut table = HashMap::with_hasher_in(FixedState::with_seed(seed), allocator);
        table.try_reserve(keys.max(1)).map_err(|_| SegmentFull)?;
        Ok(Self { table })
    }

    /// The allocator of the map's segment.
    #[must_use]
    pub fn allocator(&self) -> SegmentAllocator {
        *self.table.allocator()
    }

    /// Returns the number of keys.
    #[must_use]
    pub fn len(&self) -> usize {
        self.table.len()
    }

    /// Whether the map has no keys.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.table.is_empty()
    }

    /// Inserts a key, or replaces its value. Returns the previous value.
    ///
    /// # Errors
    /// If the segment is full. Then nothing is changed.
    pub fn insert(&mut self, key: K, value: V) -> Result<Option<V>, SegmentFull> {
        self.table.try_reserve(1).map_err(|_| SegmentFull)?;
        Ok(self.table.insert(key, value))
    }

    /// Returns the value of a key. Inserts the key with `value` first if it is missing.
    ///
    /// # Errors
    /// If the segment is full, or `value` fails. Then nothing is changed.
    pub fn get_or_insert(
        &mut self,
        key: K,
        value: impl FnOnce() -> Result<V, SegmentFull>,
    ) -> Result<&mut V, SegmentFull> {
        self.table.try_reserve(1).map_err(|_| SegmentFull)?;
        match self.table.entry(key) {
            hashbrown::hash_map::Entry::Occupied(entry) => Ok(entry.into_mut()),
            hashbrown::hash_map::Entry::Vacant(entry) => Ok(entry.insert(value()?)),
        }
    }

    /// Returns the value of a key.
    pub fn get<Q: Hash + Eq + ?Sized>(&self, key: &Q) -> Option<&V>
    where
        K: Borrow<Q>,
    {
        self.table.get(key)
    }

    /// Returns a mutable reference to the value of a key.
    pub fn get_mut<Q: Hash + Eq + ?Sized>(&mut self, key: &Q) -> Option<&mut V>
    where
        K: Borrow<Q>,
    {
        self.table.get_mut(key)
    }

    /// Removes a key, and returns its value.
    pub fn remove<Q: Hash + Eq + ?Sized>(&mut self, key: &Q) -> Option<V>
    where
        K: Borrow<Q>,
    {
        self.table.remove(key)
    }

    /// Removes the keys for which `keeps` returns false.
    pub fn retain(&mut self, keeps: impl FnMut(&K, &mut V) -> bool) {
        self.table.retain(keeps);
    }

    /// Removes all keys. Keeps the memory of the table.
    pub fn clear(&mut self) {
        self.table.clear();
    }

    /// Iterates over the keys and values, in no particular order.
    pub fn iter(&self) -> impl Iterator<Item = (&K, &V)> {
        self.table.iter()
    }

    /// Iterates over the keys and mutable references to the values.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = (&K, &mut V)> {
        self.table.iter_mut()
    }
}

impl<K: fmt::Debug, V: fmt::Debug> fmt::Debug for Map<K, V> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(self.table.iter()).finish()
    }
}
