//! Grace periods: determines when all operations have ended that had begun before a given moment.
//!
//! Each operation is counted in the generation in which it begins. A new generation closes the one
//! before, and the grace period is over when no operation of the closed generation runs.
//! The begin and the end of an operation never block.

use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

/// A counter that threads share.
pub(super) trait SharedCounter: Default {
    /// The counter's value.
    fn get(&self) -> u64;
    /// Adds one. Returns the value before.
    fn increment(&self) -> u64;
    /// Subtracts one.
    fn decrement(&self);
}

impl SharedCounter for AtomicU64 {
    fn get(&self) -> u64 {
        self.load(SeqCst)
    }

    fn increment(&self) -> u64 {
        self.fetch_add(1, SeqCst)
    }

    fn decrement(&self) {
        self.fetch_sub(1, SeqCst);
    }
}

/// Counts the operations of the present generation and of the one before.
#[derive(Debug, Default)]
pub(super) struct GracePeriods<C: SharedCounter = AtomicU64> {
    generation: C,
    /// Number of operations that run, of even and of odd generations. At most two generations have
    /// any, because [`Self::next_generation`] is called only after the one before has drained.
    running: [C; 2],
}

impl<C: SharedCounter> GracePeriods<C> {
    fn running(&self, generation: u64) -> &C {
        &self.running[usize::from(!generation.is_multiple_of(2))]
    }

    /// Begins an operation. Returns its generation.
    pub fn begin(&self) -> u64 {
        loop {
            let generation = self.generation.get();
            self.running(generation).increment();
            if self.generation.get() == generation {
                return generation;
            }
            // The generation was closed before this operation was counted in it, and a scan may
            // already have seen it drained.
            self.end(generation);
        }
    }

    /// Ends an operation of a generation.
    pub fn end(&self, generation: u64) {
        self.running(generation).decrement();
    }

    /// The generation that was closed last.
    pub fn previous_generation(&self) -> u64 {
        self.generation.get().wrapping_sub(1)
    }

    /// Starts a new generation. Returns the one that this closes.
    ///
    /// Only one thread may call this, after it has seen the previous generation drained.
    pub fn next_generation(&self) -> u64 {
        self.generation.increment()
    }

    /// Whether all operations of a closed generation have ended.
    pub fn is_drained(&self, generation: u64) -> bool {
        self.running(generation).get() == 0
    }
}

#[cfg(test)]
mod tests {
    use std::panic::catch_unwind;

    use shuttle::sync::Arc;
    use shuttle::sync::atomic::{AtomicBool, AtomicU64};
    use shuttle::thread;

    use super::*;

    impl SharedCounter for AtomicU64 {
        fn get(&self) -> u64 {
            self.load(SeqCst)
        }

        fn increment(&self) -> u64 {
            self.fetch_add(1, SeqCst)
        }

        fn decrement(&self) {
            self.fetch_sub(1, SeqCst);
        }
    }

    /// The omitted step.
    #[derive(Clone, Copy, PartialEq, Eq)]
    enum GraceFault {
        None,
        /// An operation that begins does not check whether its generation was closed meanwhile.
        BeginBlindly,
        /// A new generation starts although the one before has not drained.
        NextAtOnce,
    }

    #[derive(Default)]
    struct ScanTest {
        grace: GracePeriods<AtomicU64>,
        allocated: [AtomicBool; 2],
        recorded: [AtomicBool; 2],
    }

    impl ScanTest {
        /// Allocates an extent, and records it.
        fn allocate(&self, number: usize, fault: GraceFault) {
            let generation = if fault == GraceFault::BeginBlindly {
                let generation = self.grace.generation.get();
                self.grace.running(generation).increment();
                generation
            } else {
                self.grace.begin()
            };
            self.allocated[number].store(true, SeqCst);
            self.recorded[number].store(true, SeqCst);
            self.grace.end(generation);
        }

        /// Asserts that an extent that is allocated at the beginning is recorded after the grace
        /// period.
        fn scan(&self, fault: GraceFault) {
            if fault != GraceFault::NextAtOnce && !self.grace.is_drained(self.grace.previous_generation()) {
                return;
            }
            let allocated = [0, 1].map(|number| self.allocated[number].load(SeqCst));
            let generation = self.grace.next_generation();
            if !self.grace.is_drained(generation) {
                return;
            }
            for (number, allocated) in allocated.into_iter().enumerate() {
                assert!(!allocated || self.recorded[number].load(SeqCst), "{number} is reported as leaked");
            }
        }
    }

    fn play(fault: GraceFault) {
        let scene = Arc::new(ScanTest::default());
        let allocators = [0, 1].map(|number| {
            let scene = Arc::clone(&scene);
            thread::spawn(move || scene.allocate(number, fault))
        });
        for _ in 0..3 {
            scene.scan(fault);
        }
        for allocator in allocators {
            allocator.join().expect("the allocator does not panic");
        }
    }

    #[test]
    fn an_extent_that_is_being_allocated_is_not_reported_as_leaked() {
        shuttle::check_dfs(|| play(GraceFault::None), Some(400_000));
        shuttle::check_random(|| play(GraceFault::None), 10_000);
    }

    #[test]
    fn each_omitted_step_is_detected() {
        for fault in [GraceFault::BeginBlindly, GraceFault::NextAtOnce] {
            let outcome = catch_unwind(|| shuttle::check_random(move || play(fault), 100_000));
            assert!(outcome.is_err(), "the test does not detect the fault");
        }
    }
}
