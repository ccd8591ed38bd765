//! What a client remembers of a node's control words. They go stale at any moment: every use of
//! them ends in a CAS that fails if they have.

mod draws;
mod find;

use aquifer_fabric::{Host, Key, KeyEntry, Tenant};

use crate::layout::Layout;
use crate::op::{Grant, OpError, StepResult, WordAt, damaged, word_of};
use crate::size::{SECTION_CHUNKS, SECTION_SPANS, SPAN_CHUNKS, SizeClass};
pub use draws::{Draws, Source};

use crate::word::{IllegalWord, Run, SectionWord, SpanState, SpanWord, record_of};

const SPANS: usize = SECTION_SPANS as usize;

/// No word has such a record: nothing is known.
pub(crate) const NO_RECORD: u32 = u32::MAX;

/// The remembered words of one node.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct NodeCache {
    sections: Vec<SectionWord>,
    spans: Vec<SpanWord>,
    /// For each section a bit for each span that was seen to be ready for a new life when the section was as remembered.
    ready: Vec<u16>,
    /// Records of the words that may be written over: they are in the full log, or are not needed any more. 0: none.
    settled_sections: Vec<u32>,
    settled_spans: Vec<u32>,
    /// For each section a bit for each span that this client filled, and that the section may not call full, as long as nobody else has changed the section's word.
    filled: Vec<u16>,
    /// For each section a bit for each span of which is known whose it is: as long as its word is as remembered, if it is open, else that of its section.
    known: Vec<u16>,
    /// Among those, the ones that another tenant has used, and that were not cleared since.
    foreign: Vec<u16>,
    tenant: Tenant,
    draws: Draws,
    /// How often a section was found to be other than remembered.
    surprises: u64,
    free_chunks: u64,
    /// Sections that the node keeps to itself.
    withheld: u32,
    /// Where to look first, for extents within a span and for larger ones.
    start: [u32; 2],
}

/// Something that a client could take, as far as it remembers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Candidate {
    /// A run of an open span.
    Chunks { span: u32, run: Run },
    /// An empty span that could be opened.
    Empty { span: u32 },
    /// A group of empty spans to be taken whole.
    Whole { group: Run },
}

impl NodeCache {
    /// Remember a node as empty, and nothing as certain, for a client of `tenant`, whose searches begin at `begin_at` ([`begin_at`]).
    #[must_use]
    pub fn new(layout: &Layout, begin_at: u64, tenant: Tenant, draws: Draws) -> Self {
        let start = section_at(begin_at, layout.sections());
        Self {
            sections: vec![SectionWord::default(); layout.sections() as usize],
            spans: vec![SpanWord::default(); layout.spans() as usize],
            ready: vec![0; layout.sections() as usize],
            settled_sections: vec![0; layout.sections() as usize],
            settled_spans: vec![0; layout.spans() as usize],
            filled: vec![0; layout.sections() as usize],
            known: vec![0; layout.sections() as usize],
            foreign: vec![0; layout.sections() as usize],
            tenant,
            draws,
            surprises: 0,
            free_chunks: u64::from(layout.chunks()),
            withheld: 0,
            start: [start; 2],
        }
    }

    /// The same for another client, which draws from these sources.
    #[must_use]
    pub fn drawing(self, draws: Draws) -> Self {
        Self { draws, ..self }
    }

    /// How many sections there are.
    #[must_use]
    pub fn section_count(&self) -> u32 {
        u32::try_from(self.sections.len()).unwrap_or(u32::MAX)
    }

    /// Chunks that were free when last seen. Those of spans that are being opened or closed do not count.
    #[must_use]
    pub const fn free_chunks(&self) -> u64 {
        self.free_chunks
    }

    /// Chunks that the node lent when its sections were last seen.
    pub(crate) fn lent_chunks(&self) -> u64 {
        u64::from(self.section_count() - self.withheld) * u64::from(SECTION_CHUNKS)
    }

    /// A section's word as last seen.
    pub(crate) fn section(&self, section: u32) -> SectionWord {
        self.sections[section as usize]
    }

    /// A span's word as last seen.
    pub(crate) fn span(&self, span: u32) -> SpanWord {
        self.spans[span as usize]
    }

