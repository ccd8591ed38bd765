//! A9: allocates neighbouring sections, which together are one extent above 2 MiB.
//!
//! Each section is allocated as an extent of its own, and all have one key. If the host dies
//! meanwhile, words and log name the owner of each section, and recovery frees it like any other
//! extent.

use aquifer_fabric::{Host, Key};

use super::{
    Action, AllocOp, FreeOp, Grant, Mutation, OpError, Outcomes, READ_WORDS_MAX, SURVEY_SECTIONS_MAX,
    StateMachine, Step, StepResult, WordAt,
};
use crate::cache::NodeCache;
use crate::size::{SECTION_CHUNKS, SizeClass};
use crate::word::AlignedRun;

/// Stretches that are begun and rolled back because of lost races before the node counts as full.
const ATTEMPTS_MAX: u32 = 64;

/// Allocates a stretch of sections, all or none.
///
/// If the operation is dropped before it is done, some sections may be allocated.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct StretchOp {
    host: Host,
    count: u32,
    key: Key,
    /// The first section.
    first: u32,
    /// Sections that are allocated already.
    allocated: u32,
    lost: u32,
    /// The section at which the last race was lost. The stretch of the client that won begins
    /// there.
    lost_at: u32,
    /// Whether all sections were read by this operation.
    is_fresh: bool,
    state: StretchState,
}

/// The step in progress.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
enum StretchState {
    Idle,
    /// R: reads `count` sections; the next ones up to `end` follow.
    Reading {
        first: u32,
        count: u32,
        end: u32,
    },
    /// A0: reads the spans of several sections.
    Surveying {
        first: u32,
        count: u32,
    },
    /// A0, L, A7: allocates the next section.
    Allocating(AllocOp),
    /// A8: writes key and record of the last section.
    Ending,
    /// A8 before a rollback: writes key and record of the last section.
    Recording(Option<OpError>),
    /// K, F5: frees the last allocated section. Then the operation ends with the error, or tries
    /// other sections.
    RollingBack(FreeOp, Option<OpError>),
}

impl StretchOp {
    /// Creates an operation that allocates `count` sections for `host`. It fails with
    /// [`OpError::Full`] if `count` is 0.
    #[must_use]
    pub const fn new(host: Host, count: u32) -> Self {
        Self {
            host,
            count,
            key: Key(0),
            first: 0,
            allocated: 0,
            lost: 0,
            lost_at: 0,
            is_fresh: false,
            state: StretchState::Idle,
        }
    }
}

impl StateMachine for StretchOp {
    /// The first section. All sections have its key.
    type Output = Grant;

    fn start(&mut self, cache: &mut NodeCache) -> Step<Grant> {
        let sections = cache.section_count();
        if self.count == 0 || self.count > sections {
            return Step::Done(Err(OpError::Full));
        }
        self.key = cache.fresh_key(SizeClass::SECTION);
        // A rolled-back attempt costs more than reading all sections, unless the node is very
        // large.
        if sections.div_ceil(READ_WORDS_MAX) <= self.count { self.read_all(cache) } else { self.find(cache) }
    }

    fn step(&mut self, cache: &mut NodeCache, result: StepResult<'_>) -> Step<Grant> {
        match std::mem::replace(&mut self.state, StretchState::Idle) {
            StretchState::Idle => panic!("no action is in flight"),
            StretchState::Reading { first, count, end } => {
                // A READ may tear a word. Damage is found by the CAS, which does not.
                cache.learn_sections(first, count, result).ok();
                self.read(cache, first + count, end)
            }
            StretchState::Surveying { first, count } => {
                cache.learn_survey(first, count, result).ok();
                self.survey(cache, first + count)
            }
            StretchState::Allocating(mut op) => {
                let step = op.step(cache, result);
                self.allocating(cache, op, step, Action::default())
            }
            StretchState::Ending => Step::Done(Ok(self.grant(self.first))),
            StretchState::Recording(failure) => self.free_last(cache, failure),
            StretchState::RollingBack(mut op, failure) => {
                let step = op.step(cache, result);
                self.rolling_back(cache, op, step, failure)
            }
        }
    }
}

impl StretchOp {
    fn post(&mut self, state: StretchState, action: Action) -> Step<Grant> {
        self.state = state;
        Step::Post(action)
    }

    fn grant(&self, section: u32) -> Grant {
        Grant { chunk: section * SECTION_CHUNKS, class: SizeClass::SECTION, key: self.key }
    }

    /// Finds neighbouring free sections by the cached words, and then by the present words.
    fn find(&mut self, cache: &mut NodeCache) -> Step<Grant> {
        match cache.find_stretch(self.count) {
            Some(first) => {
                self.first = first;
                self.survey(cache, first)
            }
            None if self.is_fresh => Step::Done(Err(OpError::Full)),
            None => self.read_all(cache),
        }
    }

