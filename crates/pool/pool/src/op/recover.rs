//! V: frees all holdings of a dead host on a node. With a narrower scope, lists the holdings of a
//! live host, or frees those that the host has leaked.
//!
//! The dead host must be fenced at the node. Ownership is decided by the words and the full log.
//! Each change is a CAS that expects the word by which ownership was decided, and a section's word
//! is read before those of its spans. After a lost race the section is read again.

mod judge;
mod scope;

use std::ops::Range;

use aquifer_fabric::{Host, Key, KeyEntry};

use super::free::{FreeCommit, FreeProgress, Freed};
use super::hint::Hint;
use super::{
    Action, Mutation, Next, READ_WORDS_MAX, StateMachine, Step, StepResult, WordAt, lose, revocation,
};
use crate::cache::{NodeCache, place_in_section};
use crate::size::{SECTION_CHUNKS, SECTION_SPANS, SPAN_CHUNKS};
use crate::word::{InlineLog, SectionWord, SpanState, SpanWord};
use judge::SpanVerdict;
use scope::RecoveryScope;
pub use scope::{Holding, HoldingsOp};

/// Spans of a section, as an index.
const SPANS: usize = SECTION_SPANS as usize;
/// Chunks of a span, as an index.
const CHUNKS: usize = SPAN_CHUNKS as usize;

/// Counts of the holdings that a recovery freed.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default, Debug)]
pub struct Recovered {
    /// Number of extents.
    pub extents: u64,
    /// Number of chunks of these extents.
    pub chunks: u64,
    /// Number of spans that the host was opening or closing.
    pub spans: u64,
    /// Number of allocated chunks whose owner no record names. Not zero only if the metadata is
    /// damaged.
    pub unowned: u64,
}

/// Frees all holdings of a dead host on a node.
///
/// If the operation is dropped before it is done, another host can recover the same dead host from
/// the beginning.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct RecoverOp {
    host: Host,
    dead: Host,
    scope: RecoveryScope,
    recovered: Recovered,
    /// The next section to recover.
    next: u32,
    /// The end of the sections to recover.
    end: u32,
    /// The end of the sections whose words have been read (V1).
    surveyed: u32,
    /// Whether a section may have holdings, for each of the last sections whose words have been
    /// read, at most [`READ_WORDS_MAX`].
    is_used: Vec<bool>,
    section: u32,
    /// Number of races lost in this section.
    lost: u32,
    /// Number of chunks of this section whose owner no record names.
    unowned: u64,
    /// The place of a span whose word was read again, unchanged, after the log was read.
    confirmed: Option<u8>,
    /// [`NodeCache::conflicts`] when this section's word was read.
    conflicts: u64,
    /// The section's record when its log was read. Frees of this recovery overwrite it.
    record: Option<InlineLog>,
    spans: [u64; SPANS],
    chunk_log: Vec<u64>,
    span_log: Vec<u64>,
    chunk_keys: Vec<u64>,
    /// The section's key entry, 15 unused entries, and those of its spans.
    other_keys: Vec<u64>,
    state: RecoverState,
}

/// The step in progress.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum RecoverState {
    Idle,
    /// V1: reads the words of sections.
    Surveying,
    /// V2: reads the keys of chunks. Keys are read before the words, so an extent whose word is
    /// read later has no other key.
    ReadingChunkKeys,
    /// V2: reads the keys of the section and its spans.
    ReadingSpanKeys,
    /// V2: reads the section's word.
    ProbingSection,
    /// V2: reads the words of the spans.
    ReadingSpans,
    /// V2: reads the spans until two READs are equal. Equal READs are not torn.
    ReadingSpansAgain,
    /// V2: reads the section's word again. If it is unchanged, the words are of one moment.
    ProbingSectionAgain,
    /// V2: reads the log entries of the chunks.
    ReadingChunkLog,
    /// V2: reads the log entries of the spans.
    ReadingSpanLog,
    /// V3: reads a span's word again, because no record names the owner of some chunks.
    ProbingSpan(u8),
    /// V3: revokes the keys of the holding that is freed next.
    Revoking(Freed, Recovered),
    /// V3: frees a holding; the last value is the place of the next span.
    Freeing(FreeCommit, Recovered, u8),
    /// V3: clears a full hint; the second value is the place of the next span.
    Hinting(Hint, u8),
    /// U2: reads the keys of chunks again, because extents without keys were listed.
    ReadingChunkKeysAgain,
    /// U2: reads the keys of the section and its spans again.
    ReadingSpanKeysAgain,
}

