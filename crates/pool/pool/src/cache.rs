//! A client's cache of a node's control words.
//!
//! Cached words may be out of date at any moment. Every use of them ends in a CAS that fails if
//! they are.

mod find;
mod random;

use aquifer_fabric::{Host, Key, KeyEntry, Tenant};

use crate::layout::Layout;
use crate::op::{Grant, OpError, StepResult, WordAt, damaged, word_of};
use crate::size::{SECTION_CHUNKS, SECTION_SPANS, SPAN_CHUNKS, SizeClass};
use crate::word::{AlignedRun, IllegalWord, SectionWord, SpanState, SpanWord, record_of};
pub use random::{NumberFns, NumberSource};

/// Spans of a section, as an index.
const SPANS: usize = SECTION_SPANS as usize;

/// A value that no record has: the record is unknown.
pub(crate) const NO_RECORD: u32 = u32::MAX;

/// The cached words of one node, and the state that is derived from them.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct NodeCache {
    sections: Vec<SectionWord>,
    spans: Vec<SpanWord>,
    /// The spans that were seen ready (A0), a bit for each span of a section, since the section had
    /// its cached word.
    ready: Vec<u16>,
    /// The record of each word that may be overwritten, because it is in the full log or is not
    /// needed any more. 0 if there is none.
    saved_section_records: Vec<u32>,
    saved_span_records: Vec<u32>,
    /// The spans, a bit for each span of a section, that this client has filled without setting its
    /// full hint. Cleared when another client has changed the section's word.
    unhinted_full: Vec<u16>,
    /// The spans whose owner is known, a bit for each span of a section. For an open span this
    /// holds as long as the span's word is as cached, otherwise as long as the section's word is.
    owner_known: Vec<u16>,
    /// The spans whose owner is another tenant, a bit for each span of a section.
    foreign: Vec<u16>,
    tenant: Tenant,
    numbers: NumberSource,
    /// Number of times that a section's word was found to differ from the cached one.
    conflicts: u64,
    free_chunks: u64,
    offline_sections: u32,
    /// The sections at which searches begin: for extents within a span, and for larger ones.
    first_sections: [u32; 2],
}

/// Memory that is free by the cached words.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Candidate {
    /// A run of an open span.
    Chunks { span: u32, run: AlignedRun },
    /// An empty span, to be opened.
    Empty { span: u32 },
    /// A group of empty spans, to be allocated whole.
    Whole { group: AlignedRun },
}

impl NodeCache {
    /// Creates a cache in which all words are zero, for a client of `tenant`. Searches begin at
    /// `start`, a result of [`search_start`].
    #[must_use]
    pub fn new(layout: &Layout, start: u64, tenant: Tenant, numbers: NumberSource) -> Self {
        let first_section = section_at(start, layout.sections());
        Self {
            sections: vec![SectionWord::default(); layout.sections() as usize],
            spans: vec![SpanWord::default(); layout.spans() as usize],
            ready: vec![0; layout.sections() as usize],
            saved_section_records: vec![0; layout.sections() as usize],
            saved_span_records: vec![0; layout.spans() as usize],
            unhinted_full: vec![0; layout.sections() as usize],
            owner_known: vec![0; layout.sections() as usize],
            foreign: vec![0; layout.sections() as usize],
            tenant,
            numbers,
            conflicts: 0,
            free_chunks: u64::from(layout.chunks()),
            offline_sections: 0,
            first_sections: [first_section; 2],
        }
    }

    /// A copy of the cache for another client, with its own numbers.
    #[must_use]
    pub fn with_numbers(self, numbers: NumberSource) -> Self {
        Self { numbers, ..self }
    }

    /// The number of sections, offline ones included.
    pub(crate) fn section_count(&self) -> u32 {
        u32::try_from(self.sections.len()).unwrap_or(u32::MAX)
    }

    /// Free chunks by the cached words, without those of spans that are being opened or closed.
    pub(crate) const fn free_chunks(&self) -> u64 {
        self.free_chunks
    }