    /// Remember a section's word, as it was found.
    pub(crate) fn set_section(&mut self, section: u32, word: SectionWord) -> Result<(), IllegalWord> {
        word.check()?;
        if word != self.section(section) {
            // Others have been at it: what was seen of its spans is of before that.
            self.ready[section as usize] = 0;
            self.filled[section as usize] = 0;
            let first = section * SECTION_SPANS;
            for span in first..first + SECTION_SPANS {
                // That of an open one is as sure as its word.
                let is_empty = word.state(place_in_section(span)) == SpanState::Empty;
                if is_empty || self.span(span).is_closed() {
                    self.forget_owner(span);
                }
            }
            self.surprises += 1;
            self.put_section(section, word);
        }
        Ok(())
    }

    /// Remember a section's word after a change of ours, which expected it as it was remembered.
    pub(crate) fn change_section(&mut self, section: u32, word: SectionWord) -> Result<(), IllegalWord> {
        word.check()?;
        let index = section as usize;
        let before = record_of(self.section(section).0);
        if self.settled_sections[index] == before && word.has_record_of(self.section(section)) {
            self.settled_sections[index] = record_of(word.0);
        }
        self.put_section(section, word);
        self.ready[index] &= word.empty_spans();
        Ok(())
    }

    fn put_section(&mut self, section: u32, word: SectionWord) {
        let before = self.free_of(section);
        let was_withheld = self.section(section).is_withheld();
        self.withheld = self.withheld + u32::from(word.is_withheld()) - u32::from(was_withheld);
        self.sections[section as usize] = word;
        self.free_chunks = self.free_chunks + self.free_of(section) - before;
    }

    /// Remember a span's word, as it was found.
    pub(crate) fn set_span(&mut self, span: u32, word: SpanWord) -> Result<(), IllegalWord> {
        if word != self.span(span) {
            self.forget_owner(span);
        }
        self.change_span(span, word)
    }

    /// Remember a span's word after a change of ours, which expected it as it was remembered.
    pub(crate) fn change_span(&mut self, span: u32, word: SpanWord) -> Result<(), IllegalWord> {
        word.check()?;
        let index = span as usize;
        if matches!(self.state_of(span), SpanState::Partial | SpanState::Contended) {
            let (before, after) = (self.spans[index].free_chunks(), word.free_chunks());
            self.free_chunks = self.free_chunks + u64::from(after) - u64::from(before);
        }
        self.spans[index] = word;
        let place = 1 << place_in_section(span);
        let section = (span / SECTION_SPANS) as usize;
        if !word.is_full() {
            self.filled[section] &= !place;
        }
        let ready = &mut self.ready[section];
        *ready = if word.is_ready() { *ready | place } else { *ready & !place };
        Ok(())
    }

    /// This client has taken of a span; if it has filled it, it has not said so in the section.
    pub(crate) fn note_if_filled(&mut self, span: u32) {
        if self.span(span).is_full() && self.state_of(span) != SpanState::Full {
            self.filled[(span / SECTION_SPANS) as usize] |= place_of(span);
        }
    }

    /// A span of this section that it filled, and has not said so. Nobody else has changed the section's word since the span was seen full.
    pub(crate) fn take_filled(&mut self, section: u32) -> Option<u32> {
        let filled = &mut self.filled[section as usize];
        let place = filled.trailing_zeros();
        *filled &= filled.wrapping_sub(1);
        (place < SECTION_SPANS).then_some(section * SECTION_SPANS + place)
    }

    /// A span of this section that a survey has found full, and that is not said to be.
    pub(crate) fn unsaid_full(&self, section: u32, survey: StepResult<'_>) -> Option<u32> {
        let found = survey.words_read(2 * SECTION_SPANS);
        let spans = self.section(section).spans_in(SpanState::Partial);
        let mut full = spans.filter(|place| SpanWord(found[usize::from(*place)]).is_full());
        full.next().map(|place| section * SECTION_SPANS + u32::from(place))
    }

    /// Remember a word as it was found.
    pub(crate) fn learn(&mut self, at: WordAt, found: u64) -> Result<(), OpError> {
        match at {
            WordAt::Section(section) => self.set_section(section, SectionWord(found)),
            WordAt::Span(span) => self.set_span(span, SpanWord(found)),
            WordAt::Log(_) | WordAt::Key(_) => Ok(()),
        }
        .map_err(|cause| damaged(at, found, cause))
    }

