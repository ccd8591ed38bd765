//! A9: taking neighbouring sections that together are one extent, larger than any size class.
//!
//! Each is taken as an extent of its own, and all under one key. So whatever becomes of whoever does this, words and log tell of each
//! section whose it is, and it is given back as any other.

use aquifer_fabric::{Host, Key};

use super::owed::Owed;
use super::{
    Action, AllocOp, FreeOp, Grant, Machine, Mutation, OpError, READ_WORDS_MAX, SURVEY_SECTIONS_MAX, Step,
    StepResult, WordAt,
};
use crate::cache::NodeCache;
use crate::size::{SECTION_CHUNKS, SizeClass};
use crate::word::Run;

/// Stretches begun and given back, for others were faster, after which there is none to be had.
const ATTEMPTS_MAX: u32 = 64;

/// Takes a stretch of sections, all or none. Dropped before it is done it may have taken some.
#[derive(Clone, Debug)]
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
    owed: Owed,
    state: State,
}

#[derive(Clone, Debug)]
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
    /// A8 of the one before by itself, and then this.
    Writing(AllocOp, Action),
    /// The last A8.
    Ending,
    /// The last A8 of what goes back.
    Settling(Option<OpError>),
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
            owed: Owed::NOTHING,
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
                self.taking(cache, op, step)
            }
            State::Writing(op, action) => self.post(State::Taking(op), action),
            State::Ending => Step::Done(Ok(self.grant(self.first))),
            State::Settling(failure) => self.give_back(cache, failure),
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
        self.post(State::Reading { first, count, end }, Action::Read { at: WordAt::Section(first), count })
    }

    /// A0 before anything is taken: whose those from `from` on are, as far as that is not known. One that is another's is found out before its neighbours were taken for nothing.
    fn survey(&mut self, cache: &mut NodeCache, from: u32) -> Step<Grant> {
        let end = self.first + self.count;
        let Some(next) = (from..end).find(|section| cache.unready(*section, Run::SECTION) != 0) else {
            let is_foreign = |section: u32| cache.has_foreign(section, Run::SECTION);
            return if (self.first..end).any(is_foreign) { self.find(cache) } else { self.take(cache) };
        };
        let count = SURVEY_SECTIONS_MAX.min(end - next);
        self.post(State::Surveying { first: next, count }, Action::Survey { section: next, count })
    }

    /// The next of them.
    fn take(&mut self, cache: &mut NodeCache) -> Step<Grant> {
        let section = self.first + self.taken;
        let mut op = AllocOp::of_section(self.host, section, self.key).owing();
        let step = op.start(cache);
        self.taking(cache, op, step)
    }

    fn taking(&mut self, cache: &mut NodeCache, mut op: AllocOp, step: Step<Grant>) -> Step<Grant> {
        self.owed.note(op.take_owed());
        match step {
            Step::Post(action) => match self.owed.before(action) {
                (action, None) => self.post(State::Taking(op), action),
                (action, Some(then)) => self.post(State::Writing(op, then), action),
            },
            Step::Done(Ok(_)) => {
                self.taken += 1;
                if self.taken < self.count { self.take(cache) } else { self.end() }
            }
            // Somebody was faster, which is remembered now.
            Step::Done(Err(OpError::Full)) => {
                self.lost += 1;
                self.lost_at = self.first + self.taken;
                self.settle(cache, (self.lost == ATTEMPTS_MAX).then_some(OpError::Full))
            }
            Step::Done(Err(error)) => self.settle(cache, Some(error)),
        }
    }

    fn end(&mut self) -> Step<Grant> {
        match self.owed.pay() {
            Some(action) => self.post(State::Ending, action),
            None => Step::Done(Ok(self.grant(self.first))),
        }
    }

    /// What was taken goes back. Only what has its key can.
    fn settle(&mut self, cache: &mut NodeCache, failure: Option<OpError>) -> Step<Grant> {
        match self.owed.pay() {
            Some(action) => self.post(State::Settling(failure), action),
            None => self.give_back(cache, failure),
        }
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
        step: Step<()>,
        failure: Option<OpError>,
    ) -> Step<Grant> {
        match step {
            Step::Post(action) => self.post(State::Returning(op, failure), action),
            Step::Done(Ok(())) => self.give_back(cache, failure),
            // So something is ours that nobody knows of.
            Step::Done(Err(error)) => Step::Done(Err(error)),
        }
    }
}
