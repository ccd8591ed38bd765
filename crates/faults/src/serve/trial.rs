//! Finds out whether it pays to hold a thread, by trying both in turns.
//!
//! To hold costs a handful of system calls for each fault. What it saves depends on what else runs: where no other core is idle, the
//! scheduler takes nobody away, and holding only costs.

use std::time::Duration;

/// Faults in one turn: many times what a monitor needs to follow a thread that has just drifted.
const TURN_FAULTS: u64 = 1024;
/// Which turns are held. In this order, a program that slows down or speeds up meanwhile does so for both.
const TURNS: [bool; 4] = [false, true, true, false];
/// What was found holds for so many faults.
const FOUND_FAULTS: u64 = 65_536;

/// Whether a thread is held, and how that is found out.
#[derive(Debug, Default)]
pub(super) struct Trial {
    state: State,
    /// Faults until the state changes.
    left: u64,
}

#[derive(Debug, Default)]
enum State {
    /// Nothing speaks for holding.
    #[default]
    Free,
    Trying {
        turn: usize,
        since: Duration,
        /// The shortest turn without, and with.
        best: [Duration; 2],
    },
    Found(bool),
}

impl Trial {
    pub fn holds(&self) -> bool {
        match self.state {
            State::Free => false,
            State::Trying { turn, .. } => TURNS[turn],
            State::Found(holds) => holds,
        }
    }

    /// The thread was seen to drift to another core. `now` is of any clock that goes evenly.
    pub fn drifted(&mut self, now: Duration) {
        if matches!(self.state, State::Free) {
            self.state = State::Trying { turn: 0, since: now, best: [Duration::MAX; 2] };
            self.left = TURN_FAULTS;
        }
    }

    /// Another thread raises the faults now: what was found is not of it.
    pub fn forget(&mut self) {
        self.state = State::Free;
    }

    /// The thread, or another now and then, raised a fault.
    pub fn faulted(&mut self, now: impl FnOnce() -> Duration) {
        if matches!(self.state, State::Free) {
            return;
        }
        self.left -= 1;
        if self.left > 0 {
            return;
        }
        self.left = TURN_FAULTS;
        self.state = match std::mem::take(&mut self.state) {
            State::Free | State::Found(_) => State::Free,
            State::Trying { turn, since, mut best } => {
                let now = now();
                let best_of_way = &mut best[usize::from(TURNS[turn])];
                *best_of_way = (now - since).min(*best_of_way);
                if turn + 1 < TURNS.len() {
                    State::Trying { turn: turn + 1, since: now, best }
                } else {
                    self.left = FOUND_FAULTS;
                    State::Found(best[1] < best[0])
                }
            }
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Faults that take so long each, in microseconds, without and with holding.
    struct Program {
        now: Duration,
        fault_us: [u64; 2],
    }

    impl Program {
        fn run(&mut self, trial: &mut Trial, faults: u64) {
            for _ in 0..faults {
                self.now += Duration::from_micros(self.fault_us[usize::from(trial.holds())]);
                trial.faulted(|| self.now);
            }
        }
    }

    fn tried(fault_us: [u64; 2]) -> (Trial, Program) {
        let mut program = Program { now: Duration::from_secs(7), fault_us };
        let mut trial = Trial::default();
        program.run(&mut trial, 10_000);
        assert!(!trial.holds(), "nobody drifted");
        trial.drifted(program.now);
        program.run(&mut trial, TURNS.len() as u64 * TURN_FAULTS);
        (trial, program)
    }

    #[test]
    fn the_quicker_way_is_kept_and_tried_again_only_after_a_new_drift() {
        for (fault_us, quicker) in [([50, 30], true), ([30, 40], false)] {
            let (mut trial, mut program) = tried(fault_us);
            for _ in 0..FOUND_FAULTS {
                assert_eq!(trial.holds(), quicker);
                trial.drifted(program.now);
                program.run(&mut trial, 1);
            }
            assert!(!trial.holds());
            program.run(&mut trial, 10 * TURN_FAULTS);
            assert!(!trial.holds());
            trial.drifted(program.now);
            program.run(&mut trial, TURN_FAULTS);
            assert!(trial.holds(), "its second turn");
        }
    }

    #[test]
    fn a_pause_or_a_change_of_pace_in_between_decides_nothing() {
        let mut program = Program { now: Duration::ZERO, fault_us: [50, 30] };
        let mut trial = Trial::default();
        trial.drifted(program.now);
        for turn in 0..TURNS.len() as u64 {
            // The program itself gets slower and slower, and once it has nothing to do for a second.
            program.fault_us = [50 + turn * 8, 30 + turn * 8];
            program.now += Duration::from_secs(u64::from(turn == 1));
            program.run(&mut trial, TURN_FAULTS);
        }
        assert!(trial.holds());
    }

    #[test]
    fn of_another_thread_nothing_is_known() {
        let (mut trial, mut program) = tried([50, 30]);
        assert!(trial.holds());
        trial.forget();
        assert!(!trial.holds());
        program.run(&mut trial, 10_000);
        assert!(!trial.holds());
    }
}