impl RecoverOp {
    /// Creates an operation by which a live host frees these leaked holdings, and nothing else. No
    /// operation of the host that concerns them may be in flight.
    #[must_use]
    pub fn only(host: Host, these: impl IntoIterator<Item = Holding>) -> Self {
        Self { scope: RecoveryScope::Only(these.into_iter().collect()), ..Self::new(host, host) }
    }

    /// Creates an operation by which `host` frees all holdings of `dead`.
    #[must_use]
    pub const fn new(host: Host, dead: Host) -> Self {
        Self {
            host,
            dead,
            scope: RecoveryScope::All,
            recovered: Recovered { extents: 0, chunks: 0, spans: 0, unowned: 0 },
            next: 0,
            end: u32::MAX,
            surveyed: 0,
            is_used: Vec::new(),
            section: 0,
            lost: 0,
            unowned: 0,
            confirmed: None,
            conflicts: 0,
            record: None,
            spans: [0; SPANS],
            chunk_log: Vec::new(),
            span_log: Vec::new(),
            chunk_keys: Vec::new(),
            other_keys: Vec::new(),
            state: RecoverState::Idle,
        }
    }

    /// Restricts the operation to these sections.
    #[must_use]
    pub fn within(self, sections: Range<u32>) -> Self {
        Self { next: sections.start, surveyed: sections.start, end: sections.end, ..self }
    }
}

impl StateMachine for RecoverOp {
    type Output = Recovered;

    fn start(&mut self, cache: &mut NodeCache) -> Step<Recovered> {
        self.next_section(cache)
    }

    fn step(&mut self, cache: &mut NodeCache, result: StepResult<'_>) -> Step<Recovered> {
        let next = match std::mem::replace(&mut self.state, RecoverState::Idle) {
            RecoverState::Idle => panic!("no action is in flight"),
            RecoverState::Surveying => Ok(self.surveyed(cache, result.words())),
            RecoverState::ReadingChunkKeys => {
                self.keep_chunk_keys(result.words());
                Ok(self.read_other_keys(RecoverState::ReadingSpanKeys))
            }
            RecoverState::ReadingSpanKeys => {
                self.keep_other_keys(result.words());
                Ok(self.probe_section(cache))
            }
            RecoverState::ReadingChunkKeysAgain => {
                self.keep_chunk_keys(result.words());
                Ok(self.read_other_keys(RecoverState::ReadingSpanKeysAgain))
            }
            RecoverState::ReadingSpanKeysAgain => {
                self.keep_other_keys(result.words());
                self.remove_keyed();
                Ok(self.next_section(cache))
            }
            RecoverState::Revoking(freed, found) => Ok(self.commit(cache, freed, found)),
            RecoverState::ProbingSection => self.section_probed(cache, result.found()),
            RecoverState::ReadingSpans => {
                self.spans.copy_from_slice(result.words());
                Ok(self.read_spans(RecoverState::ReadingSpansAgain))
            }
            RecoverState::ReadingSpansAgain => self.spans_read(cache, result.words()),
            RecoverState::ProbingSectionAgain => self.section_probed_again(cache, result.found()),
            RecoverState::ReadingChunkLog => {
                self.chunk_log.extend_from_slice(result.words());
                Ok(self.read_span_log(cache))
            }
            RecoverState::ReadingSpanLog => {
                self.span_log.extend_from_slice(result.words());
                Ok(self.judge_from(cache, 0))
            }
            RecoverState::ProbingSpan(place) => self.probed(cache, place, result.found()),
            RecoverState::Freeing(commit, found, span) => self.freeing(cache, (commit, found, span), result),
            RecoverState::Hinting(mut hint, span) => Ok(match hint.step(cache, result) {
                Some(action) => self.post(RecoverState::Hinting(hint, span), action),
                None => self.judge_from(cache, span),
            }),
        };
        next.unwrap_or_else(|error| Step::Done(Err(error)))
    }
}

