//! Changes of hints: full (A4–A6, F2) and contended (C1, C2).
//!
//! A code 11 in a section can be a hint (the span is open and has no free chunk) or the truth (the span
//! is taken whole), and only the first may be taken back. Rule H keeps them apart: *a hint is changed
//! by a CAS whose expected section word was read before the span was last seen open.* A span can become
//! taken whole only over the code 00, so if the section word has not changed since before the
//! span was seen open, then it is open still, or its closer is about to write 00, whatever it finds there.
//!
//! The full hint is not lost and not left over: who fills a span sets it and *then* looks at the span
//! (A5); who gives back of a full span does so and *then* looks for the hint (F2). Whichever of the
//! two second looks comes later sees what the other did, and takes the hint back.
//!
//! Nothing here can fail the operation: its commit is behind it.

use super::{ATTEMPTS_MAX, Action, Mutation, StepResult, WordAt};
use crate::cache::{NodeCache, place_in_section};
use crate::size::SECTION_SPANS;
use crate::word::{SectionWord, SpanState, SpanWord};

/// A change of a hint under way.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(super) struct Hint {
    span: u32,
    lost: u32,
    state: State,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum State {
    /// A4, a CAS; and A5 behind it: is the span still full?
    SetFull { expected: SectionWord, from: SectionWord },
    /// A6, F2: a CAS.
    SetOpen { expected: SectionWord },
    /// F2: does the section say full?
    LookForFull,
    /// A6, F2: is the span open with free chunks, now that the section is `seen`?
    StillOpen { seen: SectionWord },
    /// C1, C2: one CAS, and if it fails never mind.
    Once { from: SpanState, to: SpanState, expected: SectionWord },
}

impl Hint {
    /// A4: the span was seen full, and nobody else has changed the section's word since.
    pub(super) fn filled(span: u32, cache: &NodeCache) -> Option<(Self, Action)> {
        if cache.state_of(span) == SpanState::Full {
            return None;
        }
        // Rule H: the word was that, but for changes of our own, from before the span was seen full until now.
        let expected = cache.section(span / SECTION_SPANS);
        Some(Self::begin(span, State::SetFull { expected, from: expected }))
    }

    /// A5: the section's word was just changed so that it says full of this span, which was found so behind that. If it is not full, A6.
    pub(super) fn said_full(span: u32, found: SpanWord, cache: &mut NodeCache) -> Option<(Self, Action)> {
        let seen = cache.section(span / SECTION_SPANS);
        let is_full = cache.set_span(span, found).is_err() || found.is_full() || found.is_closed();
        (!is_full && !Mutation::SkipRecheck.is_active())
            .then(|| Self::begin(span, State::SetOpen { expected: seen }))
    }

    /// F2: this host has just given back chunks, and the span is open still. `was_full`: it had no free one before.
    pub(super) fn opened(span: u32, was_full: bool, cache: &NodeCache) -> Option<(Self, Action)> {
        if Mutation::SkipUnhint.is_active() {
            return None;
        }
        if cache.state_of(span) == SpanState::Full {
            // Rule H: the remembered section word is older than the CAS that left the span open.
            return Some(Self::begin(span, State::SetOpen { expected: cache.section(span / SECTION_SPANS) }));
        }
        was_full.then(|| Self::begin(span, State::LookForFull))
    }

    /// C1: too many races were lost at a span that was open at the last of them.
    pub(super) fn mark(span: u32, cache: &NodeCache) -> Option<(Self, Action)> {
        Self::once(span, SpanState::Partial, SpanState::Contended, cache)
    }

    /// C2: a change of an open span went through at once.
    pub(super) fn calm(span: u32, cache: &NodeCache) -> Option<(Self, Action)> {
        Self::once(span, SpanState::Contended, SpanState::Partial, cache)
    }

    fn once(span: u32, from: SpanState, to: SpanState, cache: &NodeCache) -> Option<(Self, Action)> {
        let expected = cache.section(span / SECTION_SPANS);
        (cache.state_of(span) == from).then(|| Self::begin(span, State::Once { from, to, expected }))
    }

    fn begin(span: u32, state: State) -> (Self, Action) {
        let mut hint = Self { span, lost: 0, state };
        let action = hint.post(state);
        (hint, action)
    }

