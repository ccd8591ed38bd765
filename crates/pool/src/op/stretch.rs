//! A9: taking neighbouring sections that together are one extent, larger than any size class.
//!
//! Each is taken as an extent of its own, and all under one key. So whatever becomes of whoever does this, words and log tell of each
//! section whose it is, and it is given back as any other.

use aquifer_fabric::{Host, Key};

use super::{
    Action, AllocOp, FreeOp, Grant, Machine, Mutation, OpError, READ_WORDS_MAX, Step, StepResult, WordAt,
};
use crate::cache::NodeCache;
use crate::size::{SECTION_CHUNKS, SizeClass};

/// Stretches begun and given back, for others were faster, after which there is none to be had.
const ATTEMPTS_MAX: u32 = 64;

/// Takes a stretch of sections, all or none. Dropped before it is done it may have taken some.
#[derive(Clone, Debug)]
pub struct StretchOp {
    host: Host,
    count: u32,
    mutation: Mutation,
    key: Key,
    /// The first section, and how many are ours already.
    first: u32,
    taken: u32,
    lost: u32,
    /// What is remembered was read by this operation.
    is_fresh: bool,
    state: State,
}

#[derive(Clone, Debug)]
enum State {
    Idle,
    /// R.
    Reading {
        first: u32,
        count: u32,
    },
    /// A0, L, A7, A8 of the section after those that are taken.
    Taking(AllocOp),
    /// K, F5 of the last that was taken. Then others are tried, or this is the end.
    Returning(FreeOp, Option<OpError>),
}

impl StretchOp {
    /// An operation that takes `count` sections for `host`; none if it is 0.
    #[must_use]
    pub const fn new(host: Host, count: u32) -> Self {
        Self::mutated(host, count, Mutation::None)
    }

    /// The same with a fault, for tests.
    #[must_use]
    pub const fn mutated(host: Host, count: u32, mutation: Mutation) -> Self {
        Self {
            host,
            count,
            mutation,
            key: Key(0),
            first: 0,
            taken: 0,
            lost: 0,
            is_fresh: false,
            state: State::Idle,
        }
    }
}

impl Machine for StretchOp {
    /// The first of the sections; all have its key.
    type Output = Grant;

    fn start(&mut self, cache: &mut NodeCache) -> Step<Grant> {
        if self.count == 0 || self.count > cache.section_count() {
            return Step::Done(Err(OpError::Full));
        }
        self.key = cache.fresh_key(SizeClass::SECTION);
        self.find(cache)
    }

    fn step(&mut self, cache: &mut NodeCache, result: StepResult<'_>) -> Step<Grant> {
        match std::mem::replace(&mut self.state, State::Idle) {
            State::Idle => panic!("no action is under way"),
            State::Reading { first, count } => {
                // A READ may tear a word. What looks impossible is left to the CAS, which does not.
                cache.learn_sections(first, count, result).ok();
                self.read(cache, first + count)
            }
            State::Taking(mut op) => {
                let step = op.step(cache, result);
                self.taking(cache, op, step)
            }
            State::Returning(mut op, failure) => {
                let step = op.step(cache, result);
                self.returning(cache, op, step, failure)
            }
        }
    }
}

impl StretchOp {
    fn post(&mut self, state: State, action: Action) -> Step<Grant> {
        self.state = state;
        Step::Post(action)
    }

    fn grant(&self, section: u32) -> Grant {
        Grant { chunk: section * SECTION_CHUNKS, class: SizeClass::SECTION, key: self.key }
    }

    /// Find so many free sections side by side, in what we remember, then in what there is.
    fn find(&mut self, cache: &mut NodeCache) -> Step<Grant> {
        match cache.find_stretch(self.count) {
            Some(first) => {
                self.first = first;
                self.take(cache)
            }
            None if self.is_fresh => Step::Done(Err(OpError::Full)),
            None => self.find_anew(cache),
        }
    }

    /// What we remember is old.
    fn find_anew(&mut self, cache: &mut NodeCache) -> Step<Grant> {
        self.is_fresh = true;
        self.read(cache, 0)
    }

    fn read(&mut self, cache: &mut NodeCache, first: u32) -> Step<Grant> {
        let count = READ_WORDS_MAX.min(cache.section_count() - first);
        if count == 0 {
            return self.find(cache);
        }
        self.post(State::Reading { first, count }, Action::Read { at: WordAt::Section(first), count })
    }

    /// The next of them.
    fn take(&mut self, cache: &mut NodeCache) -> Step<Grant> {
        let mut op = AllocOp::of_section(self.host, self.first + self.taken, self.key, self.mutation);
        let step = op.start(cache);
        self.taking(cache, op, step)
    }

    fn taking(&mut self, cache: &mut NodeCache, op: AllocOp, step: Step<Grant>) -> Step<Grant> {
        match step {
            Step::Post(action) => self.post(State::Taking(op), action),
            Step::Done(Ok(_)) => {
                self.taken += 1;
                if self.taken == self.count {
                    Step::Done(Ok(self.grant(self.first)))
                } else {
                    self.take(cache)
                }
            }
            // Somebody was faster, which is remembered now.
            Step::Done(Err(OpError::Full)) => {
                self.lost += 1;
                self.give_back(cache, (self.lost == ATTEMPTS_MAX).then_some(OpError::Full))
            }
            Step::Done(Err(error)) => self.give_back(cache, Some(error)),
        }
    }

    /// Give back what was taken, last first.
    fn give_back(&mut self, cache: &mut NodeCache, failure: Option<OpError>) -> Step<Grant> {
        let Some(left) = self.taken.checked_sub(1).filter(|_| self.mutation != Mutation::KeepPart) else {
            self.taken = 0;
            return failure.map_or_else(|| self.find_anew(cache), |error| Step::Done(Err(error)));
        };
        self.taken = left;
        let mut op = FreeOp::mutated(self.host, self.grant(self.first + left), self.mutation);
        let step = op.start(cache);
        self.returning(cache, op, step, failure)
    }

    fn returning(
        &mut self,
        cache: &mut NodeCache,
        op: FreeOp,
        step: Step<()>,
        failure: Option<OpError>,
    ) -> Step<Grant> {
        match step {
            Step::Post(action) => self.post(State::Returning(op, failure), action),
            Step::Done(Ok(())) => self.give_back(cache, failure),
            Step::Done(Err(error)) => Step::Done(Err(failure.unwrap_or(error))),
        }
    }
}