    /// Chunks that the node lends by the cached words.
    pub(crate) fn lent_chunks(&self) -> u64 {
        u64::from(self.section_count() - self.offline_sections) * u64::from(SECTION_CHUNKS)
    }

    /// The cached word of a section.
    pub(crate) fn section(&self, section: u32) -> SectionWord {
        self.sections[section as usize]
    }

    /// The cached word of a span.
    pub(crate) fn span(&self, span: u32) -> SpanWord {
        self.spans[span as usize]
    }

    /// Caches a section's word as found.
    pub(crate) fn set_section(&mut self, section: u32, word: SectionWord) -> Result<(), IllegalWord> {
        word.check()?;
        if word != self.section(section) {
            // Another client has changed the word, so the state of its spans may be out of date.
            self.ready[section as usize] = 0;
            self.unhinted_full[section as usize] = 0;
            let first = section * SECTION_SPANS;
            for span in first..first + SECTION_SPANS {
                // The owner of an open span is known as long as the span's own word is.
                let is_empty = word.state(place_in_section(span)) == SpanState::Empty;
                if is_empty || self.span(span).is_closed() {
                    self.forget_owner(span);
                }
            }
            self.conflicts += 1;
            self.put_section(section, word);
        }
        Ok(())
    }

    /// Caches a section's word after a CAS of this client that expected the cached word.
    pub(crate) fn change_section(&mut self, section: u32, word: SectionWord) -> Result<(), IllegalWord> {
        word.check()?;
        let index = section as usize;
        let before = record_of(self.section(section).0);
        if self.saved_section_records[index] == before && word.has_record_of(self.section(section)) {
            self.saved_section_records[index] = record_of(word.0);
        }
        self.put_section(section, word);
        self.ready[index] &= word.empty_spans();
        Ok(())
    }

    fn put_section(&mut self, section: u32, word: SectionWord) {
        let before = self.free_of(section);
        let was_offline = self.section(section).is_offline();
        self.offline_sections = self.offline_sections + u32::from(word.is_offline()) - u32::from(was_offline);
        self.sections[section as usize] = word;
        self.free_chunks = self.free_chunks + self.free_of(section) - before;
    }

    /// Caches a span's word as found.
    pub(crate) fn set_span(&mut self, span: u32, word: SpanWord) -> Result<(), IllegalWord> {
        if word != self.span(span) {
            self.forget_owner(span);
        }
        self.change_span(span, word)
    }

