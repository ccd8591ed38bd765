//! A0: checks that spans are ready, and not another tenant's, before they are opened or allocated
//! whole.
//!
//! As a consequence, a closed span with the record *close* that is not empty in its section's word
//! is a span whose closing is not finished.

use aquifer_fabric::Host;

use super::{Action, Mutation, OpError, StepResult, WordAt, damaged};
use crate::cache::NodeCache;
use crate::size::SECTION_SPANS;
use crate::word::AlignedRun;

/// The check of a group's spans.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(super) struct ReadyCheck {
    host: Host,
    section: u32,
    group: AlignedRun,
    /// Whether spans of other tenants are allowed.
    allows_foreign: bool,
    state: ReadyState,
}

/// The step in progress.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum ReadyState {
    /// Reads the spans and their owners.
    Surveying,
    /// Reads the section again after the spans, to check that its word is still as cached.
    ProbingSection,
    /// Marks this span, which is closed and empty in its section's word.
    Marking(u32),
}

/// The outcome of a step.
#[derive(Debug)]
pub(super) enum ReadyProgress {
    Post(Action),
    /// All spans are ready, and have been since the section had its cached word.
    Done,
    /// Cached words were out of date. They are cached as found.
    Overtaken,
    /// A span belongs to another tenant, which was not known.
    Foreign,
}

impl ReadyCheck {
    /// Begins the check of a group; `None` if all of its spans are known to be ready.
    pub(super) fn begin(
        host: Host,
        section: u32,
        group: AlignedRun,
        allows_foreign: bool,
        cache: &NodeCache,
    ) -> Option<(Self, Action)> {
        if cache.not_ready(section, group) == 0 || Mutation::SkipReady.is_active() {
            return None;
        }
        let check = Self { host, section, group, allows_foreign, state: ReadyState::Surveying };
        Some((check, Action::survey(section, 1)))
    }

    pub(super) fn step(
        &mut self,
        cache: &mut NodeCache,
        result: StepResult<'_>,
    ) -> Result<ReadyProgress, OpError> {
        let section = WordAt::Section(self.section);
        match self.state {
            ReadyState::Surveying => {
                // A READ may tear a word. An illegal word is not cached, and counts as not ready.
                cache.learn_survey(self.section, 1, result).ok();
                if cache.has_foreign(self.section, self.group) && !self.allows_foreign {
                    return Ok(ReadyProgress::Foreign);
                }
                if cache.not_ready(self.section, self.group) == 0 {
                    return Ok(ReadyProgress::Done);
                }
                if Mutation::ReadyFromCache.is_active() {
                    return Ok(self.mark(cache));
                }
                self.state = ReadyState::ProbingSection;
                Ok(ReadyProgress::Post(Action::probe(section)))
            }
            ReadyState::ProbingSection => {
                let found = result.found();
                if found != cache.word(section) {
                    cache.learn(section, found)?;
                    return Ok(ReadyProgress::Overtaken);
                }
                Ok(self.mark(cache))
            }
            ReadyState::Marking(span) => {
                let (at, found) = (WordAt::Span(span), result.found());
                let before = cache.span(span);
                if found != before.0 {
                    cache.learn(at, found)?;
                    return Ok(ReadyProgress::Overtaken);
                }
                let now = before.mark_ready(self.host);
                cache.change_span(span, now).map_err(|cause| damaged(at, now.0, cause))?;
                if !cache.is_owner_known(span) {
                    // The READ had torn the span's word, so the owner was not cached.
                    return Ok(ReadyProgress::Overtaken);
                }
                Ok(self.mark(cache))
            }
        }
    }

    /// Marks the next span that is not ready.
    fn mark(&mut self, cache: &NodeCache) -> ReadyProgress {
        let not_ready = cache.not_ready(self.section, self.group);
        if not_ready == 0 {
            return ReadyProgress::Done;
        }
        let span = self.section * SECTION_SPANS + not_ready.trailing_zeros();
        let word = cache.span(span);
        if !word.is_closed() {
            // The word was torn, or the span was opened since. Then the section has changed.
            return ReadyProgress::Overtaken;
        }
        self.state = ReadyState::Marking(span);
        let desired = word.mark_ready(self.host).0;
        ReadyProgress::Post(Action::commit(WordAt::Span(span), word.0, desired))
    }
}
