//! Pages for which threads wait go before those ahead of the program (§3.3, Fig. 4 of RAMP).

use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

/// How long pages ahead wait at most, so that they come even if there is always a thread that
/// waits.
const PATIENCE: Duration = Duration::from_millis(1);
/// Without a demand for this time, none is expected soon.
const QUIET: Duration = Duration::from_millis(2);

/// The pages for which threads wait at the moment.
#[derive(Debug, Default)]
pub(super) struct Precedence {
    demands: Mutex<Demands>,
    has_ended: Condvar,
}

#[derive(Debug, Default)]
struct Demands {
    in_flight: usize,
    last_ended: Option<Instant>,
}

/// A demand, until it is dropped.
pub(super) struct Demand<'a>(&'a Precedence);

impl Precedence {
    /// A thread waits for pages from now on.
    pub fn demand(&self) -> Demand<'_> {
        self.demands.lock().in_flight += 1;
        Demand(self)
    }

    /// Waits until no thread waits for a page. Returns whether one may wait again soon.
    pub fn give_way(&self) -> bool {
        let mut demands = self.demands.lock();
        let _late = self.has_ended.wait_while_for(&mut demands, |demands| demands.in_flight > 0, PATIENCE);
        demands.in_flight > 0 || demands.last_ended.is_some_and(|ended| ended.elapsed() < QUIET)
    }
}

impl Drop for Demand<'_> {
    fn drop(&mut self) {
        let mut demands = self.0.demands.lock();
        demands.in_flight -= 1;
        demands.last_ended = Some(Instant::now());
        if demands.in_flight == 0 {
            self.0.has_ended.notify_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_ahead_come_between_demands() {
        let precedence = Precedence::default();
        assert!(!precedence.give_way(), "none was demanded yet");
        let demand = precedence.demand();
        assert!(precedence.give_way(), "not longer than for its patience");
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| while precedence.give_way() {});
            drop(demand);
            waits.join().unwrap();
        });
    }
}
