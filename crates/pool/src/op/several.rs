//! Giving back several extents. Of those of one span the keys are changed together (K), and one CAS gives all of them back (F1, F3), as it does
//! what a dead host held there.
//!
//! What is not as it is remembered to be is given back, or refused, by itself.

use aquifer_fabric::{Host, Key};

use super::give::{Gift, Give, Given};
use super::{Action, FreeOp, Grant, Machine, Mutation, OpError, Step, StepResult, Strikes, lose};
use crate::cache::NodeCache;
use crate::size::SPAN_CHUNKS;
use crate::word::LogEntry;

/// Gives several extents back. Dropped before it is done it may have given back some.
#[derive(Clone, Debug)]
pub struct FreeManyOp {
    host: Host,
    grants: Vec<Grant>,
    outcomes: Outcomes,
    /// Numbers of those that are still to be given back; and of those that are to be by themselves.
    left: Vec<usize>,
    alone: Vec<usize>,
    /// Of one span: those that are given back now.
    together: Vec<usize>,
    /// Some of these, and their next keys: those are bound, and the log tells that it is this host's.
    ready: Vec<(Grant, Key)>,
    lost: u32,
    state: State,
}

#[derive(Clone, Debug)]
enum State {
    Idle,
    /// K of all of them.
    Striking(Strikes),
    /// F1 to F6 of all of them.
    Giving(Give),
    /// One by itself.
    Freeing(FreeOp, usize),
}

type Outcomes = Vec<Result<(), OpError>>;

impl FreeManyOp {
    /// An operation that gives back what `host` has taken.
    #[must_use]
    pub fn new(host: Host, grants: Vec<Grant>) -> Self {
        let (outcomes, left) = (vec![Ok(()); grants.len()], (0..grants.len()).rev().collect());
        let (alone, together, ready) = (Vec::new(), Vec::new(), Vec::new());
        Self { host, grants, outcomes, left, alone, together, ready, lost: 0, state: State::Idle }
    }
}

impl Machine for FreeManyOp {
    /// What came of each, in their order.
    type Output = Outcomes;

    fn start(&mut self, cache: &mut NodeCache) -> Step<Outcomes> {
        self.next(cache)
    }

    fn step(&mut self, cache: &mut NodeCache, result: StepResult<'_>) -> Step<Outcomes> {
        match std::mem::replace(&mut self.state, State::Idle) {
            State::Idle => panic!("no action is under way"),
            State::Striking(strikes) => self.struck(cache, strikes, result),
            State::Giving(mut give) => {
                let given = give.step(cache, result);
                self.giving(cache, give, given)
            }
            State::Freeing(mut op, number) => {
                let step = op.step(cache, result);
                self.freeing(cache, op, number, step)
            }
        }
    }
}

impl FreeManyOp {
    fn post(&mut self, state: State, action: Action) -> Step<Outcomes> {
        self.state = state;
        Step::Post(action)
    }

    /// The next, with those of the same span.
    fn next(&mut self, cache: &mut NodeCache) -> Step<Outcomes> {
        if let Some(number) = self.left.pop() {
            self.choose(cache, number);
            if self.together.len() < 2 {
                return self.free(cache, number);
            }
            self.lost = 0;
            return self.strike(cache);
        }
        match self.alone.pop() {
            Some(number) => self.free(cache, number),
            None => Step::Done(Ok(std::mem::take(&mut self.outcomes))),
        }
    }

    fn span_of(&self, number: usize) -> u32 {
        self.grants[number].chunk / SPAN_CHUNKS
    }

    /// What that one has of its span's word; 0 if it is no extent within a span.
    fn mask_of(&self, number: usize) -> u32 {
        let grant = self.grants[number];
        let run = FreeOp::new(self.host, grant).run().filter(|_| grant.class.is_within_span());
        run.map_or(0, |run| run.mask())
    }

    /// That one, and all that are left of its span and may be given back by what is remembered; none if that one may not.
    fn choose(&mut self, cache: &NodeCache, number: usize) {
        self.together.clear();
        self.ready.clear();
        if !self.may_be_given(cache, number) {
            return;
        }
        self.together.push(number);
        let (span, mut mask) = (self.span_of(number), self.mask_of(number));
        let mut rest = Vec::with_capacity(self.left.len());
        while let Some(other) = self.left.pop() {
            let others = self.mask_of(other);
            if self.span_of(other) == span && mask & others == 0 && self.may_be_given(cache, other) {
                mask |= others;
                self.together.push(other);
            } else {
                rest.push(other);
            }
        }
        rest.reverse();
        self.left = rest;
    }

