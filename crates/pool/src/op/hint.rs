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

use super::{ATTEMPTS_MAX, Action, Mutation, WordAt};
use crate::cache::{NodeCache, place_in_section};
use crate::size::SECTION_SPANS;
use crate::word::{SectionWord, SpanState, SpanWord};

/// A change of a hint under way.
#[derive(Clone, Copy, Debug)]
pub(super) struct Hint {
    span: u32,
    mutation: Mutation,
    lost: u32,
    state: State,
}

#[derive(Clone, Copy, Debug)]
enum State {
    /// A4, a CAS.
    SetFull { expected: SectionWord, from: SectionWord },
    /// A4: is the span still full, now that the section is `seen`?
    StillFull { seen: SectionWord, from: SectionWord },
    /// A5: is the span still full, now that the hint is set?
    Recheck { set: SectionWord },
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
    pub(super) fn filled(span: u32, cache: &NodeCache, mutation: Mutation) -> Option<(Self, Action)> {
        if cache.state_of(span) == SpanState::Full {
            return None;
        }
        // Rule H: the word was that, but for changes of our own, from before the span was seen full until now.
        let expected = cache.section(span / SECTION_SPANS);
        Some(Self::begin(span, mutation, State::SetFull { expected, from: expected }))
    }

    /// F2: this host has just given back chunks, and the span is open still. `was_full`: it had no free one before.
    pub(super) fn opened(
        span: u32,
        was_full: bool,
        cache: &NodeCache,
        mutation: Mutation,
    ) -> Option<(Self, Action)> {
        if mutation == Mutation::SkipUnhint {
            return None;
        }
        if cache.state_of(span) == SpanState::Full {
            // Rule H: the remembered section word is older than the CAS that left the span open.
            return Some(Self::begin(
                span,
                mutation,
                State::SetOpen { expected: cache.section(span / SECTION_SPANS) },
            ));
        }
        was_full.then(|| Self::begin(span, mutation, State::LookForFull))
    }

    /// C1: too many races were lost at a span that was open at the last of them.
    pub(super) fn mark(span: u32, cache: &NodeCache, mutation: Mutation) -> Option<(Self, Action)> {
        Self::once(span, SpanState::Partial, SpanState::Contended, cache, mutation)
    }

    /// C2: a change of an open span went through at once.
    pub(super) fn calm(span: u32, cache: &NodeCache, mutation: Mutation) -> Option<(Self, Action)> {
        Self::once(span, SpanState::Contended, SpanState::Partial, cache, mutation)
    }

    fn once(
        span: u32,
        from: SpanState,
        to: SpanState,
        cache: &NodeCache,
        mutation: Mutation,
    ) -> Option<(Self, Action)> {
        let expected = cache.section(span / SECTION_SPANS);
        (cache.state_of(span) == from)
            .then(|| Self::begin(span, mutation, State::Once { from, to, expected }))
    }

    fn begin(span: u32, mutation: Mutation, state: State) -> (Self, Action) {
        let mut hint = Self { span, mutation, lost: 0, state };
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
            State::Recheck { .. } | State::StillOpen { .. } | State::StillFull { .. } => {
                Action::Probe { at: WordAt::Span(self.span) }
            }
            State::LookForFull => Action::Probe { at: self.section() },
            State::SetFull { expected, from } => {
                let desired = from.hint(place_in_section(self.span), SpanState::Full);
                self.mutation.commit(self.section(), expected.0, desired.0)
            }
            State::SetOpen { expected } => self.cas(expected, SpanState::Partial),
            State::Once { to, expected, .. } => self.cas(expected, to),
        }
    }

    fn cas(&self, expected: SectionWord, to: SpanState) -> Action {
        let desired = expected.hint(place_in_section(self.span), to);
        self.mutation.commit(self.section(), expected.0, desired.0)
    }

    /// The next action; `None` when all is done.
    pub(super) fn step(&mut self, cache: &mut NodeCache, found: u64) -> Option<Action> {
        self.lost += 1;
        if self.lost > ATTEMPTS_MAX {
            return None;
        }
        let next = match self.state {
            State::Recheck { .. } | State::StillOpen { .. } | State::StillFull { .. } => {
                self.after_span(cache, SpanWord(found))
            }
            _ => self.after_section(cache, SectionWord(found)),
        }?;
        Some(self.post(next))
    }

    fn after_span(&self, cache: &mut NodeCache, span: SpanWord) -> Option<State> {
        cache.set_span(self.span, span).ok()?;
        match self.state {
            State::StillFull { seen, from } if span.is_full() => {
                Some(State::SetFull { expected: seen, from })
            }
            // A closed span is its closer's, who writes 00 over any hint.
            State::Recheck { set: seen } | State::StillOpen { seen }
                if !span.is_full() && !span.is_closed() =>
            {
                Some(State::SetOpen { expected: seen })
            }
            _ => None,
        }
    }

    fn after_section(&self, cache: &mut NodeCache, found: SectionWord) -> Option<State> {
        let won = match self.state {
            State::SetFull { expected, .. } => (expected == found).then_some((expected, SpanState::Full)),
            State::SetOpen { expected } => (expected == found).then_some((expected, SpanState::Partial)),
            State::Once { to, expected, .. } => (expected == found).then_some((expected, to)),
            _ => None,
        };
        if let Some((before, to)) = won {
            let set = before.hint(place_in_section(self.span), to);
            cache.change_section(self.span / SECTION_SPANS, set).ok()?;
            let recheck = to == SpanState::Full && self.mutation != Mutation::SkipRecheck;
            return recheck.then_some(State::Recheck { set });
        }
        cache.set_section(self.span / SECTION_SPANS, found).ok()?;
        let now = self.state_in(found);
        match (self.state, self.mutation) {
            (State::SetFull { expected, .. }, mutation)
                if matches!(now, SpanState::Partial | SpanState::Contended) =>
            {
                let stale = mutation == Mutation::FullFromStale;
                Some(State::StillFull { seen: found, from: if stale { expected } else { found } })
            }
            (State::SetOpen { .. } | State::LookForFull, Mutation::OpenBlind) if now == SpanState::Full => {
                Some(State::SetOpen { expected: found })
            }
            (State::SetOpen { .. } | State::LookForFull, _) if now == SpanState::Full => {
                Some(State::StillOpen { seen: found })
            }
            (State::Once { from: SpanState::Partial, to, .. }, Mutation::MarkBlind)
            | (State::Once { from: SpanState::Contended, to, .. }, Mutation::CalmBlind) => {
                Some(State::Once { from: now, to, expected: found })
            }
            _ => None,
        }
    }
}
