//! Taking an extent.

use aquifer_fabric::Host;

use super::hint::Hint;
use super::{
    Action, CONTENDED_AFTER, Grant, Machine, Mutation, OpError, READ_WORDS_MAX, Step, StepResult, WordAt,
    damaged, lose,
};
use crate::cache::{Candidate, NodeCache, place_in_section};
use crate::error::Damage;
use crate::size::{SECTION_CHUNKS, SECTION_SPANS, SPAN_CHUNKS, SizeClass};
use crate::word::{Run, SectionWord, SpanState, SpanWord};

/// Races lost after which what is remembered counts as stale, and is read anew.
const STALE_AFTER: u32 = 8;

/// Takes one extent of a node. Dropped before it is done it may have taken one (the inline log says so).
#[derive(Clone, Debug)]
pub struct AllocOp {
    host: Host,
    class: SizeClass,
    mutation: Mutation,
    search: Search,
    lost: u32,
    /// The span at which races were lost last, and how many.
    losing: Option<(u32, u32)>,
    state: State,
}

/// How far the search has come.
#[derive(Clone, Copy, Debug)]
struct Search {
    pass: Pass,
    /// Sections behind us in this pass.
    scanned: u32,
    /// Sections of this pass whose words have been read.
    fresh: u32,
    /// The section whose spans were read last.
    spans_read: Option<u32>,
    /// A span that was found too contended.
    avoid: Option<u32>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Pass {
    /// Over what we remember.
    Remembered,
    /// R: over the node's words as they are now.
    Fresh,
    /// Over contended spans too.
    Contended,
}

#[derive(Clone, Copy, Debug)]
enum State {
    Idle,
    /// A1, or A3 if we opened the span.
    Taking {
        span: u32,
        run: Run,
        expected: SpanWord,
        desired: SpanWord,
        ours: bool,
    },
    /// A2.
    Opening {
        span: u32,
        expected: SectionWord,
    },
    /// A7.
    TakingGroup {
        section: u32,
        group: Run,
        expected: SectionWord,
    },
    /// R.
    ReadingSections {
        first: u32,
        count: u32,
    },
    /// R.
    ReadingSpans {
        section: u32,
    },
    /// C1.
    Marking(Hint),
    /// A4–A6, C2; the extent is ours already.
    Hinting(Hint, Grant),
}

type Next = Result<Step<Grant>, OpError>;

impl AllocOp {
    /// An operation that takes an extent of `class` for `host`.
    #[must_use]
    pub const fn new(host: Host, class: SizeClass) -> Self {
        Self::mutated(host, class, Mutation::None)
    }

    /// The same with a fault, for tests.
    #[must_use]
    pub const fn mutated(host: Host, class: SizeClass, mutation: Mutation) -> Self {
        let search = Search { pass: Pass::Remembered, scanned: 0, fresh: 0, spans_read: None, avoid: None };
        Self { host, class, mutation, search, lost: 0, losing: None, state: State::Idle }
    }
}

impl Machine for AllocOp {
    type Output = Grant;

    fn start(&mut self, cache: &mut NodeCache) -> Step<Grant> {
        self.search(cache)
    }

    fn step(&mut self, cache: &mut NodeCache, result: StepResult<'_>) -> Step<Grant> {
        let next = match std::mem::replace(&mut self.state, State::Idle) {
            State::Idle => panic!("no action is under way"),
            State::Taking { span, run, expected, desired, ours } => {
                self.taking(cache, (span, run, ours), (expected, desired), SpanWord(result.found()))
            }
            State::Opening { span, expected } => {
                self.opening(cache, span, expected, SectionWord(result.found()))
            }
            State::TakingGroup { section, group, expected } => {
                self.taking_group(cache, section, group, expected, SectionWord(result.found()))
            }
            State::ReadingSections { first, count } => self.read_sections(cache, first, count, result),
            State::ReadingSpans { section } => self.read_spans(cache, section, result),
            State::Marking(mut hint) => Ok(match hint.step(cache, result.found()) {
                Some(action) => self.post(State::Marking(hint), action),
                None => self.search(cache),
            }),
            State::Hinting(mut hint, grant) => Ok(match hint.step(cache, result.found()) {
                Some(action) => self.post(State::Hinting(hint, grant), action),
                None => Step::Done(Ok(grant)),
            }),
        };
        next.unwrap_or_else(|error| Step::Done(Err(error)))
    }
}

impl AllocOp {
    fn post(&mut self, state: State, action: Action) -> Step<Grant> {
        self.state = state;
        Step::Post(action)
    }

