//! The memory that the heaps of a node may take together, counted in frames.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Frames that are reserved and returned at once: 128 KiB.
pub const BATCH_FRAMES: u32 = 32;

/// Counts frames that heaps have reserved.
#[derive(Debug)]
pub struct FrameBudget {
    total: u32,
    reserved: Mutex<u32>,
}

impl FrameBudget {
    /// A budget of this many frames.
    #[must_use]
    pub fn new(total: u32) -> Self {
        Self { total, reserved: Mutex::default() }
    }

    /// All frames.
    #[must_use]
    pub fn total(&self) -> u32 {
        self.total
    }

    /// Reserves frames. Returns whether there were enough.
    #[must_use]
    pub fn reserve(&self, frames: u32) -> bool {
        let mut reserved = self.lock();
        let fits = frames <= self.total.saturating_sub(*reserved);
        *reserved += if fits { frames } else { 0 };
        fits
    }

    /// Reserves frames that a heap of an earlier process has, whether or not there are enough.
    pub fn reserve_kept(&self, frames: u32) {
        *self.lock() += frames;
    }

    /// Returns frames.
    pub fn release(&self, frames: u32) {
        *self.lock() -= frames;
    }

    /// Frames that heaps have reserved.
    #[must_use]
    pub fn reserved(&self) -> u32 {
        *self.lock()
    }

    fn lock(&self) -> MutexGuard<'_, u32> {
        self.reserved.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_more_is_reserved_than_there_is() {
        let budget = FrameBudget::new(100);
        assert!(budget.reserve(60) && !budget.reserve(41) && budget.reserve(40));
        budget.release(1);
        assert!(!budget.reserve(2) && budget.reserve(1));
        budget.reserve_kept(50);
        assert_eq!(budget.reserved(), 150);
        assert!(!budget.reserve(1), "what was kept is more than there is");
    }
}