    fn section(&self) -> WordAt {
        WordAt::Section(self.span / SECTION_SPANS)
    }

    fn state_in(&self, word: SectionWord) -> SpanState {
        word.state(place_in_section(self.span))
    }

    fn post(&mut self, state: State) -> Action {
        self.state = state;
        match state {
            State::StillOpen { .. } => Action::probe(WordAt::Span(self.span)),
            State::LookForFull => Action::probe(self.section()),
            State::SetFull { expected, from } => {
                let desired = from.hint(place_in_section(self.span), SpanState::Full);
                let look_again = Action::probe(WordAt::Span(self.span));
                Action::commit(self.section(), expected.0, desired.0).then(look_again)
            }
            State::SetOpen { expected } => self.cas(expected, SpanState::Partial),
            State::Once { to, expected, .. } => self.cas(expected, to),
        }
    }

    fn cas(&self, expected: SectionWord, to: SpanState) -> Action {
        let desired = expected.hint(place_in_section(self.span), to);
        Action::commit(self.section(), expected.0, desired.0)
    }

    /// The next action; `None` when all is done.
    pub(super) fn step(&mut self, cache: &mut NodeCache, result: StepResult<'_>) -> Option<Action> {
        self.lost += 1;
        if self.lost > ATTEMPTS_MAX {
            return None;
        }
        let next = match (self.state, result) {
            (State::SetFull { expected, from }, result) => {
                let (section, span) = result.found_then();
                self.after_full(cache, (expected, from), SectionWord(section), SpanWord(span?))
            }
            (State::StillOpen { seen }, result) => self.after_span(cache, seen, SpanWord(result.found())),
            (_, result) => self.after_section(cache, SectionWord(result.found())),
        }?;
        Some(self.post(next))
    }

    /// A4 found the section so, and A5 the span.
    fn after_full(
        &self,
        cache: &mut NodeCache,
        (expected, from): (SectionWord, SectionWord),
        section: SectionWord,
        span: SpanWord,
    ) -> Option<State> {
        let index = self.span / SECTION_SPANS;
        if section == expected {
            let set = expected.hint(place_in_section(self.span), SpanState::Full);
            cache.change_section(index, set).ok()?;
            let may_look = !Mutation::SkipRecheck.is_active();
            return may_look.then(|| self.after_span(cache, set, span)).flatten();
        }
        cache.set_section(index, section).ok()?;
        cache.set_span(self.span, span).ok()?;
        let is_unsaid = matches!(self.state_in(section), SpanState::Partial | SpanState::Contended);
        let from = if Mutation::FullFromStale.is_active() { from } else { section };
        (is_unsaid && span.is_full()).then_some(State::SetFull { expected: section, from })
    }

    /// The section was `seen` to say full before the span was seen so.
    fn after_span(&self, cache: &mut NodeCache, seen: SectionWord, span: SpanWord) -> Option<State> {
        cache.set_span(self.span, span).ok()?;
        // A closed span is closed in the section by the client that emptied it, whatever hint is there.
        (!span.is_full() && !span.is_closed()).then_some(State::SetOpen { expected: seen })
    }

    fn after_section(&self, cache: &mut NodeCache, found: SectionWord) -> Option<State> {
        let won = match self.state {
            State::SetOpen { expected } => (expected == found).then_some((expected, SpanState::Partial)),
            State::Once { to, expected, .. } => (expected == found).then_some((expected, to)),
            _ => None,
        };
        if let Some((before, to)) = won {
            let set = before.hint(place_in_section(self.span), to);
            cache.change_section(self.span / SECTION_SPANS, set).ok()?;
            return None;
        }
        cache.set_section(self.span / SECTION_SPANS, found).ok()?;
        let now = self.state_in(found);
        match self.state {
            State::SetOpen { .. } | State::LookForFull if now == SpanState::Full => {
                Some(match Mutation::OpenBlind.is_active() {
                    true => State::SetOpen { expected: found },
                    false => State::StillOpen { seen: found },
                })
            }
            State::Once { from, to, .. }
                if from == SpanState::Partial && Mutation::MarkBlind.is_active()
                    || from == SpanState::Contended && Mutation::CalmBlind.is_active() =>
            {
                Some(State::Once { from: now, to, expected: found })
            }
            _ => None,
        }
    }
}
