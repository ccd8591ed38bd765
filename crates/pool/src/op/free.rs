//! Giving an extent back.

use aquifer_fabric::Host;

use super::hint::Hint;
use super::{
    Action, CONTENDED_AFTER, Grant, Machine, Mutation, OpError, Step, StepResult, WordAt, damaged, lose,
};
use crate::cache::{NodeCache, place_in_section};
use crate::error::Damage;
use crate::size::{SECTION_CHUNKS, SECTION_SPANS, SPAN_CHUNKS};
use crate::word::{InlineLog, LogOp, Run, SectionWord, SpanState, SpanWord};

/// Gives one extent back. Dropped before it is done it may have given it back, and may have left its span closed.
#[derive(Clone, Debug)]
pub struct FreeOp {
    host: Host,
    grant: Grant,
    mutation: Mutation,
    lost: u32,
    state: State,
}

#[derive(Clone, Copy, Debug)]
enum State {
    Idle,
    /// What we remember says that it cannot be freed: is that so?
    ProbingSpan,
    ProbingSection,
    /// F1, F3.
    Giving {
        run: Run,
        expected: SpanWord,
    },
    /// F4; a wrong order gives the run back only then.
    Closing {
        expected: SectionWord,
        give_after: Option<Run>,
    },
    /// F5: are the group's spans closed, now that the section is `seen`?
    ReadingGroup {
        seen: SectionWord,
    },
    /// F5.
    GivingGroup {
        expected: SectionWord,
    },
    /// F2, C1, C2; the extent is free already.
    Hinting(Hint),
}

type Next = Result<Step<()>, OpError>;

impl FreeOp {
    /// An operation that gives back what `host` has taken.
    #[must_use]
    pub const fn new(host: Host, grant: Grant) -> Self {
        Self::mutated(host, grant, Mutation::None)
    }

    /// The same with a fault, for tests.
    #[must_use]
    pub const fn mutated(host: Host, grant: Grant, mutation: Mutation) -> Self {
        Self { host, grant, mutation, lost: 0, state: State::Idle }
    }
}

impl Machine for FreeOp {
    type Output = ();

    fn start(&mut self, cache: &mut NodeCache) -> Step<()> {
        let inside = self.grant.chunk / SECTION_CHUNKS < cache.section_count();
        let (Some(run), true) = (self.run(), inside) else {
            return Step::Done(Err(OpError::NotAllocated));
        };
        if !self.grant.class.is_within_span() {
            let seen = cache.section(self.section());
            return if self.judge_section(seen).is_ok() {
                self.read_group(seen)
            } else {
                self.post(State::ProbingSection, Action::Probe { at: WordAt::Section(self.section()) })
            };
        }
        let word = cache.span(self.span());
        if self.judge_span(word, run).is_ok() {
            self.give(cache, run, word)
        } else {
            self.post(State::ProbingSpan, Action::Probe { at: WordAt::Span(self.span()) })
        }
    }

    fn step(&mut self, cache: &mut NodeCache, result: StepResult<'_>) -> Step<()> {
        let next = match std::mem::replace(&mut self.state, State::Idle) {
            State::Idle => panic!("no action is under way"),
            State::ProbingSpan => self.judged_give(cache, SpanWord(result.found())),
            State::ProbingSection => self.judged_read(cache, SectionWord(result.found())),
            State::Giving { run, expected } => self.giving(cache, run, expected, SpanWord(result.found())),
            State::Closing { expected, give_after } => {
                self.closing(cache, expected, give_after, SectionWord(result.found()))
            }
            State::ReadingGroup { seen } => self.group_read(cache, seen, result),
            State::GivingGroup { expected } => {
                self.giving_group(cache, expected, SectionWord(result.found()))
            }
            State::Hinting(mut hint) => Ok(match hint.step(cache, result.found()) {
                Some(action) => self.post(State::Hinting(hint), action),
                None => Step::Done(Ok(())),
            }),
        };
        next.unwrap_or_else(|error| Step::Done(Err(error)))
    }
}

