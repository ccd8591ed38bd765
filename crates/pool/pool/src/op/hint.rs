//! Changes of hint bits: full (A4–A6, F2) and contended (C1, C2).
//!
//! Code 11 in a section's word is a hint if the span is open, and the truth if the span is
//! allocated whole. Only a hint may be cleared. Rule H keeps the two apart: *a hint is changed by a
//! CAS whose expected section word was read before the span was last seen open.* A span can be
//! allocated whole only over code 00. So if the section's word has not changed since before the
//! span was seen open, then the span is still open, or the client that emptied it is about to write
//! 00 over any hint.
//!
//! A full hint is neither lost nor stale: the client that fills a span sets the hint and *then*
//! reads the span (A5). The client that frees chunks of a full span does so and *then* reads the
//! hint (F2). The later of the two reads sees what the other client did, and clears the hint.
//!
//! A change of a hint cannot fail the operation, which is committed before.

use super::{ATTEMPTS_MAX, Action, Mutation, StepResult, WordAt};
use crate::cache::{NodeCache, place_in_section};
use crate::size::SECTION_SPANS;
use crate::word::{SectionWord, SpanState, SpanWord};

/// A change of a hint in progress.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(super) struct Hint {
    span: u32,
    lost: u32,
    state: HintState,
}

/// The step in progress.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum HintState {
    /// A4, a CAS; and A5, a read of the span behind it.
    SetFull { expected: SectionWord, from: SectionWord },
    /// A6, F2: a CAS that clears the full hint.
    ClearFull { expected: SectionWord },
    /// F2: reads the section, to check whether it has the full hint.
    ProbingSection,
    /// A6, F2: reads the span after the section was `seen`, to check whether it is open with free
    /// chunks.
    ProbingSpan { seen: SectionWord },
    /// C1, C2: a CAS that is not repeated if it fails.
    ChangeContended { from: SpanState, to: SpanState, expected: SectionWord },
}

impl Hint {
    /// A4: sets the full hint of a span that was seen full. No other client may have changed the
    /// section's word since; `None` if the hint is set already.
    pub(super) fn set_full(span: u32, cache: &NodeCache) -> Option<(Self, Action)> {
        if cache.state_of(span) == SpanState::Full {
            return None;
        }
        // Rule H: since before the span was seen full, only this client has changed the section's
        // word.
        let expected = cache.section(span / SECTION_SPANS);
        Some(Self::begin(span, HintState::SetFull { expected, from: expected }))
    }

    /// A5 after A2 has set the full hint of this span, which was then found to be `found`. If it is
    /// not full, A6.
    pub(super) fn recheck_full(span: u32, found: SpanWord, cache: &mut NodeCache) -> Option<(Self, Action)> {
        let seen = cache.section(span / SECTION_SPANS);
        let is_full = cache.set_span(span, found).is_err() || found.is_full() || found.is_closed();
        (!is_full && !Mutation::SkipRecheck.is_active())
            .then(|| Self::begin(span, HintState::ClearFull { expected: seen }))
    }

    /// F2: clears the full hint of a span that is open after a free. `was_full`: no chunk of it was
    /// free before.
    pub(super) fn clear_full(span: u32, was_full: bool, cache: &NodeCache) -> Option<(Self, Action)> {
        if Mutation::SkipClearFull.is_active() {
            return None;
        }
        if cache.state_of(span) == SpanState::Full {
            // Rule H: the cached section word is older than the CAS that left the span open.
            return Some(Self::begin(
                span,
                HintState::ClearFull { expected: cache.section(span / SECTION_SPANS) },
            ));
        }
        was_full.then(|| Self::begin(span, HintState::ProbingSection))
    }

    /// C1: sets the contended hint after several races lost at a span, which was open at the last
    /// of them.
    pub(super) fn set_contended(span: u32, cache: &NodeCache) -> Option<(Self, Action)> {
        Self::change_contended(span, SpanState::Partial, SpanState::Contended, cache)
    }

    /// C2: clears the contended hint after a change of an open span without a lost race.
    pub(super) fn clear_contended(span: u32, cache: &NodeCache) -> Option<(Self, Action)> {
        Self::change_contended(span, SpanState::Contended, SpanState::Partial, cache)
    }

