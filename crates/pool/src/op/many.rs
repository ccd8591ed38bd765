//! Taking several extents of one size: as many of a span at once as a CAS alone takes, by a chain of CASes; others one after another. What A8 writes for one of these
//! goes with the next one's CAS, so that each takes one trip to the node instead of two.

use aquifer_fabric::Host;

use super::owed::Owed;
use super::{
    Action, AllocOp, Chain, Chained, Grant, Machine, Mutation, OpError, Step, StepResult, WordAt, damaged,
};
use crate::cache::NodeCache;
use crate::size::{SPAN_CHUNKS, SizeClass};

/// After so many broken chains of one operation the rest is taken one by one.
const CHAINS_LOST_MAX: u32 = 8;

/// Takes as many extents as there are, up to a number. Dropped before it is done it may have taken some.
#[derive(Clone, Debug)]
pub struct AllocManyOp {
    host: Host,
    class: SizeClass,
    count: u32,
    granted: Vec<Grant>,
    owed: Owed,
    /// Chains that others broke.
    lost: u32,
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
    Chaining(Chain),
    /// A8 of the one before, and then this.
    Recording(Chain),
    /// A8 by itself, and then this.
    Writing(AllocOp, Action),
    /// The last A8.
    Ending(Option<OpError>),
}

impl AllocManyOp {
    /// An operation that takes up to `count` extents of `class` for `host`.
    #[must_use]
    pub const fn new(host: Host, class: SizeClass, count: u32) -> Self {
        let granted = Vec::new();
        Self { host, class, count, granted, owed: Owed::NOTHING, lost: 0, state: State::Idle }
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
            State::Chaining(chain) => self.chained(cache, chain, result),
            State::Recording(chain) => self.post(State::Chaining(chain), Action::Chain(chain)),
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
        let wanted = self.count - u32::try_from(self.granted.len()).unwrap_or(u32::MAX);
        if self.lost < CHAINS_LOST_MAX
            && self.class.is_within_span()
            && let Some(chain) = cache.chain(self.host, self.class, wanted)
        {
            return match self.owed.pay() {
                Some(action) => self.post(State::Recording(chain), action),
                None => self.post(State::Chaining(chain), Action::Chain(chain)),
            };
        }
        let mut op = AllocOp::new(self.host, self.class).owing();
        let step = op.start(cache);
        self.go_on(cache, op, step)
    }

    /// What was taken of a chain is ours: keys and records are there.
    fn chained(&mut self, cache: &mut NodeCache, chain: Chain, result: StepResult<'_>) -> Step<Several> {
        let Chained { taken, is_whole, word } = result.chained();
        let taken = if Mutation::TrustChain.is_active() && taken & 1 == 1 { u32::MAX } else { taken };
        let (span, at) = (chain.span(), WordAt::Span(chain.span()));
        for (_, run) in chain.runs().enumerate().filter(|(number, _)| taken >> number & 1 == 1) {
            let chunk = span * SPAN_CHUNKS + u32::from(run.first());
            let key = cache.left(chunk, chain.class()).expect("it was left when the chain was made");
            cache.forget_left(chunk, chain.class());
            self.granted.push(Grant { chunk, class: chain.class(), key });
        }
        let learnt = if is_whole {
            cache.change_span(span, word).map_err(|cause| damaged(at, word.0, cause))
        } else {
            self.lost += 1;
            cache.learn(at, word.0)
        };
        if let Err(error) = learnt {
            return self.fail(error);
        }
        if is_whole {
            cache.settle(at);
        }
        cache.note_if_filled(span);
        self.take(cache)
    }

    fn fail(&mut self, error: OpError) -> Step<Several> {
        if self.granted.is_empty() { Step::Done(Err(error)) } else { self.end(Some(error)) }
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
            Step::Done(Err(OpError::Full)) if !self.granted.is_empty() => self.end(None),
            Step::Done(Err(error)) => self.fail(error),
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
