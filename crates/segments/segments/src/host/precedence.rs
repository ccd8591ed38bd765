//! The precedence of pages for which threads wait over pages that are pulled ahead of the program
//! (§3.3, Fig. 4 of RaMP).

use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

/// Maximum time by which demands delay a pull ahead, so that these pages are pulled even if a
/// thread waits at any time.
const DELAY_MAX: Duration = Duration::from_millis(1);
/// Time after the last demand after which no further demand is expected soon.
const DEMAND_IDLE: Duration = Duration::from_millis(2);

/// The demands of all segments. A *demand* is a READ of pages for which threads wait.
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

/// A demand, which ends when this is dropped.
pub(super) struct Demand<'a>(&'a Precedence);

impl Precedence {
    /// Begins a demand.
    pub fn demand(&self) -> Demand<'_> {
        self.demands.lock().in_flight += 1;
        Demand(self)
    }

    /// Waits until no demand is in flight, at most for [`DELAY_MAX`]. Returns whether a demand is
    /// in flight or is expected soon.
    pub fn wait_for_demands(&self) -> bool {
        let mut demands = self.demands.lock();
        let _late = self.has_ended.wait_while_for(&mut demands, |demands| demands.in_flight > 0, DELAY_MAX);
        demands.in_flight > 0 || demands.last_ended.is_some_and(|ended| ended.elapsed() < DEMAND_IDLE)
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
    fn demands_delay_a_pull_ahead_for_a_limited_time() {
        let precedence = Precedence::default();
        assert!(!precedence.wait_for_demands(), "no demand yet");
        let demand = precedence.demand();
        assert!(precedence.wait_for_demands(), "the demand is still in flight");
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| while precedence.wait_for_demands() {});
            drop(demand);
            waits.join().unwrap();
        });
    }
}
