//! Tells when all have ended that had begun before. Who begins and ends never waits.

use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

/// A counter that threads share.
pub(super) trait Count: Default {
    /// How much it is.
    fn get(&self) -> u64;
    /// One more; how much it was.
    fn increment(&self) -> u64;
    /// One less.
    fn decrement(&self);
}

impl Count for AtomicU64 {
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

/// See above.
#[derive(Debug, Default)]
pub(super) struct Eras<C: Count = AtomicU64> {
    now: C,
    /// Who is in an era with an even number, and with an odd one.
    inside: [C; 2],
}

impl<C: Count> Eras<C> {
    fn inside(&self, era: u64) -> &C {
        &self.inside[usize::from(!era.is_multiple_of(2))]
    }

    /// Something begins; returns the era in which it does.
    pub fn enter(&self) -> u64 {
        loop {
            let era = self.now.get();
            self.inside(era).increment();
            if self.now.get() == era {
                return era;
            }
            // The era ended before it was entered: who waits for its end may have seen that already.
            self.leave(era);
        }
    }

    /// It has ended.
    pub fn leave(&self, era: u64) {
        self.inside(era).decrement();
    }

    /// The era before this one.
    pub fn before(&self) -> u64 {
        self.now.get().wrapping_sub(1)
    }

    /// A new era begins; returns the one that ends. There is one who calls this, who has seen that the era before was over.
    pub fn begin_next(&self) -> u64 {
        self.now.increment()
    }

    /// Whether all has ended that began in an era: this one, when it has ended itself, or the one before.
    pub fn is_over(&self, era: u64) -> bool {
        self.inside(era).get() == 0
    }
}

#[cfg(test)]
mod tests {
    use std::panic::catch_unwind;

    use shuttle::sync::Arc;
    use shuttle::sync::atomic::{AtomicBool, AtomicU64};
    use shuttle::thread;

    use super::*;

    impl Count for AtomicU64 {
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

    /// What is left out.
    #[derive(Clone, Copy, PartialEq, Eq)]
    enum Fault {
        None,
        /// Who enters an era does not look whether it has ended meanwhile.
        EnterBlindly,
        /// Who begins an era does not look whether the one before is over.
        NextAtOnce,
    }

    #[derive(Default)]
    struct Scene {
        eras: Eras<AtomicU64>,
        taken: [AtomicBool; 2],
        noted: [AtomicBool; 2],
    }

    impl Scene {
        /// Takes something, and writes it down.
        fn take(&self, number: usize, fault: Fault) {
            let era = if fault == Fault::EnterBlindly {
                let era = self.eras.now.get();
                self.eras.inside(era).increment();
                era
            } else {
                self.eras.enter()
            };
            self.taken[number].store(true, SeqCst);
            self.noted[number].store(true, SeqCst);
            self.eras.leave(era);
        }

        /// What was taken when this began is written down when it ends, unless it gives up.
        fn audit(&self, fault: Fault) {
            if fault != Fault::NextAtOnce && !self.eras.is_over(self.eras.before()) {
                return;
            }
            let taken = [0, 1].map(|number| self.taken[number].load(SeqCst));
            let era = self.eras.begin_next();
            if !self.eras.is_over(era) {
                return;
            }
            for (number, taken) in taken.into_iter().enumerate() {
                assert!(!taken || self.noted[number].load(SeqCst), "{number} is taken for unknown");
            }
        }
    }

    fn play(fault: Fault) {
        let scene = Arc::new(Scene::default());
        let takers = [0, 1].map(|number| {
            let scene = Arc::clone(&scene);
            thread::spawn(move || scene.take(number, fault))
        });
        for _ in 0..3 {
            scene.audit(fault);
        }
        for taker in takers {
            taker.join().expect("it does not panic");
        }
    }

    #[test]
    fn nothing_that_is_being_taken_is_taken_for_unknown() {
        shuttle::check_dfs(|| play(Fault::None), Some(400_000));
        shuttle::check_random(|| play(Fault::None), 20_000);
    }

    #[test]
    fn each_step_that_is_left_out_is_noticed() {
        for fault in [Fault::EnterBlindly, Fault::NextAtOnce] {
            let outcome = catch_unwind(|| shuttle::check_random(move || play(fault), 100_000));
            assert!(outcome.is_err(), "nobody noticed");
        }
    }
}