    /// Find something to take, in what we remember, then in what there is, then where it is crowded.
    fn search(&mut self, cache: &NodeCache) -> Step<Grant> {
        let count = cache.section_count();
        if self.search.pass == Pass::Remembered && self.lost >= STALE_AFTER {
            self.search.pass = Pass::Fresh;
            self.search.scanned = 0;
        }
        loop {
            while self.search.scanned < count {
                let section = (cache.start(self.class) + self.search.scanned) % count;
                let fresh = self.search.pass == Pass::Fresh;
                if fresh && self.search.scanned >= self.search.fresh {
                    let many = READ_WORDS_MAX.min(count - section).min(count - self.search.scanned);
                    let action = Action::Read { at: WordAt::Section(section), count: many };
                    return self.post(State::ReadingSections { first: section, count: many }, action);
                }
                let crowded = self.search.pass == Pass::Contended;
                let avoid = if crowded { None } else { self.search.avoid };
                if let Some(found) = self.candidate(cache, section, avoid, crowded) {
                    return self.attempt(cache, section, found);
                }
                let inside = self.class.is_within_span() && cache.has_open_spans(section);
                if fresh && inside && self.search.spans_read != Some(section) {
                    self.search.spans_read = Some(section);
                    let action =
                        Action::Read { at: WordAt::Span(section * SECTION_SPANS), count: SECTION_SPANS };
                    return self.post(State::ReadingSpans { section }, action);
                }
                self.search.scanned += 1;
            }
            self.search.scanned = 0;
            self.search.pass = match self.search.pass {
                _ if self.mutation == Mutation::TrustCache => {
                    return Step::Done(Err(OpError::Full));
                }
                Pass::Remembered => Pass::Fresh,
                Pass::Fresh => Pass::Contended,
                Pass::Contended => return Step::Done(Err(OpError::Full)),
            };
        }
    }

    fn candidate(
        &self,
        cache: &NodeCache,
        section: u32,
        avoid: Option<u32>,
        crowded: bool,
    ) -> Option<Candidate> {
        let word = cache.section(section);
        if self.mutation == Mutation::EnterClosed && self.class.is_within_span() {
            let entered =
                word.spans_in(SpanState::Partial).map(|index| section * SECTION_SPANS + u32::from(index));
            if let Some(span) = entered.into_iter().find(|&span| cache.span(span).is_closed()) {
                let run = cache.span(span).find(self.class.order())?;
                return Some(Candidate::Chunks { span, run });
            }
        }
        if self.mutation == Mutation::TakeHalfEmpty && !self.class.is_within_span() {
            let first = word.find(0)?.first();
            let group = Run::new((first >> self.class.order()) << self.class.order(), self.class.order())?;
            return Some(Candidate::Whole { group });
        }
        cache.candidate(section, self.class, avoid, crowded)
    }

    fn attempt(&mut self, cache: &NodeCache, section: u32, candidate: Candidate) -> Step<Grant> {
        match candidate {
            Candidate::Chunks { span, run } => self.take(span, run, cache.span(span), false),
            Candidate::Empty { span } if self.mutation == Mutation::SkipOpen => self.take_first(cache, span),
            Candidate::Empty { span } => {
                let expected = cache.section(section);
                let desired = expected.open(place_in_section(span), self.host);
                let action = self.mutation.commit(WordAt::Section(section), expected.0, desired.0);
                self.post(State::Opening { span, expected }, action)
            }
            Candidate::Whole { group } => {
                let expected = cache.section(section);
                let desired = expected.take(group, self.host);
                let action = self.mutation.commit(WordAt::Section(section), expected.0, desired.0);
                self.post(State::TakingGroup { section, group, expected }, action)
            }
        }
    }

    /// A1, A3: take the chunks and commit the log.
    fn take(&mut self, span: u32, run: Run, expected: SpanWord, ours: bool) -> Step<Grant> {
        let desired = expected.take(run, self.host);
        let action = self.mutation.commit(WordAt::Span(span), expected.0, desired.0);
        self.post(State::Taking { span, run, expected, desired, ours }, action)
    }

