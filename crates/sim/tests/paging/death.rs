//! The agent's death: at any call of a monitor to its surroundings, and before any change of a page table.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

/// What is thrown.
struct AgentDied;

thread_local! {
    /// Steps until the agent of this thread's schedule dies; 0: it does not.
    static STEPS_LEFT: Cell<u32> = const { Cell::new(0) };
    /// Only what a monitor says of events counts as a step.
    static IS_EVENTS_ONLY: Cell<bool> = const { Cell::new(false) };
}

/// Have the agent die after so many steps.
pub fn schedule(steps: u32) {
    STEPS_LEFT.set(steps);
    IS_EVENTS_ONLY.set(false);
}

/// Have the agent die when it has applied so many events, or begun to: what it had read beside them is told again.
pub fn schedule_at_event(steps: u32) {
    STEPS_LEFT.set(steps);
    IS_EVENTS_ONLY.set(true);
}

/// A step at which an event is applied.
pub fn event_step() {
    count();
}

/// Any other step.
pub fn step() {
    if !IS_EVENTS_ONLY.get() {
        count();
    }
}

/// One step; the last one does not return.
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

/// Whether the agent lives through it.
pub fn survives(act: impl FnOnce()) -> bool {
    match catch_unwind(AssertUnwindSafe(act)) {
        Ok(()) => true,
        Err(thrown) if thrown.is::<AgentDied>() => false,
        Err(thrown) => resume_unwind(thrown),
    }
}
