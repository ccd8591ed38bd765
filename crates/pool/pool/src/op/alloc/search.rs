//! Searches for free memory: by the cached words first, and then by the present words.

use super::{AllocOp, AllocState, Commit, FixedGroup};
use crate::cache::{Candidate, NodeCache};
use crate::op::{Action, Grant, Mutation, OpError, READ_WORDS_MAX, Step, WordAt};
use crate::size::SECTION_SPANS;
use crate::word::{AlignedRun, SpanState};

/// Lost races after which an allocation within a span reads the cached words again.
const STALE_AFTER: u32 = 8;
/// Lost races after which an allocation of whole spans reads the cached words again. One READ
/// returns the words of many sections, so that the next race is seldom lost.
const STALE_AFTER_WHOLE: u32 = 1;

/// The progress of a search.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(super) struct SectionSearch {
    pub(super) pass: Pass,
    /// Number of sections that were searched in this pass.
    pub(super) scanned: u32,
    /// Number of sections whose words were read in this pass.
    pub(super) fresh: u32,
    /// The section whose spans were read last.
    pub(super) spans_read: Option<u32>,
    /// A span at which too many races were lost.
    pub(super) avoid: Option<u32>,
}

/// The passes of a search, in their order.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(super) enum Pass {
    /// Searches the cached words.
    Cached,
    /// R: searches words that are read in this pass.
    Fresh,
    /// Searches contended spans, too.
    Contended,
}

impl SectionSearch {
    /// Creates a search that has not begun.
    pub(super) const fn new() -> Self {
        Self { pass: Pass::Cached, scanned: 0, fresh: 0, spans_read: None, avoid: None }
    }
}

impl AllocOp {
    /// Searches for free memory and begins to allocate it, or ends with [`OpError::Full`].
    pub(super) fn search(&mut self, cache: &mut NodeCache) -> Step<Grant> {
        if let Some(fixed) = self.fixed_group {
            return self.search_fixed(cache, fixed);
        }
        let count = cache.section_count();
        let is_stale = self.lost >= if self.class.is_within_span() { STALE_AFTER } else { STALE_AFTER_WHOLE };
        if self.search.pass == Pass::Cached && is_stale {
            self.search.pass = Pass::Fresh;
            self.search.scanned = 0;
        }
        loop {
            while self.search.scanned < count {
                let section = (cache.first_section(self.class) + self.search.scanned) % count;
                let is_fresh = self.search.pass == Pass::Fresh;
                if is_fresh && self.search.scanned >= self.search.fresh {
                    let to_read = READ_WORDS_MAX.min(count - section).min(count - self.search.scanned);
                    let action = Action::read(WordAt::Section(section), to_read);
                    return self.post(AllocState::ReadingSections { first: section, count: to_read }, action);
                }
                let allows_contended = self.search.pass == Pass::Contended;
                let avoid = if allows_contended { None } else { self.search.avoid };
                if let Some(found) = self.candidate(cache, section, avoid, allows_contended) {
                    return self.attempt(cache, section, found);
                }
                let has_spans = self.class.is_within_span() && cache.has_open_spans(section);
                if is_fresh && has_spans && self.search.spans_read != Some(section) {
                    self.search.spans_read = Some(section);
                    return self.post(AllocState::Surveying { section }, Action::survey(section, 1));
                }
                self.search.scanned += 1;
            }
            self.search.scanned = 0;
            self.search.pass = match self.search.pass {
                _ if Mutation::TrustCache.is_active() => {
                    return Step::Done(Err(OpError::Full));
                }
                Pass::Cached => Pass::Fresh,
                Pass::Fresh => Pass::Contended,
                Pass::Contended => return Step::Done(Err(OpError::Full)),
            };
        }
    }

    /// Begins to allocate the fixed group if it is free by the cached words, or else by words read
    /// now.
    fn search_fixed(&mut self, cache: &mut NodeCache, fixed: FixedGroup) -> Step<Grant> {
        let FixedGroup { section, group, key } = fixed;
        let is_foreign = key.is_some() && cache.has_foreign(section, group);
        if !is_foreign && cache.section(section).all(group, SpanState::Empty) {
            return self.check_ready(cache, section, group, Commit::Whole { section, group });
        }
        if self.search.pass == Pass::Fresh {
            return Step::Done(Err(OpError::Full));
        }
        self.search.pass = Pass::Fresh;
        let action = Action::read(WordAt::Section(section), 1);
        self.post(AllocState::ReadingSections { first: section, count: 1 }, action)
    }

    /// Free memory in a section, by the cached words.
    fn candidate(
        &self,
        cache: &NodeCache,
        section: u32,
        avoid: Option<u32>,
        allows_contended: bool,
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
        if Mutation::AllocateHalfEmpty.is_active() && !self.class.is_within_span() {
            let first = word.find(0)?.first();
            let group =
                AlignedRun::new((first >> self.class.order()) << self.class.order(), self.class.order())?;
            return Some(Candidate::Whole { group });
        }
        cache.candidate(section, self.class, avoid, allows_contended)
    }
}
