//! A map in a segment that has its keys in their order.

use std::borrow::Borrow;

use crate::allocator::{SegmentAllocator, SegmentFull};
use crate::vector::Vector;

/// Most keys that are in one piece.
const CHUNK_KEYS_MAX: usize = 64;
/// A chunk with fewer is joined with its neighbour if there is room.
const CHUNK_KEYS_MIN: usize = 16;

/// A map that has its keys in their order: a vector of chunks, none of them empty. A lookup is a
/// binary search for the chunk and one in it.
#[derive(Debug)]
pub struct OrderedMap<K, V> {
    chunks: Vector<Vector<(K, V)>>,
    len: usize,
}

impl<K: Ord, V> OrderedMap<K, V> {
    /// An empty map, which takes no memory.
    #[must_use]
    pub fn new(allocator: SegmentAllocator) -> Self {
        Self { chunks: Vector::new(allocator), len: 0 }
    }

    /// The allocator of its segment.
    #[must_use]
    pub fn allocator(&self) -> SegmentAllocator {
        self.chunks.allocator()
    }

    /// Number of keys.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there is no key.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Inserts a key, or replaces its value. Returns the value that it had.
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

    /// The value of a key.
    pub fn get<Q: Ord + ?Sized>(&self, key: &Q) -> Option<&V>
    where
        K: Borrow<Q>,
    {
        let chunk = self.chunks.get(self.chunk_of(key))?;
        find(chunk, key).ok().map(|at| &chunk[at].1)
    }

    /// The value of a key, to be changed.
    pub fn get_mut<Q: Ord + ?Sized>(&mut self, key: &Q) -> Option<&mut V>
    where
        K: Borrow<Q>,
    {
        let chunk = self.chunk_of(key);
        let chunk = self.chunks.get_mut(chunk)?;
        find(chunk, key).ok().map(|at| &mut chunk[at].1)
    }

    /// Removes a key. Returns its value.
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

    /// The keys and values, in the order of the keys.
    pub fn iter(&self) -> impl Iterator<Item = (&K, &V)> {
        self.chunks.iter().flat_map(|chunk| chunk.iter()).map(|(key, value)| (key, value))
    }

    /// The keys from this one on, and their values, in the order of the keys.
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

    /// The chunk that has the key, if one has it.
    fn chunk_of<Q: Ord + ?Sized>(&self, key: &Q) -> usize
    where
        K: Borrow<Q>,
    {
        let above = self.chunks.partition_point(|chunk| chunk[0].0.borrow() <= key);
        above.saturating_sub(1)
    }

    /// Moves the upper half of a chunk to a new one behind it.
    fn split(&mut self, chunk: usize) -> Result<(), SegmentFull> {
        self.chunks.reserve(1)?;
        let mut upper = Vector::new(self.allocator());
        self.chunks[chunk].move_tail(CHUNK_KEYS_MAX / 2, &mut upper)?;
        self.chunks.insert(chunk + 1, upper)
    }

    /// Removes an empty chunk, and joins a small one with the next.
    fn join(&mut self, chunk: usize) {
        let len = self.chunks[chunk].len();
        if len == 0 {
            self.chunks.remove(chunk);
        } else if len < CHUNK_KEYS_MIN
            && self.chunks.get(chunk + 1).is_some_and(|next| len + next.len() <= CHUNK_KEYS_MAX / 2)
        {
            let mut next = self.chunks.remove(chunk + 1);
            if next.move_tail(0, &mut self.chunks[chunk]).is_err() {
                // The segment is full: they stay apart. There is room for the chunk that was there.
                let _put_back = self.chunks.insert(chunk + 1, next);
            }
        }
    }
}

fn find<K: Borrow<Q>, V, Q: Ord + ?Sized>(chunk: &[(K, V)], key: &Q) -> Result<usize, usize> {
    chunk.binary_search_by(|(found, _)| found.borrow().cmp(key))
}
