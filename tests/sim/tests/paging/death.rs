//! Kills the agent at a given step: a call of a monitor to its edge, or a store to a page table.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

/// The payload with which the agent's death unwinds.
struct AgentDied;

thread_local! {
    /// Steps until the agent of this thread's schedule dies; 0 if it does not.
    static STEPS_LEFT: Cell<u32> = const { Cell::new(0) };
    /// The only steps that count; `None` if all do.
    static KIND: Cell<Option<StepKind>> = const { Cell::new(None) };
}

/// The steps at which the death of an agent is most likely to do harm.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum StepKind {
    /// An event is applied. The other events that were read with it are delivered again.
    Event,
    /// A fetched page is moved to another slab.
    Move,
}

/// Kills the agent after this number of steps.
pub fn schedule(steps: u32) {
    STEPS_LEFT.set(steps);
    KIND.set(None);
}

/// Kills the agent after this number of steps of one kind.
pub fn schedule_at(kind: StepKind, steps: u32) {
    STEPS_LEFT.set(steps);
    KIND.set(Some(kind));
}

/// Counts a step of a kind.
pub fn step_of(kind: StepKind) {
    if KIND.get().is_none_or(|counted| counted == kind) {
        count();
    }
}

/// Counts any other step.
pub fn step() {
    if KIND.get().is_none() {
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
