//! Searches the cached words for free memory.

use aquifer_fabric::Host;

use super::{Candidate, NodeCache};
use crate::size::{SECTION_SPANS, SizeClass};
use crate::word::SpanState;

impl NodeCache {
    /// Free memory of `class` in a section. `avoid` is a span at which the caller lost too many
    /// races. Contended spans are searched only if `contended`.
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
            // A closed span is being opened or closed by another host, and only that host may
            // change it.
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

    /// The first of `count` neighbouring sections that are free and not another tenant's. The
    /// search begins at the section at which searches for large extents begin.
    pub(crate) fn find_stretch(&self, count: u32) -> Option<u32> {
        let is_free = |section: u32| {
            let index = section as usize;
            self.sections[index].empty_spans() == u16::MAX && self.foreign[index] == 0
        };
        let (start, end) = (self.first_section(SizeClass::SECTION), self.section_count());
        let mut free = 0;
        for section in (start..end).chain(0..end) {
            // The last section and the first are not neighbours.
            free = if section == 0 { 0 } else { free };
            free = if is_free(section) { free + 1 } else { 0 };
            if free == count {
                return Some(section + 1 - count);
            }
        }
        None
    }

    /// A number that changes with each section that the node clears. `None` if `count` neighbouring
    /// sections will not be free when all is cleared.
    pub(crate) fn clearing_progress(&self, count: u32) -> Option<u64> {
        let (mut run, mut longest, mut progress) = (0, 0, 0_u64);
        for (word, foreign) in self.sections.iter().zip(&self.foreign) {
            // The node clears a section group by group, so its record is in the word.
            let is_of_node = word.log().ok().flatten().is_some_and(|log| log.host == Host::NODE);
            run = if word.empty_spans() == u16::MAX || is_of_node { run + 1 } else { 0 };
            longest = longest.max(run);
            // Changes by others, of which a busy node has many, do not count.
            let word = if is_of_node { word.0 } else { 0 };
            progress = progress.wrapping_add(word).wrapping_add(foreign.count_ones().into());
        }
        (longest >= count).then_some(progress)
    }
}
