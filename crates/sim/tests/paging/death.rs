//! Kills the agent at a given step: a call of a monitor to its edge, or a store to a page table.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

/// The payload with which the agent's death unwinds.
struct AgentDied;

thread_local! {
    /// Steps until the agent of this thread's schedule dies; 0 if it does not.
    static STEPS_LEFT: Cell<u32> = const { Cell::new(0) };
    /// Whether only steps at which an event is applied count.
    static IS_EVENTS_ONLY: Cell<bool> = const { Cell::new(false) };
}

/// Kills the agent after this number of steps.
pub fn schedule(steps: u32) {
    STEPS_LEFT.set(steps);
    IS_EVENTS_ONLY.set(false);
}

/// Kills the agent at the step at which it applies this number of events. The other events that it
/// had read are delivered again.
pub fn schedule_at_event(steps: u32) {
    STEPS_LEFT.set(steps);
    IS_EVENTS_ONLY.set(true);
}

/// Counts a step at which an event is applied.
pub fn event_step() {
    count();
}

/// Counts any other step.
pub fn step() {
    if !IS_EVENTS_ONLY.get() {
        count();
    }
}

/// Counts one step. Does not return from the last one.
fn count() {
    match STEPS_LEFT.get() {
        0 => {}
        1 => {
            schedule(0);
            resume_unwind(Box::new(AgentDied));
        }
        steps => STEPS_LEFT.set(steps - 1),
    }
}

/// Calls `act`, and returns whether the agent survived it.
pub fn survives(act: impl FnOnce()) -> bool {
    match catch_unwind(AssertUnwindSafe(act)) {
        Ok(()) => true,
        Err(thrown) if thrown.is::<AgentDied>() => false,
        Err(thrown) => resume_unwind(thrown),
    }
}
