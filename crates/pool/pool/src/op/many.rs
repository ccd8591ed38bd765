//! Allocates several extents of one size, one after another.
//!
//! The WRITEs of A8 for one extent are posted with the first operation of the next, so that each
//! extent costs one trip to the node instead of two.

use aquifer_fabric::Host;

use super::{Action, AllocOp, Grant, OpError, StateMachine, Step, StepResult};
use crate::cache::NodeCache;
use crate::size::SizeClass;

/// Allocates up to a number of extents, until the node is full.
///
/// If the operation is dropped before it is done, some extents may be allocated.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct AllocManyOp {
    host: Host,
    class: SizeClass,
    count: u32,
    granted: Vec<Grant>,
    state: AllocManyState,
}

/// The extents that were allocated together.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct GrantBatch {
    /// The extents: at least one, unless none was requested.
    pub grants: Vec<Grant>,
    /// The error that ended the batch early; `None` if the node was full. A leak scan frees an
    /// extent that was allocated without its record.
    pub failure: Option<OpError>,
}

/// The step in progress.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
enum AllocManyState {
    Idle,
    Allocating(AllocOp),
    /// A8: writes key and record of the last extent.
    Recording(Option<OpError>),
}

impl AllocManyOp {
    /// Creates an operation that allocates up to `count` extents of `class` for `host`.
    #[must_use]
    pub const fn new(host: Host, class: SizeClass, count: u32) -> Self {
        Self { host, class, count, granted: Vec::new(), state: AllocManyState::Idle }
    }
}

impl StateMachine for AllocManyOp {
    type Output = GrantBatch;

    fn start(&mut self, cache: &mut NodeCache) -> Step<GrantBatch> {
        self.granted.reserve(self.count as usize);
        self.next(cache, Action::default())
    }

    fn step(&mut self, cache: &mut NodeCache, result: StepResult<'_>) -> Step<GrantBatch> {
        match std::mem::replace(&mut self.state, AllocManyState::Idle) {
            AllocManyState::Idle => panic!("no action is in flight"),
            AllocManyState::Allocating(mut op) => {
                let step = op.step(cache, result);
                self.allocating(cache, op, step, Action::default())
            }
            AllocManyState::Recording(failure) => self.done(failure),
        }
    }
}

impl AllocManyOp {
    /// Allocates the next extent. `record` is A8 of the one before.
    fn next(&mut self, cache: &mut NodeCache, record: Action) -> Step<GrantBatch> {
        if self.granted.len() >= self.count as usize {
            return self.end(record, None);
        }
        let mut op = AllocOp::new(self.host, self.class).deferring_record();
        let step = op.start(cache);
        self.allocating(cache, op, step, record)
    }

    fn allocating(
        &mut self,
        cache: &mut NodeCache,
        mut op: AllocOp,
        step: Step<Grant>,
        record: Action,
    ) -> Step<GrantBatch> {
        // An extent may be allocated although its operation still has hints to set.
        let record = record.then(op.pop_record());
        match step {
            Step::Post(action) => {
                self.state = AllocManyState::Allocating(op);
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

    fn end(&mut self, record: Action, failure: Option<OpError>) -> Step<GrantBatch> {
        if record.is_empty() {
            return self.done(failure);
        }
        self.state = AllocManyState::Recording(failure);
        Step::Post(record)
    }

    fn done(&mut self, failure: Option<OpError>) -> Step<GrantBatch> {
        Step::Done(Ok(GrantBatch { grants: std::mem::take(&mut self.granted), failure }))
    }
}