    fn change_contended(
        span: u32,
        from: SpanState,
        to: SpanState,
        cache: &NodeCache,
    ) -> Option<(Self, Action)> {
        let expected = cache.section(span / SECTION_SPANS);
        (cache.state_of(span) == from)
            .then(|| Self::begin(span, HintState::ChangeContended { from, to, expected }))
    }

    fn begin(span: u32, state: HintState) -> (Self, Action) {
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

    fn post(&mut self, state: HintState) -> Action {
        self.state = state;
        match state {
            HintState::ProbingSpan { .. } => Action::probe(WordAt::Span(self.span)),
            HintState::ProbingSection => Action::probe(self.section()),
            HintState::SetFull { expected, from } => {
                let desired = from.hint(place_in_section(self.span), SpanState::Full);
                let recheck = Action::probe(WordAt::Span(self.span));
                Action::commit(self.section(), expected.0, desired.0).then(recheck)
            }
            HintState::ClearFull { expected } => self.cas(expected, SpanState::Partial),
            HintState::ChangeContended { to, expected, .. } => self.cas(expected, to),
        }
    }

    fn cas(&self, expected: SectionWord, to: SpanState) -> Action {
        let desired = expected.hint(place_in_section(self.span), to);
        Action::commit(self.section(), expected.0, desired.0)
    }

    /// The next action; `None` if the change is done.
    pub(super) fn step(&mut self, cache: &mut NodeCache, result: StepResult<'_>) -> Option<Action> {
        self.lost += 1;
        if self.lost > ATTEMPTS_MAX {
            return None;
        }
        let next = match (self.state, result) {
            (HintState::SetFull { expected, from }, result) => {
                let (section, span) = result.found_then();
                self.after_full(cache, (expected, from), SectionWord(section), SpanWord(span?))
            }
            (HintState::ProbingSpan { seen }, result) => {
                self.after_span(cache, seen, SpanWord(result.found()))
            }
            (_, result) => self.after_section(cache, SectionWord(result.found())),
        }?;
        Some(self.post(next))
    }

    /// Handles the answers of A4, `section`, and of A5, `span`.
    fn after_full(
        &self,
        cache: &mut NodeCache,
        (expected, from): (SectionWord, SectionWord),
        section: SectionWord,
        span: SpanWord,
    ) -> Option<HintState> {
        let index = self.span / SECTION_SPANS;
        if section == expected {
            let set = expected.hint(place_in_section(self.span), SpanState::Full);
            cache.change_section(index, set).ok()?;
            let is_checked = !Mutation::SkipRecheck.is_active();
            return is_checked.then(|| self.after_span(cache, set, span)).flatten();
        }
        cache.set_section(index, section).ok()?;
        cache.set_span(self.span, span).ok()?;
        let is_unhinted = matches!(self.state_in(section), SpanState::Partial | SpanState::Contended);
        let from = if Mutation::FullFromStale.is_active() { from } else { section };
        (is_unhinted && span.is_full()).then_some(HintState::SetFull { expected: section, from })
    }

    /// Handles the read of the span. The section was `seen` with the full hint before.
    fn after_span(&self, cache: &mut NodeCache, seen: SectionWord, span: SpanWord) -> Option<HintState> {
        cache.set_span(self.span, span).ok()?;
        // The client that emptied a closed span closes it in the section, whatever hint is there.
        (!span.is_full() && !span.is_closed()).then_some(HintState::ClearFull { expected: seen })
    }

    fn after_section(&self, cache: &mut NodeCache, found: SectionWord) -> Option<HintState> {
        let won = match self.state {
            HintState::ClearFull { expected } => {
                (expected == found).then_some((expected, SpanState::Partial))
            }
            HintState::ChangeContended { to, expected, .. } => (expected == found).then_some((expected, to)),
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
            HintState::ClearFull { .. } | HintState::ProbingSection if now == SpanState::Full => {
                Some(match Mutation::ClearFullBlind.is_active() {
                    true => HintState::ClearFull { expected: found },
                    false => HintState::ProbingSpan { seen: found },
                })
            }
            HintState::ChangeContended { from, to, .. }
                if from == SpanState::Partial && Mutation::SetContendedBlind.is_active()
                    || from == SpanState::Contended && Mutation::ClearContendedBlind.is_active() =>
            {
                Some(HintState::ChangeContended { from: now, to, expected: found })
            }
            _ => None,
        }
    }
}