impl FreeOp {
    fn post(&mut self, state: State, action: Action) -> Step<()> {
        self.state = state;
        Step::Post(action)
    }

    fn section(&self) -> u32 {
        self.grant.chunk / SECTION_CHUNKS
    }

    fn span(&self) -> u32 {
        self.grant.chunk / SPAN_CHUNKS
    }

    /// The extent's place in its word; `None` if it is not aligned to its size.
    fn run(&self) -> Option<Run> {
        let class = self.grant.class;
        let first = if class.is_within_span() {
            self.grant.chunk % SPAN_CHUNKS
        } else if self.grant.chunk.is_multiple_of(SPAN_CHUNKS) {
            self.span() % SECTION_SPANS
        } else {
            return None;
        };
        Run::new(u8::try_from(first).ok()?, class.order())
    }

    /// Whether a record of an allocation speaks against the extent being ours.
    fn judge_log(&self, log: Option<InlineLog>, run: Run) -> Result<(), OpError> {
        match log {
            Some(log) if log.op == LogOp::Alloc && log.run.overlaps(run) => {
                if log.run != run {
                    Err(OpError::NotAllocated)
                } else if log.host != self.host {
                    Err(OpError::NotOurs(log.host))
                } else {
                    Ok(())
                }
            }
            Some(log) if log.op == LogOp::Open && log.run.overlaps(run) => Err(OpError::NotAllocated),
            _ => Ok(()),
        }
    }

    fn judge_span(&self, word: SpanWord, run: Run) -> Result<(), OpError> {
        if self.mutation == Mutation::GiveUnchecked {
            return Ok(());
        }
        if !word.holds(run) {
            return Err(OpError::NotAllocated);
        }
        self.judge_log(word.log().map_err(|cause| damaged(WordAt::Span(self.span()), word.0, cause))?, run)
    }

    fn judge_section(&self, word: SectionWord) -> Result<(), OpError> {
        let Some(run) = self.run() else {
            return Err(OpError::NotAllocated);
        };
        if self.mutation == Mutation::GiveUnchecked {
            return Ok(());
        }
        if !word.all(run, SpanState::Full) {
            return Err(OpError::NotAllocated);
        }
        self.judge_log(
            word.log().map_err(|cause| damaged(WordAt::Section(self.section()), word.0, cause))?,
            run,
        )
    }

    /// F1 or F3, by what is left.
    fn give(&mut self, cache: &NodeCache, run: Run, expected: SpanWord) -> Step<()> {
        let desired = expected.give(run, self.host);
        if desired.is_closed() && self.mutation == Mutation::CloseFirst {
            return self.close(cache.section(self.section()), Some(run));
        }
        let action = self.mutation.commit(WordAt::Span(self.span()), expected.0, desired.0);
        self.post(State::Giving { run, expected }, action)
    }

    fn judged_give(&mut self, cache: &mut NodeCache, found: SpanWord) -> Next {
        self.learn_span(cache, found)?;
        let run = self.run().ok_or(OpError::NotAllocated)?;
        self.judge_span(found, run)?;
        Ok(self.give(cache, run, found))
    }

    fn giving(&mut self, cache: &mut NodeCache, run: Run, expected: SpanWord, found: SpanWord) -> Next {
        if found != expected {
            lose(&mut self.lost)?;
            return self.judged_give(cache, found);
        }
        let now = expected.give(run, self.host);
        self.learn_span(cache, now)?;
        if now.is_closed() {
            let skip = matches!(self.mutation, Mutation::SkipClose | Mutation::CloseFirst);
            return Ok(if skip {
                Step::Done(Ok(()))
            } else {
                self.close(cache.section(self.section()), None)
            });
        }
        let span = self.span();
        let hint = Hint::opened(span, expected.is_full(), cache, self.mutation).or_else(|| match self.lost {
            0 => Hint::calm(span, cache, self.mutation),
            1..=CONTENDED_AFTER => None,
            _ => Hint::mark(span, cache, self.mutation),
        });
        Ok(match hint {
            Some((hint, action)) => self.post(State::Hinting(hint), action),
            None => Step::Done(Ok(())),
        })
    }