impl RecoverOp {
    fn post(&mut self, state: RecoverState, action: Action) -> Step<Recovered> {
        self.state = state;
        Step::Post(action)
    }

    /// Begins the next section that may have holdings. Words of the dead host do not change, so a
    /// READ of them is not torn.
    fn next_section(&mut self, cache: &NodeCache) -> Step<Recovered> {
        let end = self.end.min(cache.section_count());
        while self.next < self.surveyed {
            let first = self.surveyed - u32::try_from(self.is_used.len()).unwrap_or(0);
            let section = self.next;
            self.next += 1;
            if self.is_used[(section - first) as usize] {
                self.section = section;
                self.lost = 0;
                return self.begin_section();
            }
        }
        if self.surveyed >= end {
            return Step::Done(Ok(self.recovered));
        }
        let count = READ_WORDS_MAX.min(end - self.surveyed);
        self.post(RecoverState::Surveying, Action::read(WordAt::Section(self.surveyed), count))
    }

    fn surveyed(&mut self, cache: &NodeCache, words: &[u64]) -> Step<Recovered> {
        let may_hold = |word: SectionWord| {
            // If the dead host has holdings, even a torn READ shows neither of these.
            let is_offline = word.is_offline() && self.dead != Host::NODE;
            word.bits() != 0 && !is_offline
        };
        self.is_used = words.iter().map(|word| may_hold(SectionWord(*word))).collect();
        self.surveyed += u32::try_from(words.len()).unwrap_or(0);
        self.next_section(cache)
    }

    /// V2: the keys first, then the section, its spans, and the log.
    fn begin_section(&mut self) -> Step<Recovered> {
        self.unowned = 0;
        self.confirmed = None;
        self.scope.begin_section(self.section);
        self.read_chunk_keys(RecoverState::ReadingChunkKeys)
    }

    fn read_chunk_keys(&mut self, state: RecoverState) -> Step<Recovered> {
        let at = WordAt::chunk_key(self.section * SECTION_CHUNKS);
        self.post(state, Action::read(at, SECTION_CHUNKS))
    }

    fn keep_chunk_keys(&mut self, entries: &[u64]) {
        self.chunk_keys.clear();
        self.chunk_keys.extend_from_slice(entries);
    }

    fn read_other_keys(&mut self, state: RecoverState) -> Step<Recovered> {
        let at = WordAt::section_key(self.section);
        self.post(state, Action::read(at, 2 * SECTION_SPANS))
    }

    fn keep_other_keys(&mut self, entries: &[u64]) {
        self.other_keys.clear();
        self.other_keys.extend_from_slice(entries);
    }

    /// Removes listed extents that now have a key. Keys are written before log entries, so an
    /// extent without a key had no new log entry either when the log was read. An extent with a key
    /// is being allocated by a live client.
    fn remove_keyed(&mut self) {
        let mut scope = std::mem::take(&mut self.scope);
        scope.remove_keyed(self.section, |grant| self.key_of(grant) != Key(0));
        self.scope = scope;
    }

    fn probe_section(&mut self, cache: &NodeCache) -> Step<Recovered> {
        self.conflicts = cache.conflicts();
        if Mutation::SectionLast.is_active() {
            return self.read_spans(RecoverState::ReadingSpans);
        }
        self.post(RecoverState::ProbingSection, Action::probe(WordAt::Section(self.section)))
    }

