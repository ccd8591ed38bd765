//! What there is to take, by what is remembered.

use aquifer_fabric::Host;

use super::{Candidate, NodeCache};
use crate::op::{Chain, WordAt};
use crate::size::{SECTION_CHUNKS, SECTION_SPANS, SPAN_CHUNKS, SizeClass};
use crate::word::{Run, SpanState};

impl NodeCache {
    /// Of what this client gave back last, and can take again as it was, in which section it is; a chunk only of a span that is open still, or rests.
    pub(crate) fn take_left(&mut self, class: SizeClass) -> Option<(u32, Candidate)> {
        while let Some(chunk) = self.left.take_recent(class) {
            if let Some(candidate) = self.candidate_left(chunk, class) {
                return Some((chunk / SECTION_CHUNKS, candidate));
            }
        }
        None
    }

    /// Whether an extent of that size is taken by a CAS alone: there is such a one, or one that was left when its span was opened, and a search takes it first.
    #[must_use]
    pub fn has_left(&mut self, class: SizeClass) -> bool {
        while let Some(chunk) = self.left.last(class) {
            if self.candidate_left(chunk, class).is_some() {
                return true;
            }
            self.left.take_recent(class);
        }
        let first = self.candidate(self.start(class), class, None, false);
        let Some(Candidate::Chunks { span, run }) = first else { return false };
        let chunk = span * SPAN_CHUNKS + u32::from(run.first());
        self.is_known(span) && self.is_settled(WordAt::Span(span)) && self.left(chunk, class).is_some()
    }

    fn candidate_left(&self, chunk: u32, class: SizeClass) -> Option<Candidate> {
        let (section, span) = (chunk / SECTION_CHUNKS, chunk / SPAN_CHUNKS);
        let first = if class.is_within_span() { chunk % SPAN_CHUNKS } else { span % SECTION_SPANS };
        let run = Run::new(u8::try_from(first).ok()?, class.order())?;
        let word = self.span(span);
        if !class.is_within_span() {
            let is_free = self.section(section).all(run, SpanState::Empty);
            return is_free.then_some(Candidate::Whole { group: run });
        }
        let is_open = !word.is_closed() || self.is_resting(span);
        (is_open && word.bits() & run.mask() == 0).then_some(Candidate::Chunks { span, run })
    }

    /// Several extents of that size, at least two, that a CAS alone takes, all of one span: of the one where something was left last, or of the section where searches begin.
    pub(crate) fn chain(&mut self, host: Host, class: SizeClass, count: u32) -> Option<Chain> {
        let last = self.left.last(class).map(|chunk| chunk / SPAN_CHUNKS);
        let section = self.start(class);
        let open = self.section(section).spans_in(SpanState::Partial);
        let spans = open.map(|place| section * SECTION_SPANS + u32::from(place));
        last.into_iter().chain(spans).find_map(|span| self.chain_in(span, host, class, count))
    }

    fn chain_in(&self, span: u32, host: Host, class: SizeClass, count: u32) -> Option<Chain> {
        let word = self.span(span);
        if word.is_closed() || !self.is_known(span) || !self.is_settled(WordAt::Span(span)) {
            return None;
        }
        let is_ready = |first: &u32| {
            let run = u8::try_from(*first).ok().and_then(|first| Run::new(first, class.order()));
            let is_free = run.is_some_and(|run| word.bits() & run.mask() == 0);
            is_free && self.left(span * SPAN_CHUNKS + first, class).is_some()
        };
        let firsts = (0..SPAN_CHUNKS).step_by(class.chunks() as usize).filter(is_ready);
        let firsts = firsts.take(count as usize).fold(0_u32, |firsts, first| firsts | 1 << first);
        (firsts.count_ones() > 1).then(|| Chain::new(host, span, word, class, firsts))
    }

    /// What to take of a section; `avoid` is a span at which the caller lost too many races. Contended spans are
    /// looked at only if `contended`.
    pub(crate) fn candidate(
        &self,
        section: u32,
        class: SizeClass,
        avoid: Option<u32>,
        contended: bool,
    ) -> Option<Candidate> {
        let word = self.section(section);
        let first = section * SECTION_SPANS;
        if !class.is_within_span() {
            let group = word.find_among(class.order(), !self.foreign[section as usize]);
            return group.map(|group| Candidate::Whole { group });
        }
        let more = contended.then(|| word.spans_in(SpanState::Contended)).into_iter().flatten();
        for index in word.spans_in(SpanState::Partial).chain(more) {
            let span = first + u32::from(index);
            let word = self.span(span);
            // A closed one is being opened or closed by another host: only that one may touch it.
            if Some(span) != avoid
                && !word.is_closed()
                && !self.is_foreign(span)
                && let Some(run) = word.find(class.order())
            {
                return Some(Candidate::Chunks { span, run });
            }
        }
        let empty = word.find_among(0, !self.foreign[section as usize]);
        empty.map(|group| Candidate::Empty { span: first + u32::from(group.first()) })
    }

    /// The first of `count` neighbouring sections that are free, all of them, and not another tenant's, from the place on at which searches for large extents begin.
    pub(crate) fn find_stretch(&self, count: u32) -> Option<u32> {
        let is_free = |section: u32| {
            let index = section as usize;
            self.sections[index].empty_spans() == u16::MAX && self.foreign[index] == 0
        };
        let (start, end) = (self.start(SizeClass::SECTION), self.section_count());
        let mut free = 0;
        for section in (start..end).chain(0..end) {
            // There is no way from the last to the first.
            free = if section == 0 { 0 } else { free };
            free = if is_free(section) { free + 1 } else { 0 };
            if free == count {
                return Some(section + 1 - count);
            }
        }
        None
    }

    /// How many sections the node is clearing, or is to clear for us; `None` if there would be no `count` neighbours free even then.
    pub(crate) fn sections_to_clear(&self, count: u32) -> Option<u32> {
        let (mut row, mut longest, mut to_clear) = (0, 0, 0);
        for (word, foreign) in self.sections.iter().zip(&self.foreign) {
            let is_empty = word.empty_spans() == u16::MAX;
            // It takes one group after another.
            let is_in_work = word.log().ok().flatten().is_some_and(|log| log.host == Host::NODE);
            row = if is_empty || is_in_work { row + 1 } else { 0 };
            longest = longest.max(row);
            to_clear += u32::from(!is_empty && is_in_work || is_empty && *foreign != 0);
        }
        (longest >= count).then_some(to_clear)
    }
}
