//! Where there is something to take: what is remembered first, then what there is.

use super::{AllocOp, Commit, Only, State};
use crate::cache::{Candidate, NodeCache};
use crate::op::{Action, Grant, Mutation, OpError, READ_WORDS_MAX, Step, WordAt};
use crate::size::SECTION_SPANS;
use crate::word::{Run, SpanState};

/// Races lost after which what is remembered counts as stale, and is read anew.
const STALE_AFTER: u32 = 8;
/// The same where whole spans are taken: one READ brings the words of many sections, so that the next race is seldom lost.
const STALE_AFTER_WHOLE: u32 = 1;

/// How far a search has come.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(super) struct Search {
    pub(super) pass: Pass,
    /// Sections behind us in this pass.
    pub(super) scanned: u32,
    /// Sections of this pass whose words have been read.
    pub(super) fresh: u32,
    /// The section whose spans were read last.
    pub(super) spans_read: Option<u32>,
    /// A span that was found too contended.
    pub(super) avoid: Option<u32>,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(super) enum Pass {
    /// Over what we remember.
    Remembered,
    /// R: over the node's words as they are now.
    Fresh,
    /// Over contended spans too.
    Contended,
}

impl Search {
    /// Nothing has been looked at.
    pub(super) const fn new() -> Self {
        Self { pass: Pass::Remembered, scanned: 0, fresh: 0, spans_read: None, avoid: None }
    }
}

impl AllocOp {
    /// Find something to take, in what we remember, then in what there is, then where it is crowded.
    pub(super) fn search(&mut self, cache: &mut NodeCache) -> Step<Grant> {
        if let Some(only) = self.only {
            return self.search_only(cache, only);
        }
        let count = cache.section_count();
        let is_stale = self.lost >= if self.class.is_within_span() { STALE_AFTER } else { STALE_AFTER_WHOLE };
        if self.search.pass == Pass::Remembered && is_stale {
            self.search.pass = Pass::Fresh;
            self.search.scanned = 0;
        }
        loop {
            while self.search.scanned < count {
                let section = (cache.start(self.class) + self.search.scanned) % count;
                let fresh = self.search.pass == Pass::Fresh;
                if fresh && self.search.scanned >= self.search.fresh {
                    let many = READ_WORDS_MAX.min(count - section).min(count - self.search.scanned);
                    let action = Action::read(WordAt::Section(section), many);
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
                    return self.post(State::Surveying { section }, Action::survey(section, 1));
                }
                self.search.scanned += 1;
            }
            self.search.scanned = 0;
            self.search.pass = match self.search.pass {
                _ if Mutation::TrustCache.is_active() => {
                    return Step::Done(Err(OpError::Full));
                }
                Pass::Remembered => Pass::Fresh,
                Pass::Fresh => Pass::Contended,
                Pass::Contended => return Step::Done(Err(OpError::Full)),
            };
        }
    }

    /// The only group that is wanted, if it is free by what is remembered, or else by what there is.
    fn search_only(&mut self, cache: &mut NodeCache, only: Only) -> Step<Grant> {
        let Only { section, group, key } = only;
        let is_foreign = key.is_some() && cache.has_foreign(section, group);
        if !is_foreign && cache.section(section).all(group, SpanState::Empty) {
            return self.begin_life(cache, section, group, Commit::TakeWhole { section, group });
        }
        if self.search.pass == Pass::Fresh {
            return Step::Done(Err(OpError::Full));
        }
        self.search.pass = Pass::Fresh;
        let action = Action::read(WordAt::Section(section), 1);
        self.post(State::ReadingSections { first: section, count: 1 }, action)
    }

    fn candidate(
        &self,
        cache: &NodeCache,
        section: u32,
        avoid: Option<u32>,
        crowded: bool,
    ) -> Option<Candidate> {
        let word = cache.section(section);
        if Mutation::EnterClosed.is_active() && self.class.is_within_span() {
            let entered =
                word.spans_in(SpanState::Partial).map(|index| section * SECTION_SPANS + u32::from(index));
            if let Some(span) = entered.into_iter().find(|&span| cache.span(span).is_closed()) {
                let run = cache.span(span).find(self.class.order())?;
                return Some(Candidate::Chunks { span, run });
            }
        }
        if Mutation::TakeHalfEmpty.is_active() && !self.class.is_within_span() {
            let first = word.find(0)?.first();
            let group = Run::new((first >> self.class.order()) << self.class.order(), self.class.order())?;
            return Some(Candidate::Whole { group });
        }
        cache.candidate(section, self.class, avoid, crowded)
    }
}
