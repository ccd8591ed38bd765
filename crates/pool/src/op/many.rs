//! Allocating several extents of one size, one after another. What A8 writes for one goes with the next one's first operation, so that each takes one trip to the node
//! instead of two.

use aquifer_fabric::Host;

use super::{Action, AllocOp, Grant, Machine, OpError, Step, StepResult};
use crate::cache::NodeCache;
use crate::size::SizeClass;

/// Allocates as many extents as there are, up to a number. Dropped before it is done it may have allocated some.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct AllocManyOp {
    host: Host,
    class: SizeClass,
    count: u32,
    granted: Vec<Grant>,
    state: State,
}

/// What was allocated.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Several {
    /// At least one, if one was asked for.
    pub grants: Vec<Grant>,
    /// Why there are no more, if not for want of room. An audit frees what it allocated half way.
    pub failure: Option<OpError>,
}

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
enum State {
    Idle,
    Allocating(AllocOp),
    /// The last A8.
    Recording(Option<OpError>),
}

impl AllocManyOp {
    /// An operation that allocates up to `count` extents of `class` for `host`.
    #[must_use]
    pub const fn new(host: Host, class: SizeClass, count: u32) -> Self {
        Self { host, class, count, granted: Vec::new(), state: State::Idle }
    }
}

impl Machine for AllocManyOp {
    type Output = Several;

    fn start(&mut self, cache: &mut NodeCache) -> Step<Several> {
        self.granted.reserve(self.count as usize);
        self.next(cache, Action::default())
    }

    fn step(&mut self, cache: &mut NodeCache, result: StepResult<'_>) -> Step<Several> {
        match std::mem::replace(&mut self.state, State::Idle) {
            State::Idle => panic!("no action is under way"),
            State::Allocating(mut op) => {
                let step = op.step(cache, result);
                self.allocating(cache, op, step, Action::default())
            }
            State::Recording(failure) => self.done(failure),
        }
    }
}

impl AllocManyOp {
    /// Allocates the next one. `record` is A8 of the one before.
    fn next(&mut self, cache: &mut NodeCache, record: Action) -> Step<Several> {
        if self.granted.len() >= self.count as usize {
            return self.end(record, None);
        }
        let mut op = AllocOp::new(self.host, self.class).leaving_record();
        let step = op.start(cache);
        self.allocating(cache, op, step, record)
    }

    fn allocating(
        &mut self,
        cache: &mut NodeCache,
        mut op: AllocOp,
        step: Step<Grant>,
        record: Action,
    ) -> Step<Several> {
        // An extent may be allocated though its operation still has hints to set.
        let record = record.then(op.take_record());
        match step {
            Step::Post(action) => {
                self.state = State::Allocating(op);
                Step::Post(record.then(action))
            }
            Step::Done(Ok(grant)) => {
                self.granted.push(grant);
                self.next(cache, record)
            }
            Step::Done(Err(OpError::Full)) if !self.granted.is_empty() => self.end(record, None),
            Step::Done(Err(error)) if self.granted.is_empty() => Step::Done(Err(error)),
            Step::Done(Err(error)) => self.end(record, Some(error)),
        }
    }

    fn end(&mut self, record: Action, failure: Option<OpError>) -> Step<Several> {
        if record.is_empty() {
            return self.done(failure);
        }
        self.state = State::Recording(failure);
        Step::Post(record)
    }

    fn done(&mut self, failure: Option<OpError>) -> Step<Several> {
        Step::Done(Ok(Several { grants: std::mem::take(&mut self.granted), failure }))
    }
}