    /// A word as last seen.
    pub(crate) fn word(&self, at: WordAt) -> u64 {
        match at {
            WordAt::Section(section) => self.section(section).0,
            WordAt::Span(span) => self.span(span).0,
            WordAt::Log(_) | WordAt::Key(_) => 0,
        }
    }

    /// The record in the word that an extent is taken in, as last seen: for [`crate::op::FreeOp::resumed`]. Never 0.
    #[must_use]
    pub fn last_record(&self, grant: Grant) -> u32 {
        match record_of(self.word(word_of(grant))) {
            0 => NO_RECORD,
            record => record,
        }
    }

    /// The spans of a group that were not seen to be ready for a new life, and whose they are, since the section has been as remembered.
    pub(crate) fn unready(&self, section: u32, group: Run) -> u32 {
        let section = section as usize;
        group.mask() & !u32::from(self.ready[section] & self.known[section])
    }

    /// Whether it is known whose a span is.
    pub(crate) fn is_known(&self, span: u32) -> bool {
        self.known[(span / SECTION_SPANS) as usize] & place_of(span) != 0
    }

    /// Whether a span is known to be another tenant's.
    pub(crate) fn is_foreign(&self, span: u32) -> bool {
        self.foreign[(span / SECTION_SPANS) as usize] & place_of(span) != 0
    }

    /// Whether some span of a group is.
    pub(crate) fn has_foreign(&self, section: u32, group: Run) -> bool {
        u32::from(self.foreign[section as usize]) & group.mask() != 0
    }

    /// Remember whose a span is, by its entry in `keys[]`.
    pub(crate) fn learn_owner(&mut self, span: u32, entry: KeyEntry) {
        let (section, place) = ((span / SECTION_SPANS) as usize, place_of(span));
        self.known[section] |= place;
        if entry.is_nobodys() || entry.is_of(self.tenant) {
            self.foreign[section] &= !place;
        } else {
            self.foreign[section] |= place;
        }
    }

    fn forget_owner(&mut self, span: u32) {
        let (section, place) = ((span / SECTION_SPANS) as usize, place_of(span));
        self.known[section] &= !place;
        self.foreign[section] &= !place;
    }

    /// For whom this client takes memory.
    pub(crate) const fn tenant(&self) -> Tenant {
        self.tenant
    }

    /// A key for an extent of this size, that nobody can guess.
    pub(crate) fn fresh_key(&mut self, class: SizeClass) -> Key {
        Key::of_run(class.k(), self.draws.key_bits())
    }

    /// How often a section was found to be other than remembered: what was judged by it before is old.
    pub(crate) const fn surprises(&self) -> u64 {
        self.surprises
    }

    /// The record that the word has now may be written over.
    pub(crate) fn settle(&mut self, at: WordAt) {
        match at {
            WordAt::Section(section) => {
                self.settled_sections[section as usize] = record_of(self.section(section).0);
            }
            WordAt::Span(span) => self.settled_spans[span as usize] = record_of(self.span(span).0),
            WordAt::Log(_) | WordAt::Key(_) => {}
        }
    }

    /// What was to be in the log and bound by now may not be: the connection broke.
    pub(crate) fn unsettle_all(&mut self) {
        self.settled_sections.fill(0);
        self.settled_spans.fill(0);
    }

    /// Whether the record that the word has now may be written over.
    pub(crate) fn is_settled(&self, at: WordAt) -> bool {
        match at {
            WordAt::Section(section) => {
                self.settled_sections[section as usize] == record_of(self.section(section).0)
            }
            WordAt::Span(span) => self.settled_spans[span as usize] == record_of(self.span(span).0),
            WordAt::Log(_) | WordAt::Key(_) => true,
        }
    }

    /// A number that `host` has not used before in an entry of the log (within a million).
    pub(crate) fn nonce(&mut self, host: Host) -> u32 {
        (u32::from(host.0) << 20) | (self.draws.nonce() & 0xf_ffff)
    }

    /// A span's state in its section's word as last seen.
    pub(crate) fn state_of(&self, span: u32) -> SpanState {
        self.section(span / SECTION_SPANS).state(place_in_section(span))
    }