    /// F4: only we may, since we emptied the span; hints that others set meanwhile are written over.
    fn close(&mut self, expected: SectionWord, give_after: Option<Run>) -> Step<()> {
        let desired = expected.close(place_in_section(self.span()), self.host);
        let action = self.mutation.commit(WordAt::Section(self.section()), expected.0, desired.0);
        self.post(State::Closing { expected, give_after }, action)
    }

    fn closing(
        &mut self,
        cache: &mut NodeCache,
        expected: SectionWord,
        give_after: Option<Run>,
        found: SectionWord,
    ) -> Next {
        let index = place_in_section(self.span());
        if found != expected {
            lose(&mut self.lost)?;
            self.learn_section(cache, found)?;
            if found.state(index) == SpanState::Empty {
                return Err(damaged(WordAt::Section(self.section()), found.0, Damage::Intruder));
            }
            if self.mutation == Mutation::CloseFromStale {
                let desired = expected.close(index, self.host);
                let action = self.mutation.commit(WordAt::Section(self.section()), found.0, desired.0);
                return Ok(self.post(State::Closing { expected: found, give_after }, action));
            }
            return Ok(self.close(found, give_after));
        }
        self.learn_section(cache, expected.close(index, self.host))?;
        Ok(match give_after {
            Some(run) => {
                let word = cache.span(self.span());
                let action =
                    self.mutation.commit(WordAt::Span(self.span()), word.0, word.give(run, self.host).0);
                self.post(State::Giving { run, expected: word }, action)
            }
            None => Step::Done(Ok(())),
        })
    }

    fn judged_read(&mut self, cache: &mut NodeCache, found: SectionWord) -> Next {
        self.learn_section(cache, found)?;
        self.judge_section(found)?;
        Ok(self.read_group(found))
    }

    /// F5: a section's 11 may be a hint of spans full of others' chunks; the spans themselves tell.
    fn read_group(&mut self, seen: SectionWord) -> Step<()> {
        let action =
            Action::Read { at: WordAt::Span(self.span()), count: self.grant.class.chunks() / SPAN_CHUNKS };
        self.post(State::ReadingGroup { seen }, action)
    }

    fn group_read(&mut self, cache: &mut NodeCache, seen: SectionWord, result: StepResult<'_>) -> Next {
        let (first, count) = (self.span(), self.grant.class.chunks() / SPAN_CHUNKS);
        cache.learn_spans(first, count, result)?;
        let closed = (first..first + count).all(|span| cache.span(span).is_closed());
        let run = match self.run() {
            Some(run) if self.mutation == Mutation::GiveHalf => Run::single(run.first()),
            Some(run) if closed || self.mutation == Mutation::GiveUnchecked => run,
            _ => return Err(OpError::NotAllocated),
        };
        let action =
            self.mutation.commit(WordAt::Section(self.section()), seen.0, seen.give(run, self.host).0);
        Ok(self.post(State::GivingGroup { expected: seen }, action))
    }

    fn giving_group(&mut self, cache: &mut NodeCache, expected: SectionWord, found: SectionWord) -> Next {
        if found != expected {
            lose(&mut self.lost)?;
            return self.judged_read(cache, found);
        }
        let run = self.run().ok_or(OpError::NotAllocated)?;
        self.learn_section(cache, expected.give(run, self.host))?;
        Ok(Step::Done(Ok(())))
    }

    fn learn_span(&self, cache: &mut NodeCache, word: SpanWord) -> Result<(), OpError> {
        cache.set_span(self.span(), word).map_err(|cause| damaged(WordAt::Span(self.span()), word.0, cause))
    }

    fn learn_section(&self, cache: &mut NodeCache, word: SectionWord) -> Result<(), OpError> {
        let at = WordAt::Section(self.section());
        cache.set_section(self.section(), word).map_err(|cause| damaged(at, word.0, cause))
    }
}
