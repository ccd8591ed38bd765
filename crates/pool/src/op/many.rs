//! Taking several extents of one size, one after another. What A8 writes for one goes with the next one's CAS, so that each takes one
//! trip to the node instead of two.

use aquifer_fabric::Host;

use super::owed::Owed;
use super::{Action, AllocOp, Grant, Machine, Mutation, OpError, Step, StepResult};
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
    owed: Owed,
    state: State,
}

/// What was taken.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Several {
    /// At least one, if one was asked for.
    pub grants: Vec<Grant>,
    /// Why there are no more, if not for want of room. What that got half way is nobody's business but an audit's.
    pub failure: Option<OpError>,
}

#[derive(Clone, Debug)]
enum State {
    Idle,
    Taking(AllocOp),
    /// A8 by itself, and then this.
    Writing(AllocOp, Action),
    /// The last A8.
    Ending(Option<OpError>),
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
        let granted = Vec::new();
        Self { host, class, count, mutation, granted, owed: Owed::NOTHING, state: State::Idle }
    }
}

impl Machine for AllocManyOp {
    type Output = Several;

    fn start(&mut self, cache: &mut NodeCache) -> Step<Several> {
        self.granted.reserve(self.count as usize);
        self.take(cache)
    }

    fn step(&mut self, cache: &mut NodeCache, result: StepResult<'_>) -> Step<Several> {
        match std::mem::replace(&mut self.state, State::Idle) {
            State::Idle => panic!("no action is under way"),
            State::Taking(mut op) => {
                let step = op.step(cache, result);
                self.go_on(cache, op, step)
            }
            State::Writing(op, action) => self.post(State::Taking(op), action),
            State::Ending(failure) => self.done(failure),
        }
    }
}

impl AllocManyOp {
    fn post(&mut self, state: State, action: Action) -> Step<Several> {
        self.state = state;
        Step::Post(action)
    }

    fn take(&mut self, cache: &mut NodeCache) -> Step<Several> {
        if self.granted.len() >= self.count as usize {
            return self.end(None);
        }
        let mut op = AllocOp::mutated(self.host, self.class, self.mutation).owing();
        let step = op.start(cache);
        self.go_on(cache, op, step)
    }

    fn go_on(&mut self, cache: &mut NodeCache, mut op: AllocOp, step: Step<Grant>) -> Step<Several> {
        // It is granted, though there may be hints to be given before the operation is over.
        self.owed.note(op.take_owed());
        match step {
            Step::Post(action) => match self.owed.before(action) {
                (action, None) => self.post(State::Taking(op), action),
                (action, Some(then)) => self.post(State::Writing(op, then), action),
            },
            Step::Done(Ok(grant)) => {
                self.granted.push(grant);
                self.take(cache)
            }
            Step::Done(Err(error)) if self.granted.is_empty() => Step::Done(Err(error)),
            Step::Done(Err(error)) => self.end((error != OpError::Full).then_some(error)),
        }
    }

    fn end(&mut self, failure: Option<OpError>) -> Step<Several> {
        match self.owed.pay() {
            Some(action) => self.post(State::Ending(failure), action),
            None => self.done(failure),
        }
    }

    fn done(&mut self, failure: Option<OpError>) -> Step<Several> {
        Step::Done(Ok(Several { grants: std::mem::take(&mut self.granted), failure }))
    }
}