    fn section_probed(&mut self, cache: &mut NodeCache, found: u64) -> Next<Recovered> {
        cache.learn(WordAt::Section(self.section), found)?;
        self.conflicts = cache.conflicts();
        self.record = SectionWord(found).log().ok().flatten();
        if Mutation::SectionLast.is_active() {
            return Ok(self.read_chunk_log(cache));
        }
        if SectionWord(found).bits() == 0 {
            return Ok(self.next_section(cache));
        }
        Ok(self.read_spans(RecoverState::ReadingSpans))
    }

    fn read_spans(&mut self, state: RecoverState) -> Step<Recovered> {
        let at = WordAt::Span(self.section * SECTION_SPANS);
        self.post(state, Action::read(at, SECTION_SPANS))
    }

    fn spans_read(&mut self, cache: &mut NodeCache, words: &[u64]) -> Next<Recovered> {
        if words != self.spans {
            lose(&mut self.lost)?;
            self.spans.copy_from_slice(words);
            return Ok(self.read_spans(RecoverState::ReadingSpansAgain));
        }
        for (span, word) in (self.section * SECTION_SPANS..).zip(words) {
            cache.learn(WordAt::Span(span), *word)?;
        }
        let at = WordAt::Section(self.section);
        let is_last = Mutation::SectionLast.is_active();
        let state = if is_last { RecoverState::ProbingSection } else { RecoverState::ProbingSectionAgain };
        Ok(self.post(state, Action::probe(at)))
    }

    fn section_probed_again(&mut self, cache: &mut NodeCache, found: u64) -> Next<Recovered> {
        if found != cache.section(self.section).0 {
            lose(&mut self.lost)?;
            return Ok(self.begin_section());
        }
        Ok(self.read_chunk_log(cache))
    }

    fn read_chunk_log(&mut self, cache: &NodeCache) -> Step<Recovered> {
        self.chunk_log.clear();
        self.span_log.clear();
        if self.words().iter().all(|word| word.is_closed()) {
            return self.read_span_log(cache);
        }
        let at = WordAt::chunk_entry(self.section * SECTION_CHUNKS);
        self.post(RecoverState::ReadingChunkLog, Action::read(at, SECTION_CHUNKS))
    }

    fn read_span_log(&mut self, cache: &NodeCache) -> Step<Recovered> {
        let section = cache.section(self.section);
        let is_owned =
            |(place, word): (u8, &SpanWord)| word.is_closed() && section.state(place) != SpanState::Empty;
        if !(0..).zip(self.words().iter()).any(is_owned) {
            return self.judge_from(cache, 0);
        }
        let at = WordAt::span_entry(self.section * SECTION_SPANS);
        self.post(RecoverState::ReadingSpanLog, Action::read(at, SECTION_SPANS))
    }

    fn words(&self) -> [SpanWord; SPANS] {
        self.spans.map(SpanWord)
    }

    /// V3: frees the dead host's holdings, from the span at this place on.
    fn judge_from(&mut self, cache: &NodeCache, mut place: u8) -> Step<Recovered> {
        if self.conflicts != cache.conflicts() && !Mutation::SectionLast.is_active() {
            // Another client has changed the section since its spans were read.
            return self.begin_section();
        }
        while u32::from(place) < SECTION_SPANS {
            match self.judge(cache, place) {
                SpanVerdict::Pass(next) => place = next,
                SpanVerdict::Free(freed, found) => return self.free(cache, freed, found),
                SpanVerdict::Unclear => {
                    let at = WordAt::Span(self.section * SECTION_SPANS + u32::from(place));
                    return self.post(RecoverState::ProbingSpan(place), Action::probe(at));
                }
                SpanVerdict::ClearFullHint if !self.scope.is_freeing() => place += 1,
                SpanVerdict::ClearFullHint => {
                    let span = self.section * SECTION_SPANS + u32::from(place);
                    place += 1;
                    // Rule H: the section's word was read before the span was seen open.
                    if let Some((hint, action)) = Hint::clear_full(span, false, cache) {
                        return self.post(RecoverState::Hinting(hint, place), action);
                    }
                }
            }
        }
        self.recovered.unowned += self.unowned;
        if self.scope.has_listed_unkeyed(self.section) {
            return self.read_chunk_keys(RecoverState::ReadingChunkKeysAgain);
        }
        self.next_section(cache)
    }

