//! A0: spans are ready for a new life, and nobody else's, before they are opened or taken whole.
//!
//! So a closed span with the record *close*, of which its section says that it is not empty, is one whose closing is not finished.

use aquifer_fabric::Host;

use super::{Action, Mutation, OpError, StepResult, WordAt, damaged};
use crate::cache::NodeCache;
use crate::size::SECTION_SPANS;
use crate::word::Run;

/// A look at a group's spans.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(super) struct Ready {
    host: Host,
    section: u32,
    group: Run,
    /// Whether it may be another tenant's.
    takes_foreign: bool,
    state: State,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum State {
    Spans,
    /// Is the section still as remembered, now that the spans were seen?
    Section,
    /// The span with this place is closed, and its section knows that.
    Mark(u32),
}

/// What a step led to.
#[derive(Debug)]
pub(super) enum Readied {
    Post(Action),
    /// All are ready, since the section has been as it is remembered.
    Done,
    /// What was remembered is old.
    Overtaken,
    /// Some are another tenant's, which was not known.
    Foreign,
}

impl Ready {
    /// What must be done before the group is opened or taken; `None` if nothing.
    pub(super) fn begin(
        host: Host,
        section: u32,
        group: Run,
        takes_foreign: bool,
        cache: &NodeCache,
    ) -> Option<(Self, Action)> {
        if cache.unready(section, group) == 0 || Mutation::SkipReady.is_active() {
            return None;
        }
        let ready = Self { host, section, group, takes_foreign, state: State::Spans };
        Some((ready, Action::survey(section, 1)))
    }

    pub(super) fn step(&mut self, cache: &mut NodeCache, result: StepResult<'_>) -> Result<Readied, OpError> {
        let section = WordAt::Section(self.section);
        match self.state {
            State::Spans => {
                // A READ may tear a word. What looks impossible is not ready, and is left to the CAS, which does not tear.
                cache.learn_survey(self.section, 1, result).ok();
                if cache.has_foreign(self.section, self.group) && !self.takes_foreign {
                    return Ok(Readied::Foreign);
                }
                if cache.unready(self.section, self.group) == 0 {
                    return Ok(Readied::Done);
                }
                if Mutation::ReadyFromMemory.is_active() {
                    return Ok(self.mark(cache));
                }
                self.state = State::Section;
                Ok(Readied::Post(Action::probe(section)))
            }
            State::Section => {
                let found = result.found();
                if found != cache.word(section) {
                    cache.learn(section, found)?;
                    return Ok(Readied::Overtaken);
                }
                Ok(self.mark(cache))
            }
            State::Mark(span) => {
                let (at, found) = (WordAt::Span(span), result.found());
                let before = cache.span(span);
                if found != before.0 {
                    cache.learn(at, found)?;
                    return Ok(Readied::Overtaken);
                }
                let now = before.mark_ready(self.host);
                cache.change_span(span, now).map_err(|cause| damaged(at, now.0, cause))?;
                if !cache.is_known(span) {
                    // The READ had torn its word, and so did not tell whose it is.
                    return Ok(Readied::Overtaken);
                }
                Ok(self.mark(cache))
            }
        }
    }

    /// Mark the next that is not ready.
    fn mark(&mut self, cache: &NodeCache) -> Readied {
        let unready = cache.unready(self.section, self.group);
        if unready == 0 {
            return Readied::Done;
        }
        let span = self.section * SECTION_SPANS + unready.trailing_zeros();
        let word = cache.span(span);
        if !word.is_closed() {
            // Torn, or opened since: its section is not as remembered, or will not be found so.
            return Readied::Overtaken;
        }
        self.state = State::Mark(span);
        let desired = word.mark_ready(self.host).0;
        Readied::Post(Action::commit(WordAt::Span(span), word.0, desired))
    }
}