    fn free_of(&self, section: u32) -> u64 {
        let word = self.section(section);
        let first = section as usize * SPANS;
        let empty = word.spans_in(SpanState::Empty).count() as u64;
        let open = word.spans_in(SpanState::Partial).chain(word.spans_in(SpanState::Contended));
        let partly: u64 =
            open.map(|span| u64::from(self.spans[first + usize::from(span)].free_chunks())).sum();
        let free = empty * u64::from(SPAN_CHUNKS) + partly;
        debug_assert!(
            free <= u64::from(SECTION_CHUNKS),
            "a section cannot have more free chunks than chunks"
        );
        free
    }

    /// The section at which a search begins.
    pub(crate) fn start(&self, class: SizeClass) -> u32 {
        self.start[usize::from(!class.is_within_span())]
    }

    /// Begin the next search where this one succeeded.
    pub(crate) fn set_start(&mut self, class: SizeClass, section: u32) {
        self.start[usize::from(!class.is_within_span())] = section;
    }

    /// Begin the next search somewhere else, where other hosts do not.
    pub(crate) fn scatter_start(&mut self, class: SizeClass, host: Host) {
        let place = begin_at(host, u64::from(self.start(class)) + 1);
        self.set_start(class, section_at(place, self.section_count()));
    }

    /// Whether a section has spans whose words decide what it has to give.
    pub(crate) fn has_open_spans(&self, section: u32) -> bool {
        let word = self.section(section);
        word.has(SpanState::Partial) || word.has(SpanState::Contended)
    }
}

/// Where in a node the searches of a host's client begin, in units of 2^-64 of the node: far apart for hosts that are numbered one after another, and for clients of one
/// host that are (the fractions of multiples of the golden ratio, and of the root of two).
#[must_use]
pub fn begin_at(host: Host, client: u64) -> u64 {
    let of_host = u64::from(host.0).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    of_host.wrapping_add(client.wrapping_mul(0x6a09_e667_f3bc_c909))
}

fn section_at(place: u64, sections: u32) -> u32 {
    u32::try_from(((place >> 32) * u64::from(sections)) >> 32).unwrap_or(0)
}

fn place_of(span: u32) -> u16 {
    1 << place_in_section(span)
}

/// The place of a span within its section.
pub(crate) fn place_in_section(span: u32) -> u8 {
    u8::try_from(span % SECTION_SPANS).unwrap_or(0)
}

impl NodeCache {
    /// Remember section words as they were read; a word that cannot be one is left out, and the last such is the error.
    pub(crate) fn learn_sections(
        &mut self,
        first: u32,
        count: u32,
        read: StepResult<'_>,
    ) -> Result<(), OpError> {
        let mut outcome = Ok(());
        for (section, &word) in (first..).zip(read.words_read(count)) {
            if let Err(cause) = self.set_section(section, SectionWord(word)) {
                outcome = Err(OpError::Damaged { at: WordAt::Section(section), word, cause: cause.into() });
            }
        }
        outcome
    }

    /// Remember what a survey of sections read: their spans' words, likewise, and whose they are.
    pub(crate) fn learn_survey(
        &mut self,
        section: u32,
        count: u32,
        read: StepResult<'_>,
    ) -> Result<(), OpError> {
        let (first, count) = (section * SECTION_SPANS, count * SECTION_SPANS);
        let (spans, keys) = read.words_read(2 * count).split_at(count as usize);
        let outcome = self.learn_spans(first, count, StepResult(spans));
        for (span, (word, entry)) in (first..).zip(spans.iter().zip(keys)) {
            // One that is closed and not empty is somebody's to open or to use, who may be about to say whose it is.
            let is_settled = !SpanWord(*word).is_closed() || self.state_of(span) == SpanState::Empty;
            if self.span(span).0 == *word && is_settled {
                self.learn_owner(span, KeyEntry(*entry));
            }
        }
        outcome
    }

    /// Remember span words as they were read, likewise.
    pub(crate) fn learn_spans(
        &mut self,
        first: u32,
        count: u32,
        read: StepResult<'_>,
    ) -> Result<(), OpError> {
        let mut outcome = Ok(());
        for (span, &word) in (first..).zip(read.words_read(count)) {
            if let Err(cause) = self.set_span(span, SpanWord(word)) {
                outcome = Err(OpError::Damaged { at: WordAt::Span(span), word, cause: cause.into() });
            }
        }
        outcome
    }
}
