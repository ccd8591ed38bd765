//! An ordered map in a segment.

use std::borrow::Borrow;

use crate::allocator::{SegmentAllocator, SegmentFull};
use crate::vector::Vector;

/// Maximum number of keys of a chunk.
const CHUNK_KEYS_MAX: usize = 64;
/// Number of keys below which a chunk is merged with the next one, if both fit into half a chunk.
const CHUNK_KEYS_MIN: usize = 16;

/// An ordered map in a segment: a vector of chunks with the keys in order. No chunk is empty. A
/// lookup is a binary search for the chunk, and another one in it.
#[derive(Debug)]
pub struct OrderedMap<K, V> {
    chunks: Vector<Vector<(K, V)>>,
    len: usize,
}

impl<K: Ord, V> OrderedMap<K, V> {
    /// Creates an empty map, without allocating memory.
    #[must_use]
    pub fn new(allocator: SegmentAllocator) -> Self {
        Self { chunks: Vector::new(allocator), len: 0 }
    }

    /// The allocator of the map's segment.
    #[must_use]
    pub fn allocator(&self) -> SegmentAllocator {
        self.chunks.allocator()
    }

    /// Returns the number of keys.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the map has no keys.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Inserts a key, or replaces its value. Returns the previous value.
    ///
    /// # Errors
    /// If the segment is full. Then nothing is changed.
    pub fn insert(&mut self, key: K, value: V) -> Result<Option<V>, SegmentFull> {
        if self.chunks.is_empty() {
            let mut first = Vector::new(self.allocator());
            first.push((key, value))?;
            self.chunks.push(first)?;
            self.len = 1;
            return Ok(None);
        }
        let mut chunk = self.chunk_of(&key);
        let mut at = match find(&self.chunks[chunk], &key) {
            Ok(at) => return Ok(Some(std::mem::replace(&mut self.chunks[chunk][at].1, value))),
            Err(at) => at,
        };
        if self.chunks[chunk].len() >= CHUNK_KEYS_MAX {
            self.split(chunk)?;
            let left = self.chunks[chunk].len();
            if at > left {
                (chunk, at) = (chunk + 1, at - left);
            }
        }
        self.chunks[chunk].insert(at, (key, value))?;
        self.len += 1;
        Ok(None)
    }

    /// Returns the value of a key.
    pub fn get<Q: Ord + ?Sized>(&self, key: &Q) -> Option<&V>
    where
        K: Borrow<Q>,
    {
        let chunk = self.chunks.get(self.chunk_of(key))?;
        find(chunk, key).ok().map(|at| &chunk[at].1)
    }

    /// Returns a mutable reference to the value of a key.
    pub fn get_mut<Q: Ord + ?Sized>(&mut self, key: &Q) -> Option<&mut V>
    where
        K: Borrow<Q>,
    {
        let chunk = self.chunk_of(key);
        let chunk = self.chunks.get_mut(chunk)?;
        find(chunk, key).ok().map(|at| &mut chunk[at].1)
    }

    /// Removes a key, and returns its value.
    pub fn remove<Q: Ord + ?Sized>(&mut self, key: &Q) -> Option<V>
    where
        K: Borrow<Q>,
    {
        let at = self.chunk_of(key);
        let chunk = self.chunks.get_mut(at)?;
        let (_, value) = find(chunk, key).ok().map(|found| chunk.remove(found))?;
        self.len -= 1;
        self.join(at);
        Some(value)
    }

    /// Iterates over the keys and values, in the order of the keys.
    pub fn iter(&self) -> impl Iterator<Item = (&K, &V)> {
        self.chunks.iter().flat_map(|chunk| chunk.iter()).map(|(key, value)| (key, value))
    }

    /// Iterates over the keys that are not less than `key`, and their values, in order.
    pub fn range_from<Q: Ord + ?Sized>(&self, key: &Q) -> impl Iterator<Item = (&K, &V)>
    where
        K: Borrow<Q>,
    {
        let first = self.chunk_of(key);
        let skipped = self.chunks.get(first).map_or(0, |chunk| match find(chunk, key) {
            Ok(at) | Err(at) => at,
        });
        let chunks = self.chunks.get(first..).unwrap_or_default();
        chunks.iter().flat_map(|chunk| chunk.iter()).skip(skipped).map(|(key, value)| (key, value))
    }

    /// Returns the index of the only chunk that may have the key.
    fn chunk_of<Q: Ord + ?Sized>(&self, key: &Q) -> usize
    where
        K: Borrow<Q>,
    {
        let above = self.chunks.partition_point(|chunk| chunk[0].0.borrow() <= key);
        above.saturating_sub(1)
    }

    /// Moves the upper half of a chunk to a new chunk behind it.
    fn split(&mut self, chunk: usize) -> Result<(), SegmentFull> {
        self.chunks.reserve(1)?;
        let mut upper = Vector::new(self.allocator());
        self.chunks[chunk].move_tail(CHUNK_KEYS_MAX / 2, &mut upper)?;
        self.chunks.insert(chunk + 1, upper)
    }

    /// Removes a chunk if it is empty, or merges it with the next one if both are small.
    fn join(&mut self, chunk: usize) {
        let len = self.chunks[chunk].len();
        if len == 0 {
            self.chunks.remove(chunk);
        } else if len < CHUNK_KEYS_MIN
            && self.chunks.get(chunk + 1).is_some_and(|next| len + next.len() <= CHUNK_KEYS_MAX / 2)
        {
            let mut next = self.chunks.remove(chunk + 1);
            if next.move_tail(0, &mut self.chunks[chunk]).is_err() {
                // The segment is full, so the chunks stay separate. The vector has room for `next`,
                // because it was in it before.
                let _put_back = self.chunks.insert(chunk + 1, next);
            }
        }
    }
}

fn find<K: Borrow<Q>, V, Q: Ord + ?Sized>(chunk: &[(K, V)], key: &Q) -> Result<usize, usize> {
    chunk.binary_search_by(|(found, _)| found.borrow().cmp(key))
}
