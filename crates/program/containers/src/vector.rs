//! A vector in a segment.

use std::ops::{Deref, DerefMut};

use allocator_api2::vec::Vec;

use crate::allocator::{SegmentAllocator, SegmentFull};

/// A vector in a segment. Dereferences to a slice of its values.
#[derive(Debug)]
pub struct Vector<T> {
    values: Vec<T, SegmentAllocator>,
}

impl<T> Vector<T> {
    /// Creates an empty vector, without allocating memory.
    #[must_use]
    pub fn new(allocator: SegmentAllocator) -> Self {
        Self { values: Vec::new_in(allocator) }
    }

    /// The allocator of the vector's segment.
    #[must_use]
    pub fn allocator(&self) -> SegmentAllocator {
        *self.values.allocator()
    }

    /// Makes room for `more` more values.
    ///
    /// # Errors
    /// If the segment is full.
    pub fn reserve(&mut self, more: usize) -> Result<(), SegmentFull> {
        self.values.try_reserve(more).map_err(|_| SegmentFull)
    }

    /// Appends a value.
    ///
    /// # Errors
    /// If the segment is full.
    pub fn push(&mut self, value: T) -> Result<(), SegmentFull> {
        self.reserve(1)?;
        self.values.push(value);
        Ok(())
    }

    /// Appends copies of values.
    ///
    /// # Errors
    /// If the segment is full. Then no value is appended.
    pub fn extend_from_slice(&mut self, values: &[T]) -> Result<(), SegmentFull>
    where
        T: Clone,
    {
        self.reserve(values.len())?;
        self.values.extend_from_slice(values);
        Ok(())
    }

    /// Inserts a value at a position.
    ///
    /// # Errors
    /// If the segment is full.
    ///
    /// # Panics
    /// If `at` is greater than the length.
    pub fn insert(&mut self, at: usize, value: T) -> Result<(), SegmentFull> {
        self.reserve(1)?;
        self.values.insert(at, value);
        Ok(())
    }

    /// Removes the value at a position, and shifts the values after it.
    ///
    /// # Panics
    /// If there is no value at the position.
    pub fn remove(&mut self, at: usize) -> T {
        self.values.remove(at)
    }

    /// Removes the last value.
    pub fn pop(&mut self) -> Option<T> {
        self.values.pop()
    }

    /// Removes all values after the first `len`.
    pub fn truncate(&mut self, len: usize) {
        self.values.truncate(len);
    }

    /// Moves the values from a position on to another vector.
    pub(crate) fn move_tail(&mut self, at: usize, to: &mut Self) -> Result<(), SegmentFull> {
        to.reserve(self.len().saturating_sub(at))?;
        to.values.extend(self.values.drain(at..));
        Ok(())
    }
}

impl<T> Deref for Vector<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        &self.values
    }
}

impl<T> DerefMut for Vector<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        &mut self.values
    }
}
