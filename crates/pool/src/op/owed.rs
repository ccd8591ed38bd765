//! A8 that waits for what is done next, so that both take one trip to the node.

use super::{Action, Writes};

/// What A8 is to write. Nothing else is done before it is.
#[derive(Clone, Copy, Debug)]
pub(super) struct Owed(Option<Writes>);

impl Owed {
    pub const NOTHING: Self = Self(None);

    /// So this is owed, if it is something. What was owed before must have been written.
    pub const fn note(&mut self, writes: Option<Writes>) {
        if writes.is_some() {
            self.0 = writes;
        }
    }

    /// What is written by itself, at the end.
    pub fn pay(&mut self) -> Option<Action> {
        self.0.take().map(Action::Write)
    }

    /// What is to be done now so that this action is done next, and what after that. With a CAS it is one trip.
    pub fn before(&mut self, action: Action) -> (Action, Option<Action>) {
        match (self.0.take(), action) {
            (None, action) => (action, None),
            (Some(writes), Action::Cas { at, expected, desired }) => {
                (Action::WriteThen { writes, at, expected, desired }, None)
            }
            (Some(writes), action) => (Action::Write(writes), Some(action)),
        }
    }
}