    /// Caches a span's word after a CAS of this client that expected the cached word.
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
            self.unhinted_full[section] &= !place;
        }
        let ready = &mut self.ready[section];
        *ready = if word.is_ready() { *ready | place } else { *ready & !place };
        Ok(())
    }

    /// Records a span that is full and has no full hint, after a change by this client.
    pub(crate) fn mark_if_full(&mut self, span: u32) {
        if self.span(span).is_full() && self.state_of(span) != SpanState::Full {
            self.unhinted_full[(span / SECTION_SPANS) as usize] |= place_of(span);
        }
    }

    /// Removes and returns a span of the section that this client has filled without setting its
    /// full hint. No other client has changed the section's word since the span was seen full.
    pub(crate) fn pop_unhinted_full(&mut self, section: u32) -> Option<u32> {
        let full = &mut self.unhinted_full[section as usize];
        let place = full.trailing_zeros();
        *full &= full.wrapping_sub(1);
        (place < SECTION_SPANS).then_some(section * SECTION_SPANS + place)
    }

    /// A span of the section that a survey has found full, and whose full hint is not set.
    pub(crate) fn find_unhinted_full(&self, section: u32, survey: StepResult<'_>) -> Option<u32> {
        let found = survey.words_read(2 * SECTION_SPANS);
        let spans = self.section(section).spans_in(SpanState::Partial);
        let mut full = spans.filter(|place| SpanWord(found[usize::from(*place)]).is_full());
        full.next().map(|place| section * SECTION_SPANS + u32::from(place))
    }

    /// Caches a word as found.
    pub(crate) fn learn(&mut self, at: WordAt, found: u64) -> Result<(), OpError> {
        match at {
            WordAt::Section(section) => self.set_section(section, SectionWord(found)),
            WordAt::Span(span) => self.set_span(span, SpanWord(found)),
            WordAt::Log(_) | WordAt::Key(_) => Ok(()),
        }
        .map_err(|cause| damaged(at, found, cause))
    }

    /// A cached word; 0 for words that are not cached.
    pub(crate) fn word(&self, at: WordAt) -> u64 {
        match at {
            WordAt::Section(section) => self.section(section).0,
            WordAt::Span(span) => self.span(span).0,
            WordAt::Log(_) | WordAt::Key(_) => 0,
        }
    }

    /// The record in the cached control word of an extent, for [`crate::op::FreeOp::resumed`].
    /// Never 0.
    #[must_use]
    pub fn last_record(&self, grant: Grant) -> u32 {
        match record_of(self.word(word_of(grant))) {
            0 => NO_RECORD,
            record => record,
        }
    }

    /// The spans of a group, a bit for each, that A0 has yet to check: since the section had its
    /// cached word, they were not seen ready, or their owner is not known.
    pub(crate) fn not_ready(&self, section: u32, group: AlignedRun) -> u32 {
        let section = section as usize;
        group.mask() & !u32::from(self.ready[section] & self.owner_known[section])
    }

    /// Whether the owner of a span is known.
    pub(crate) fn is_owner_known(&self, span: u32) -> bool {
        self.owner_known[(span / SECTION_SPANS) as usize] & place_of(span) != 0
    }

    /// Whether the owner of a span is known to be another tenant.
    pub(crate) fn is_foreign(&self, span: u32) -> bool {
        self.foreign[(span / SECTION_SPANS) as usize] & place_of(span) != 0
    }

    /// Whether the owner of some span of a group is known to be another tenant.
    pub(crate) fn has_foreign(&self, section: u32, group: AlignedRun) -> bool {
        u32::from(self.foreign[section as usize]) & group.mask() != 0
    }

    /// Caches the owner of a span, by its entry in `keys[]`.
    pub(crate) fn learn_owner(&mut self, span: u32, entry: KeyEntry) {
        let (section, place) = ((span / SECTION_SPANS) as usize, place_of(span));
        self.owner_known[section] |= place;
        if entry.is_unowned() || entry.is_owned_by(self.tenant) {
            self.foreign[section] &= !place;
        } else {
            self.foreign[section] |= place;
        }
    }

    fn forget_owner(&mut self, span: u32) {
        let (section, place) = ((span / SECTION_SPANS) as usize, place_of(span));
        self.owner_known[section] &= !place;
        self.foreign[section] &= !place;
    }

    /// The tenant for which this client allocates.
    pub(crate) const fn tenant(&self) -> Tenant {
        self.tenant
    }

    /// Creates a random key for an extent of this size.
    pub(crate) fn fresh_key(&mut self, class: SizeClass) -> Key {
        Key::of_run(class.k(), self.numbers.key_bits())
    }

    /// Number of times that a section's word was found to differ from the cached one. If the number
    /// has changed, earlier decisions by a section's word may be out of date.
    pub(crate) const fn conflicts(&self) -> u64 {
        self.conflicts
    }

    /// Marks the record in the cached word as one that may be overwritten: it is in the full log,
    /// or it is not needed any more.
    pub(crate) fn mark_saved(&mut self, at: WordAt) {
        match at {
            WordAt::Section(section) => {
                self.saved_section_records[section as usize] = record_of(self.section(section).0);
            }
            WordAt::Span(span) => self.saved_span_records[span as usize] = record_of(self.span(span).0),
            WordAt::Log(_) | WordAt::Key(_) => {}
        }
    }

    /// Forgets which records may be overwritten, because a connection broke and WRITEs may be lost.
    pub(crate) fn forget_saved_records(&mut self) {
        self.saved_section_records.fill(0);
        self.saved_span_records.fill(0);
    }

    /// Whether the record in the cached word may be overwritten.
    pub(crate) fn is_saved(&self, at: WordAt) -> bool {
        match at {
            WordAt::Section(section) => {
                self.saved_section_records[section as usize] == record_of(self.section(section).0)
            }
            WordAt::Span(span) => self.saved_span_records[span as usize] == record_of(self.span(span).0),
            WordAt::Log(_) | WordAt::Key(_) => true,
        }
    }

    /// A number for a log entry that `host` has not used within its last million entries.
    pub(crate) fn nonce(&mut self, host: Host) -> u32 {
        Self::nonce_of(host, self.numbers.nonce())
    }

    /// The number in a log entry: the host in the high 12 bits, a count in the low 20.
    pub(crate) const fn nonce_of(host: Host, count: u32) -> u32 {
        ((host.0 as u32) << 20) | (count & 0xf_ffff)
    }

    /// The state of a span in the cached word of its section.
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
    pub(crate) fn first_section(&self, class: SizeClass) -> u32 {
        self.first_sections[usize::from(!class.is_within_span())]
    }

    /// Sets the section at which the next search begins.
    pub(crate) fn set_first_section(&mut self, class: SizeClass, section: u32) {
        self.first_sections[usize::from(!class.is_within_span())] = section;
    }

    /// Sets another section for the next search, at which other hosts do not begin.
    pub(crate) fn scatter_first_section(&mut self, class: SizeClass, host: Host) {
        let start = search_start(host, u64::from(self.first_section(class)) + 1);
        self.set_first_section(class, section_at(start, self.section_count()));
    }

    /// Whether a section has open spans, whose words have free chunks.
    pub(crate) fn has_open_spans(&self, section: u32) -> bool {
        let word = self.section(section);
        word.has(SpanState::Partial) || word.has(SpanState::Contended)
    }
}

