//! A9: taking neighbouring sections that together are one extent, larger than any size class.
//!
//! Each is taken as an extent of its own, and all under one key. So whatever becomes of whoever does this, words and log tell of each
//! section whose it is, and it is given back as any other.

use aquifer_fabric::{Host, Key};

use super::{
    Action, AllocOp, FreeOp, Grant, Machine, Mutation, OpError, Outcomes, READ_WORDS_MAX,
    SURVEY_SECTIONS_MAX, Step, StepResult, WordAt,
};
use crate::cache::NodeCache;
use crate::size::{SECTION_CHUNKS, SizeClass};
use crate::word::Run;

/// Stretches begun and given back, for others were faster, after which there is none to be had.
const ATTEMPTS_MAX: u32 = 64;

/// Takes a stretch of sections, all or none. Dropped before it is done it may have taken some.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct StretchOp {
    host: Host,
    count: u32,
    key: Key,
    /// The first section, and how many are ours already.
    first: u32,
    taken: u32,
    lost: u32,
    /// Where a race was lost last: others begin there, and what they have taken since follows.
    lost_at: u32,
    /// All that is remembered was read by this operation.
    is_fresh: bool,
    state: State,
}

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
enum State {
    Idle,
    /// R: so many, and more up to the last.
    Reading {
        first: u32,
        count: u32,
        end: u32,
    },
    /// A0, of several.
    Surveying {
        first: u32,
        count: u32,
    },
    /// A0, L, A7 of the section after those that are taken.
    Taking(AllocOp),
    /// The last A8.
    Ending,
    /// The last A8 of what goes back.
    Recording(Option<OpError>),
    /// K, F5 of the last that was taken. Then others are tried, or this is the end.
    Returning(FreeOp, Option<OpError>),
}

impl StretchOp {
    /// An operation that takes `count` sections for `host`; none if it is 0.
    #[must_use]
    pub const fn new(host: Host, count: u32) -> Self {
        Self {
            host,
            count,
            key: Key(0),
            first: 0,
            taken: 0,
            lost: 0,
            lost_at: 0,
            is_fresh: false,
            state: State::Idle,
        }
    }
}

impl Machine for StretchOp {
    /// The first of the sections; all have its key.
    type Output = Grant;

    fn start(&mut self, cache: &mut NodeCache) -> Step<Grant> {
        let sections = cache.section_count();
        if self.count == 0 || self.count > sections {
            return Step::Done(Err(OpError::Full));
        }
        self.key = cache.fresh_key(SizeClass::SECTION);
        // What is taken in vain costs more than reading all anew, unless the node is very large.
        if sections.div_ceil(READ_WORDS_MAX) <= self.count { self.find_anew(cache) } else { self.find(cache) }
    }

