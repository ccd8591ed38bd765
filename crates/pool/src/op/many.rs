//! Taking several extents of one size, one after another. What A8 writes for one goes with the next one's CAS, so that each takes one
//! trip to the node instead of two.

use aquifer_fabric::Host;

use super::{Action, AllocOp, Grant, Machine, Mutation, OpError, Step, StepResult, Writes};
use crate::cache::NodeCache;
use crate::size::SizeClass;

/// Takes as many extents as there are, up to a number. Dropped before it is done it may have taken some.
#[derive(Clone, Debug)]
pub struct AllocManyOp {
    host: Host,
    class: SizeClass,
    count: u32,
    mutation: Mutation,
    granted: Vec<Grant>,
    /// A8 of what was granted last. Nothing is done before it is.
    owed: Option<Writes>,
    state: State,
}

#[derive(Clone, Debug)]
enum State {
    Idle,
    Taking(AllocOp),
    /// A8 by itself, and then this.
    Writing(AllocOp, Action),
    /// The last A8.
    Ending,
}

impl AllocManyOp {
    /// An operation that takes up to `count` extents of `class` for `host`.
    #[must_use]
    pub const fn new(host: Host, class: SizeClass, count: u32) -> Self {
        Self::mutated(host, class, count, Mutation::None)
    }

    /// The same with a fault, for tests.
    #[must_use]
    pub const fn mutated(host: Host, class: SizeClass, count: u32, mutation: Mutation) -> Self {
        Self { host, class, count, mutation, granted: Vec::new(), owed: None, state: State::Idle }
    }
}

impl Machine for AllocManyOp {
    /// At least one, if one was asked for.
    type Output = Vec<Grant>;

    fn start(&mut self, cache: &mut NodeCache) -> Step<Self::Output> {
        self.granted.reserve(self.count as usize);
        self.take(cache)
    }

    fn step(&mut self, cache: &mut NodeCache, result: StepResult<'_>) -> Step<Self::Output> {
        match std::mem::replace(&mut self.state, State::Idle) {
            State::Idle => panic!("no action is under way"),
            State::Taking(mut op) => {
                let step = op.step(cache, result);
                self.go_on(cache, op, step)
            }
            State::Writing(op, action) => self.post(State::Taking(op), action),
            State::Ending => self.done(),
        }
    }
}

impl AllocManyOp {
    fn post(&mut self, state: State, action: Action) -> Step<Vec<Grant>> {
        self.state = state;
        Step::Post(action)
    }

    fn take(&mut self, cache: &mut NodeCache) -> Step<Vec<Grant>> {
        if self.granted.len() >= self.count as usize {
            return self.end();
        }
        let mut op = AllocOp::mutated(self.host, self.class, self.mutation).owing();
        let step = op.start(cache);
        self.go_on(cache, op, step)
    }

    fn go_on(&mut self, cache: &mut NodeCache, mut op: AllocOp, step: Step<Grant>) -> Step<Vec<Grant>> {
        // It is granted, though there may be hints to be given before the operation is over.
        self.owed = op.take_owed().or(self.owed);
        match step {
            Step::Post(action) => self.post_after_owed(op, action),
            Step::Done(Ok(grant)) => {
                self.granted.push(grant);
                self.take(cache)
            }
            Step::Done(Err(OpError::Full)) if !self.granted.is_empty() => self.end(),
            // Nobody is told of what was granted, and an audit finds it.
            Step::Done(Err(error)) => Step::Done(Err(error)),
        }
    }

    fn post_after_owed(&mut self, op: AllocOp, action: Action) -> Step<Vec<Grant>> {
        match (self.owed.take(), action) {
            (None, action) => self.post(State::Taking(op), action),
            (Some(writes), Action::Cas { at, expected, desired }) => {
                self.post(State::Taking(op), Action::WriteThen { writes, at, expected, desired })
            }
            (Some(writes), action) => self.post(State::Writing(op, action), Action::Write(writes)),
        }
    }

    fn end(&mut self) -> Step<Vec<Grant>> {
        match self.owed.take() {
            Some(writes) => self.post(State::Ending, Action::Write(writes)),
            None => self.done(),
        }
    }

    fn done(&mut self) -> Step<Vec<Grant>> {
        Step::Done(Ok(std::mem::take(&mut self.granted)))
    }
}