    /// A3: the span is ours to open. The word we remember may be that of an earlier life; then the CAS tells.
    fn take_first(&mut self, cache: &NodeCache, span: u32) -> Step<Grant> {
        let run = Run::new(0, self.class.order()).unwrap_or(Run::single(0));
        self.take(span, run, cache.span(span), true)
    }

    fn taking(
        &mut self,
        cache: &mut NodeCache,
        (span, run, ours): (u32, Run, bool),
        (expected, desired): (SpanWord, SpanWord),
        found: SpanWord,
    ) -> Next {
        let at = WordAt::Span(span);
        if found == expected {
            cache.set_span(span, desired).map_err(|cause| damaged(at, desired.0, cause))?;
            return Ok(self.taken(cache, span, run));
        }
        lose(&mut self.lost)?;
        cache.set_span(span, found).map_err(|cause| damaged(at, found.0, cause))?;
        if ours {
            // Between opening and this only we may change the word, so what we remembered was old.
            return if found.is_closed() {
                Ok(self.take(span, run, found, true))
            } else {
                Err(damaged(at, found.0, Damage::Intruder))
            };
        }
        if self.mutation == Mutation::TakeFromStale {
            let action = self.mutation.commit(at, found.0, desired.0);
            return Ok(self.post(State::Taking { span, run, expected: found, desired, ours }, action));
        }
        let times = match self.losing {
            Some((last, times)) if last == span => times + 1,
            _ => 1,
        };
        self.losing = Some((span, times));
        if times > CONTENDED_AFTER && self.search.avoid != Some(span) && !found.is_closed() {
            self.search.avoid = Some(span);
            if let Some((hint, action)) = Hint::mark(span, cache, self.mutation) {
                return Ok(self.post(State::Marking(hint), action));
            }
        }
        Ok(self.search(cache))
    }

    fn taken(&mut self, cache: &mut NodeCache, span: u32, run: Run) -> Step<Grant> {
        cache.set_start(self.class, span / SECTION_SPANS);
        let grant = Grant { chunk: span * SPAN_CHUNKS + u32::from(run.first()), class: self.class };
        let calm = self.losing.is_none_or(|(last, _)| last != span);
        let hint = if cache.span(span).is_full() {
            Hint::filled(span, cache, self.mutation)
        } else if calm {
            Hint::calm(span, cache, self.mutation)
        } else {
            None
        };
        match hint {
            Some((hint, action)) => self.post(State::Hinting(hint, grant), action),
            None => Step::Done(Ok(grant)),
        }
    }

    fn opening(
        &mut self,
        cache: &mut NodeCache,
        span: u32,
        expected: SectionWord,
        found: SectionWord,
    ) -> Next {
        let section = span / SECTION_SPANS;
        let won = found == expected;
        let now = if won { expected.open(place_in_section(span), self.host) } else { found };
        cache.set_section(section, now).map_err(|cause| damaged(WordAt::Section(section), now.0, cause))?;
        if won {
            return Ok(self.take_first(cache, span));
        }
        lose(&mut self.lost)?;
        Ok(self.search(cache))
    }

    fn taking_group(
        &mut self,
        cache: &mut NodeCache,
        section: u32,
        group: Run,
        expected: SectionWord,
        found: SectionWord,
    ) -> Next {
        let won = found == expected;
        let now = if won { expected.take(group, self.host) } else { found };
        cache.set_section(section, now).map_err(|cause| damaged(WordAt::Section(section), now.0, cause))?;
        if won {
            cache.set_start(self.class, section);
            let chunk = section * SECTION_CHUNKS + u32::from(group.first()) * SPAN_CHUNKS;
            return Ok(Step::Done(Ok(Grant { chunk, class: self.class })));
        }
        lose(&mut self.lost)?;
        Ok(self.search(cache))
    }

    fn read_sections(
        &mut self,
        cache: &mut NodeCache,
        first: u32,
        count: u32,
        result: StepResult<'_>,
    ) -> Next {
        // A READ may tear a word. What looks impossible is left to the CAS, which does not.
        cache.learn_sections(first, count, result).ok();
        self.search.fresh = self.search.scanned + count;
        Ok(self.search(cache))
    }

    fn read_spans(&mut self, cache: &mut NodeCache, section: u32, result: StepResult<'_>) -> Next {
        cache.learn_spans(section * SECTION_SPANS, SECTION_SPANS, result).ok();
        Ok(self.search(cache))
    }
}