    fn step(&mut self, cache: &mut NodeCache, result: StepResult<'_>) -> Step<Grant> {
        match std::mem::replace(&mut self.state, State::Idle) {
            State::Idle => panic!("no action is under way"),
            State::Reading { first, count, end } => {
                // A READ may tear a word. What looks impossible is left to the CAS, which does not.
                cache.learn_sections(first, count, result).ok();
                self.read(cache, first + count, end)
            }
            State::Surveying { first, count } => {
                cache.learn_survey(first, count, result).ok();
                self.survey(cache, first + count)
            }
            State::Taking(mut op) => {
                let step = op.step(cache, result);
                self.taking(cache, op, step, Action::default())
            }
            State::Ending => Step::Done(Ok(self.grant(self.first))),
            State::Recording(failure) => self.give_back(cache, failure),
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
                self.survey(cache, first)
            }
            None if self.is_fresh => Step::Done(Err(OpError::Full)),
            None => self.find_anew(cache),
        }
    }

    /// What we remember is old.
    fn find_anew(&mut self, cache: &mut NodeCache) -> Step<Grant> {
        self.is_fresh = true;
        self.read(cache, 0, cache.section_count())
    }

    fn read(&mut self, cache: &mut NodeCache, first: u32, end: u32) -> Step<Grant> {
        let count = READ_WORDS_MAX.min(end - first);
        if count == 0 {
            return self.find(cache);
        }
        self.post(State::Reading { first, count, end }, Action::read(WordAt::Section(first), count))
    }

    /// A0 before anything is taken: whose those from `from` on are, as far as that is not known. One that is another's is found out before its neighbours were taken for nothing.
    fn survey(&mut self, cache: &mut NodeCache, from: u32) -> Step<Grant> {
        let end = self.first + self.count;
        let Some(next) = (from..end).find(|section| cache.unready(*section, Run::SECTION) != 0) else {
            let is_foreign = |section: u32| cache.has_foreign(section, Run::SECTION);
            return if (self.first..end).any(is_foreign) {
                self.find(cache)
            } else {
                self.take(cache, Action::default())
            };
        };
        let count = SURVEY_SECTIONS_MAX.min(end - next);
        self.post(State::Surveying { first: next, count }, Action::survey(next, count))
    }

    /// Allocates the next of them. `record` is A8 of the one before.
    fn take(&mut self, cache: &mut NodeCache, record: Action) -> Step<Grant> {
        let section = self.first + self.taken;
        let mut op = AllocOp::of_section(self.host, section, self.key).leaving_record();
        let step = op.start(cache);
        self.taking(cache, op, step, record)
    }

    fn taking(
        &mut self,
        cache: &mut NodeCache,
        mut op: AllocOp,
        step: Step<Grant>,
        record: Action,
    ) -> Step<Grant> {
        let record = record.then(op.take_record());
        match step {
            Step::Post(action) => self.post(State::Taking(op), record.then(action)),
            Step::Done(Ok(_)) => {
                self.taken += 1;
                if self.taken < self.count { self.take(cache, record) } else { self.end(record) }
            }
            // Another client was faster, which is remembered now.
            Step::Done(Err(OpError::Full)) => {
                self.lost += 1;
                self.lost_at = self.first + self.taken;
                self.roll_back(cache, record, (self.lost == ATTEMPTS_MAX).then_some(OpError::Full))
            }
            Step::Done(Err(error)) => self.roll_back(cache, record, Some(error)),
        }
    }

    fn end(&mut self, record: Action) -> Step<Grant> {
        if record.is_empty() {
            return Step::Done(Ok(self.grant(self.first)));
        }
        self.post(State::Ending, record)
    }

    /// Frees what was allocated. Only an extent that has its key can be freed.
    fn roll_back(&mut self, cache: &mut NodeCache, record: Action, failure: Option<OpError>) -> Step<Grant> {
        if record.is_empty() {
            return self.give_back(cache, failure);
        }
        self.post(State::Recording(failure), record)
    }

    /// Give back what was taken, last first.
    fn give_back(&mut self, cache: &mut NodeCache, failure: Option<OpError>) -> Step<Grant> {
        let Some(left) = self.taken.checked_sub(1).filter(|_| !Mutation::KeepPart.is_active()) else {
            self.taken = 0;
            let end = cache.section_count().min(self.lost_at + READ_WORDS_MAX);
            return match failure {
                None => self.read(cache, self.lost_at, end),
                Some(error) => Step::Done(Err(error)),
            };
        };
        self.taken = left;
        let mut op = FreeOp::new(self.host, self.grant(self.first + left));
        let step = op.start(cache);
        self.returning(cache, op, step, failure)
    }

    fn returning(
        &mut self,
        cache: &mut NodeCache,
        op: FreeOp,
        step: Step<Outcomes>,
        failure: Option<OpError>,
    ) -> Step<Grant> {
        match step {
            Step::Post(action) => self.post(State::Returning(op, failure), action),
            Step::Done(outcomes) => match outcomes.and_then(|outcomes| outcomes[0]) {
                Ok(()) => self.give_back(cache, failure),
                // So this host has something that no ledger names.
                Err(error) => Step::Done(Err(error)),
            },
        }
    }
}