    fn may_be_given(&self, cache: &NodeCache, number: usize) -> bool {
        let grant = self.grants[number];
        let is_named = grant.key != Key(0) && grant.key.class() == Some(grant.class.k());
        let op = FreeOp::new(self.host, grant);
        is_named && self.mask_of(number) != 0 && op.may_be_given(cache)
    }

    /// K, of all of them.
    fn strike(&mut self, cache: &mut NodeCache) -> Step<Outcomes> {
        if Mutation::SkipStrike.is_active() {
            return self.give(cache);
        }
        let span = self.span_of(self.together[0]);
        let grants = self.together.iter().map(|number| self.grants[*number]);
        let strikes = Strikes::of_span(span, grants, cache);
        self.post(State::Striking(strikes), Action::StrikeThen(strikes))
    }

    /// What has another key, or none, is not there any more; or it is as nobody here knows it. Either way it is looked at by itself.
    fn struck(&mut self, cache: &mut NodeCache, strikes: Strikes, result: StepResult<'_>) -> Step<Outcomes> {
        let struck = result.struck();
        let is_ours = |grant: Grant| struck >> (grant.chunk % SPAN_CHUNKS) & 1 == 1;
        let all = Mutation::GiveUnchecked.is_active();
        for number in std::mem::take(&mut self.together) {
            let list = if all || is_ours(self.grants[number]) { &mut self.together } else { &mut self.alone };
            list.push(number);
        }
        if let StepResult::StruckThen(_, entries) = result {
            let grants = self.together.iter().map(|number| self.grants[*number]);
            let is_told = |grant: &Grant| {
                let entry = LogEntry(entries[(grant.chunk % SPAN_CHUNKS) as usize]);
                is_ours(*grant) && FreeOp::new(self.host, *grant).is_told_by(entry)
            };
            self.ready.extend(grants.filter(is_told).map(|grant| (grant, strikes.next(grant))));
        }
        if self.together.is_empty() { self.next(cache) } else { self.give(cache) }
    }

    /// F1 or F3 of those whose keys are struck out.
    fn give(&mut self, cache: &mut NodeCache) -> Step<Outcomes> {
        let (span, first) = (self.span_of(self.together[0]), self.grants[self.together[0]]);
        let mask = self.together.iter().map(|number| self.mask_of(*number)).sum();
        let word = cache.span(span);
        let Some(run) = FreeOp::new(self.host, first).run().filter(|_| word.bits() & mask == mask) else {
            return self.fail(cache, OpError::NotAllocated);
        };
        for (grant, key) in &self.ready {
            cache.leave(grant.chunk, grant.class, *key);
        }
        let gift = Gift::Chunks { span, mask, run };
        let (give, action) = Give::begin(self.host, gift, self.lost, cache);
        self.post(State::Giving(give), action)
    }

    fn giving(&mut self, cache: &mut NodeCache, give: Give, given: Result<Given, OpError>) -> Step<Outcomes> {
        match given {
            Ok(Given::Post(action)) => self.post(State::Giving(give), action),
            Ok(Given::Done) => self.next(cache),
            Ok(Given::Overtaken) => match lose(&mut self.lost) {
                Ok(()) => self.give(cache),
                Err(error) => self.fail(cache, error),
            },
            Err(error) => self.fail(cache, error),
        }
    }

    fn fail(&mut self, cache: &mut NodeCache, error: OpError) -> Step<Outcomes> {
        for number in std::mem::take(&mut self.together) {
            self.outcomes[number] = Err(error);
        }
        self.next(cache)
    }

    fn free(&mut self, cache: &mut NodeCache, number: usize) -> Step<Outcomes> {
        let mut op = FreeOp::new(self.host, self.grants[number]);
        let step = op.start(cache);
        self.freeing(cache, op, number, step)
    }

    fn freeing(
        &mut self,
        cache: &mut NodeCache,
        op: FreeOp,
        number: usize,
        step: Step<()>,
    ) -> Step<Outcomes> {
        match step {
            Step::Post(action) => self.post(State::Freeing(op, number), action),
            Step::Done(outcome) => {
                self.outcomes[number] = outcome;
                self.next(cache)
            }
        }
    }
}
