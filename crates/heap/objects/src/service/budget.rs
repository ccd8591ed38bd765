//! The memory that the heaps of a node may take together, counted in frames.

use std::sync::Arc;

use parking_lot::Mutex;

/// Number of frames of which a reservation at the source is a multiple: 128 KiB.
pub const BATCH_FRAMES: u32 = 32;
/// Least and most frames that the source is asked for in advance: 1 MiB and 32 MiB.
const AHEAD_FRAMES: [u32; 2] = [256, 8192];

/// The source of the memory of heaps: a pool that must not lend it meanwhile.
pub trait FrameSource: Send + Sync + std::fmt::Debug {
    /// Asks for `frames` frames in all. Returns the number of frames that the heaps may have now,
    /// which can be more or fewer; `None` if the source cannot be reached now.
    fn hold(&self, frames: u32) -> Option<u32>;

    /// Whether the source holds the frames of the last request. Otherwise the request is repeated.
    fn is_held(&self) -> bool;
}

/// Why frames cannot be reserved.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Shortage {
    /// There are too few frames.
    Full,
    /// The source cannot be reached; later there may be enough.
    SourceUnreachable,
}

/// Counts frames that heaps have reserved.
#[derive(Debug)]
pub struct FrameBudget {
    total: u32,
    source: Option<Arc<dyn FrameSource>>,
    frames: Mutex<BudgetFrames>,
}

#[derive(Debug)]
struct BudgetFrames {
    /// Frames that heaps have reserved.
    reserved: u32,
    /// Frames that the source holds for the heaps.
    held: u32,
}

impl FrameBudget {
    /// Creates a budget of at most `total` frames. Without a source all are available at once.
    #[must_use]
    pub fn new(total: u32, source: Option<Arc<dyn FrameSource>>) -> Self {
        let held = if source.is_some() { 0 } else { total };
        Self { total, source, frames: Mutex::new(BudgetFrames { reserved: 0, held }) }
    }

    /// The most frames of all heaps.
    #[must_use]
    pub fn total(&self) -> u32 {
        self.total
    }

    /// Reserves frames.
    ///
    /// # Errors
    /// If there are not enough frames. Then no frame is reserved.
    pub fn reserve(&self, frames: u32) -> Result<(), Shortage> {
        let mut budget = self.frames.lock();
        let needed = budget.reserved.saturating_add(frames);
        if needed > self.total {
            return Err(Shortage::Full);
        }
        if let Some(source) = &self.source {
            while needed > budget.held {
                let held = source.hold(self.wanted(needed)).ok_or(Shortage::SourceUnreachable)?;
                let is_more = held > budget.held;
                budget.held = held;
                if needed > held && !is_more {
                    return Err(Shortage::Full);
                }
            }
        }
        budget.reserved = needed;
        Ok(())
    }

    /// Reserves frames of a heap of an earlier process, even above the limit.
    pub fn reserve_kept(&self, frames: u32) {
        self.frames.lock().reserved += frames;
    }

    /// Returns frames.
    pub fn release(&self, frames: u32) {
        self.frames.lock().reserved -= frames;
    }

    /// Returns unneeded frames to the source, and requests those again that the source does not
    /// hold. To be called often.
    pub fn rebalance(&self) {
        let Some(source) = &self.source else { return };
        let mut budget = self.frames.lock();
        let wanted = self.wanted(budget.reserved);
        let ahead = wanted - budget.reserved.min(wanted);
        let has_too_much = budget.held > wanted.saturating_add(ahead);
        if has_too_much || budget.held < budget.reserved || !source.is_held() {
            // If the source cannot be reached, the count stays: the heaps use these frames.
            budget.held = source.hold(wanted).unwrap_or(budget.held);
        }
    }

    /// Frames that heaps have reserved.
    #[must_use]
    pub fn reserved(&self) -> u32 {
        self.frames.lock().reserved
    }

    /// Frames to request from the source when heaps need `frames`: whole batches, some in advance.
    fn wanted(&self, frames: u32) -> u32 {
        if frames == 0 {
            return 0;
        }
        let ahead = (frames / 16).clamp(AHEAD_FRAMES[0], AHEAD_FRAMES[1]);
        frames
            .saturating_add(ahead)
            .checked_next_multiple_of(BATCH_FRAMES)
            .unwrap_or(u32::MAX)
            .min(self.total)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed};

    use super::*;

    #[test]
    fn reservations_stay_within_the_total() {
        let budget = FrameBudget::new(100, None);
        assert_eq!(budget.reserve(60), Ok(()));
        assert_eq!(budget.reserve(41), Err(Shortage::Full));
        assert_eq!(budget.reserve(40), Ok(()));
        budget.release(1);
        assert_eq!(budget.reserve(2), Err(Shortage::Full));
        assert_eq!(budget.reserve(1), Ok(()));
        budget.reserve_kept(50);
        assert_eq!(budget.reserved(), 150);
        assert_eq!(budget.reserve(1), Err(Shortage::Full), "restored heaps have more than the total");
    }

    /// A pool with some free frames, which grants at most 1,000 frames at once.
    #[derive(Debug, Default)]
    struct Pool {
        free: AtomicU32,
        held: AtomicU32,
        is_away: AtomicBool,
        calls: AtomicU32,
    }

    impl FrameSource for Pool {
        fn hold(&self, frames: u32) -> Option<u32> {
            if self.is_away.load(Relaxed) {
                return None;
            }
            self.calls.fetch_add(1, Relaxed);
            let (held, free) = (self.held.load(Relaxed), self.free.load(Relaxed));
            let now = frames.min(held + free.min(1000));
            self.free.store(held + free - now, Relaxed);
            self.held.store(now, Relaxed);
            Some(now)
        }

        fn is_held(&self) -> bool {
            !self.is_away.load(Relaxed)
        }
    }

    fn budget_of(free: u32) -> (Arc<Pool>, FrameBudget) {
        let pool = Arc::new(Pool { free: AtomicU32::new(free), ..Pool::default() });
        (Arc::clone(&pool), FrameBudget::new(1 << 20, Some(pool)))
    }

    #[test]
    fn the_source_holds_frames_before_they_are_reserved() {
        let (pool, budget) = budget_of(100_000);
        for reserved in (32..=50_000).step_by(32) {
            assert_eq!(budget.reserve(32), Ok(()));
            assert!(pool.held.load(Relaxed) >= reserved);
        }
        let calls = pool.calls.load(Relaxed);
        assert!(calls < 100, "{calls} calls");
        assert_eq!(budget.reserve(80_000), Err(Shortage::Full));
        assert_eq!(budget.reserve(40_000), Ok(()), "the reservation takes several steps");
    }

    #[test]
    fn unneeded_frames_return_to_the_source() {
        let (pool, budget) = budget_of(100_000);
        assert_eq!(budget.reserve(64_000), Ok(()));
        budget.release(60_000);
        budget.rebalance();
        assert_eq!(pool.held.load(Relaxed), 4000 + 256);
        budget.release(4000);
        budget.rebalance();
        assert_eq!(pool.held.load(Relaxed), 0);
    }

    #[test]
    fn an_unreachable_source_is_not_full() {
        let (pool, budget) = budget_of(10_000);
        budget.reserve_kept(3200);
        pool.is_away.store(true, Relaxed);
        budget.rebalance();
        assert_eq!(budget.reserve(32), Err(Shortage::SourceUnreachable));
        pool.is_away.store(false, Relaxed);
        (0..4).for_each(|_| budget.rebalance());
        assert_eq!(pool.held.load(Relaxed), 3200 + 256);
        assert_eq!(budget.reserve(32), Ok(()));
    }
}