/// The place in a node at which the searches of a client begin, in units of 2^-64 of the node.
///
/// Hosts with consecutive numbers begin far apart, and so do clients of one host. The results are
/// the fractional parts of multiples of the golden ratio (hosts) and of the square root of 2
/// (clients).
#[must_use]
pub fn search_start(host: Host, client: u64) -> u64 {
    let of_host = u64::from(host.0).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    of_host.wrapping_add(client.wrapping_mul(0x6a09_e667_f3bc_c909))
}

/// The section at a search start, in units of 2^-64 of the node.
fn section_at(start: u64, sections: u32) -> u32 {
    u32::try_from(((start >> 32) * u64::from(sections)) >> 32).unwrap_or(0)
}

/// The bit of a span among those of its section.
fn place_of(span: u32) -> u16 {
    1 << place_in_section(span)
}

/// The place of a span within its section.
pub(crate) fn place_in_section(span: u32) -> u8 {
    u8::try_from(span % SECTION_SPANS).unwrap_or(0)
}

impl NodeCache {
    /// Caches the words of sections as they were read.
    ///
    /// # Errors
    /// The last illegal word. Illegal words are not cached; a READ may have torn them.
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

    /// Caches what a survey of sections read: the words and the owners of their spans.
    ///
    /// # Errors
    /// The last illegal word. Illegal words are not cached; a READ may have torn them.
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
            // A closed span that is not empty has a host that may be about to write its owner.
            let is_owner_final = !SpanWord(*word).is_closed() || self.state_of(span) == SpanState::Empty;
            if self.span(span).0 == *word && is_owner_final {
                self.learn_owner(span, KeyEntry(*entry));
            }
        }
        outcome
    }

    /// Caches the words of spans as they were read.
    ///
    /// # Errors
    /// The last illegal word. Illegal words are not cached; a READ may have torn them.
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