    /// Revokes the keys of a holding, then frees it. The CASes expect the keys that were read
    /// before the words, so the key of a later owner is not revoked.
    fn free(&mut self, cache: &NodeCache, freed: Freed, found: Recovered) -> Step<Recovered> {
        let action =
            if Mutation::SkipRevoke.is_active() { Action::default() } else { self.revocations(freed) };
        if action.is_empty() {
            return self.commit(cache, freed, found);
        }
        self.post(RecoverState::Revoking(freed, found), action)
    }

    fn revocations(&self, freed: Freed) -> Action {
        let first = self.section * SECTION_SPANS;
        let keyed = |at, entry: u64| match KeyEntry(entry).key() {
            Key(0) => Action::default(),
            _ => revocation(at, entry),
        };
        match freed {
            Freed::Span { .. } => Action::default(),
            Freed::Whole { section, group } if u32::from(group.len()) == SECTION_SPANS => {
                keyed(WordAt::section_key(section), self.other_keys[0])
            }
            Freed::Whole { group, .. } => {
                let place = usize::from(group.first());
                keyed(WordAt::span_key(first + u32::from(group.first())), self.other_keys[SPANS + place])
            }
            Freed::Chunks { span, mask, .. } => {
                let entries = &self.chunk_keys[(span - first) as usize * CHUNKS..][..CHUNKS];
                let chunks = (span * SPAN_CHUNKS..).zip(entries).enumerate();
                let freed = chunks.filter(|(place, _)| mask >> place & 1 == 1);
                freed.fold(Action::default(), |action, (_, (chunk, entry))| {
                    action.then(keyed(WordAt::chunk_key(chunk), *entry))
                })
            }
        }
    }

    fn commit(&mut self, cache: &NodeCache, freed: Freed, found: Recovered) -> Step<Recovered> {
        let (commit, action) = FreeCommit::begin(self.host, freed, self.lost, cache);
        let next = match freed {
            Freed::Whole { group, .. } => group.first() + group.len(),
            Freed::Chunks { span, .. } | Freed::Span { span } => place_in_section(span) + 1,
        };
        self.post(RecoverState::Freeing(commit, found, next), action)
    }

    fn probed(&mut self, cache: &mut NodeCache, place: u8, found: u64) -> Next<Recovered> {
        if found != self.spans[usize::from(place)] {
            lose(&mut self.lost)?;
            return Ok(self.begin_section());
        }
        self.confirmed = Some(place);
        Ok(self.judge_from(cache, place))
    }

    fn freeing(
        &mut self,
        cache: &mut NodeCache,
        (mut commit, found, next): (FreeCommit, Recovered, u8),
        result: StepResult<'_>,
    ) -> Next<Recovered> {
        match commit.step(cache, result)? {
            FreeProgress::Post(action) => Ok(self.post(RecoverState::Freeing(commit, found, next), action)),
            FreeProgress::Done => {
                self.recovered.add(found);
                Ok(self.judge_from(cache, next))
            }
            FreeProgress::Overtaken => {
                lose(&mut self.lost)?;
                if Mutation::RecoverBlind.is_active() {
                    let (commit, action) = FreeCommit::begin(self.host, commit.freed(), self.lost, cache);
                    return Ok(self.post(RecoverState::Freeing(commit, found, next), action));
                }
                Ok(self.begin_section())
            }
        }
    }
}

impl Recovered {
    /// Adds the counts of another recovery.
    pub const fn add(&mut self, other: Self) {
        self.extents += other.extents;
        self.chunks += other.chunks;
        self.spans += other.spans;
        self.unowned += other.unowned;
    }
}
