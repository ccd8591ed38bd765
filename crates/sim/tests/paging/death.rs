//! The agent's death: at any call of a monitor to its surroundings, and before any change of a page table.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

/// What is thrown.
struct AgentDied;

thread_local! {
    /// Steps until the agent of this thread's schedule dies; 0: it does not.
    static DIES_IN: Cell<u32> = const { Cell::new(0) };
    /// Only what a monitor says of events counts as a step.
    static AT_EVENTS: Cell<bool> = const { Cell::new(false) };
}

/// Have the agent die after so many steps.
pub fn set(steps: u32) {
    DIES_IN.set(steps);
    AT_EVENTS.set(false);
}

/// Have the agent die when it has heeded so many events, or begun to: what it had read beside them is told again.
pub fn set_at_events(steps: u32) {
    DIES_IN.set(steps);
    AT_EVENTS.set(true);
}

/// A step at which an event is heeded.
pub fn pass_event() {
    count();
}

/// Any other step.
pub fn pass() {
    if !AT_EVENTS.get() {
        count();
    }
}

/// One step; the last one does not return.
fn count() {
    match DIES_IN.get() {
        0 => {}
        1 => {
            set(0);
            resume_unwind(Box::new(AgentDied));
        }
        steps => DIES_IN.set(steps - 1),
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