    /// Reads the words of all sections.
    fn read_all(&mut self, cache: &mut NodeCache) -> Step<Grant> {
        self.is_fresh = true;
        self.read(cache, 0, cache.section_count())
    }

    fn read(&mut self, cache: &mut NodeCache, first: u32, end: u32) -> Step<Grant> {
        let count = READ_WORDS_MAX.min(end - first);
        if count == 0 {
            return self.find(cache);
        }
        self.post(StretchState::Reading { first, count, end }, Action::read(WordAt::Section(first), count))
    }

    /// Begins A0 of the sections from `from` on, before any is allocated, so that a section of
    /// another tenant is detected before its neighbours are allocated.
    fn survey(&mut self, cache: &mut NodeCache, from: u32) -> Step<Grant> {
        let end = self.first + self.count;
        let Some(next) = (from..end).find(|section| cache.not_ready(*section, AlignedRun::SECTION) != 0)
        else {
            let is_foreign = |section: u32| cache.has_foreign(section, AlignedRun::SECTION);
            return if (self.first..end).any(is_foreign) {
                self.find(cache)
            } else {
                self.allocate_next(cache, Action::default())
            };
        };
        let count = SURVEY_SECTIONS_MAX.min(end - next);
        self.post(StretchState::Surveying { first: next, count }, Action::survey(next, count))
    }

    /// Allocates the next section. `record` is A8 of the section before.
    fn allocate_next(&mut self, cache: &mut NodeCache, record: Action) -> Step<Grant> {
        let section = self.first + self.allocated;
        let mut op = AllocOp::of_section(self.host, section, self.key).deferring_record();
        let step = op.start(cache);
        self.allocating(cache, op, step, record)
    }

    fn allocating(
        &mut self,
        cache: &mut NodeCache,
        mut op: AllocOp,
        step: Step<Grant>,
        record: Action,
    ) -> Step<Grant> {
        let record = record.then(op.pop_record());
        match step {
            Step::Post(action) => self.post(StretchState::Allocating(op), record.then(action)),
            Step::Done(Ok(_)) => {
                self.allocated += 1;
                if self.allocated < self.count { self.allocate_next(cache, record) } else { self.end(record) }
            }
            // Another client has won the race. The section's word is cached as found.
            Step::Done(Err(OpError::Full)) => {
                self.lost += 1;
                self.lost_at = self.first + self.allocated;
                self.roll_back(cache, record, (self.lost == ATTEMPTS_MAX).then_some(OpError::Full))
            }
            Step::Done(Err(error)) => self.roll_back(cache, record, Some(error)),
        }
    }

    fn end(&mut self, record: Action) -> Step<Grant> {
        if record.is_empty() {
            return Step::Done(Ok(self.grant(self.first)));
        }
        self.post(StretchState::Ending, record)
    }

    /// Frees the sections that were allocated. The key of the last one is written first, because K
    /// expects a key.
    fn roll_back(&mut self, cache: &mut NodeCache, record: Action, failure: Option<OpError>) -> Step<Grant> {
        if record.is_empty() {
            return self.free_last(cache, failure);
        }
        self.post(StretchState::Recording(failure), record)
    }

    /// Frees the last allocated section; if there is none, tries other sections or ends with the
    /// error.
    fn free_last(&mut self, cache: &mut NodeCache, failure: Option<OpError>) -> Step<Grant> {
        let Some(remaining) = self.allocated.checked_sub(1).filter(|_| !Mutation::KeepPart.is_active())
        else {
            self.allocated = 0;
            let end = cache.section_count().min(self.lost_at + READ_WORDS_MAX);
            return match failure {
                None => self.read(cache, self.lost_at, end),
                Some(error) => Step::Done(Err(error)),
            };
        };
        self.allocated = remaining;
        let mut op = FreeOp::new(self.host, self.grant(self.first + remaining));
        let step = op.start(cache);
        self.rolling_back(cache, op, step, failure)
    }

    fn rolling_back(
        &mut self,
        cache: &mut NodeCache,
        op: FreeOp,
        step: Step<Outcomes>,
        failure: Option<OpError>,
    ) -> Step<Grant> {
        match step {
            Step::Post(action) => self.post(StretchState::RollingBack(op, failure), action),
            Step::Done(outcomes) => match outcomes.and_then(|outcomes| outcomes[0]) {
                Ok(()) => self.free_last(cache, failure),
                // This host has leaked a section. The caller reports the node as suspect.
                Err(error) => Step::Done(Err(error)),
            },
        }
    }
}
