//! What a live host does for a dead one: find all that it held, by the words and the full log, and give it back. What it has itself is found in the same
//! way, and what nobody there knows of is given back.
//!
//! The dead host must be fenced at the node. Each change is a CAS on the word by which it was judged, and a section's word was read
//! before those of its spans; what is lost to a race is judged anew.

mod judge;
mod quest;

use std::ops::Range;

use aquifer_fabric::{Host, Key, KeyEntry};

use super::free::{FreeCommit, FreeProgress, Freed};
use super::hint::Hint;
use super::{Action, Machine, Mutation, OpError, READ_WORDS_MAX, Step, StepResult, WordAt, lose, revocation};
use crate::cache::{NodeCache, place_in_section};
use crate::size::{SECTION_CHUNKS, SECTION_SPANS, SPAN_CHUNKS};
use crate::word::{InlineLog, SectionWord, SpanState, SpanWord};
use judge::Verdict;
use quest::Quest;
pub use quest::{Held, HeldOp};

const SPANS: usize = SECTION_SPANS as usize;
const CHUNKS: usize = SPAN_CHUNKS as usize;

/// What was found of a dead host.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default, Debug)]
pub struct Recovered {
    /// Extents that it held.
    pub extents: u64,
    /// Their chunks.
    pub chunks: u64,
    /// Spans that it was about to open, or to close.
    pub spans: u64,
    /// Chunks of which nothing tells whose they are. There are none unless the metadata is damaged.
    pub unknown: u64,
}

/// Gives back all that a dead host held of a node. If it is dropped before it is done another takes it up from the beginning.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct RecoverOp {
    host: Host,
    dead: Host,
    quest: Quest,
    recovered: Recovered,
    /// The sections from here on are not looked at yet.
    next: u32,
    /// Those from here on need not be.
    end: u32,
    /// Those before this one were, as far as to see that something is in them.
    seen: u32,
    /// A bit for each of the last [`READ_WORDS_MAX`] that were seen and have something in them.
    used: Vec<bool>,
    section: u32,
    lost: u32,
    /// Of this section.
    unknown: u64,
    /// Its word was still the same after the log was read.
    certain: Option<u8>,
    /// How often the client had been surprised by a section when this one was looked at.
    surprises: u64,
    /// The section's record when its log was read; what we do writes over it.
    record: Option<InlineLog>,
    spans: [u64; SPANS],
    chunk_log: Vec<u64>,
    span_log: Vec<u64>,
    chunk_keys: Vec<u64>,
    /// The section's own, 15 that are unused, and its spans'.
    other_keys: Vec<u64>,
    state: State,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum State {
    Idle,
    /// V1: which sections have something in them?
    Surveying,
    /// V2: the keys first: what is the dead host's when its word is looked at after that, has no other.
    ReadingChunkKeys,
    ReadingSpanKeys,
    /// V2.
    ProbingSection,
    ReadingSpans,
    /// Extents without keys were told of: have they none yet?
    ReadingChunkKeysAgain,
    ReadingSpanKeysAgain,
    /// The same again: what was read twice was not torn.
    ReadingSpansAgain,
    /// And the section again: it and its spans were so at one time.
    ProbingSectionAgain,
    ReadingChunkLog,
    ReadingSpanLog,
    /// Is a span still as it was when its log was read?
    ProbingSpan(u8),
    /// V3: its keys are revoked.
    Revoking(Freed, Recovered),
    /// V3, what it frees, and the span that is next.
    Freeing(FreeCommit, Recovered, u8),
    Hinting(Hint, u8),
}

type Next = Result<Step<Recovered>, OpError>;

impl RecoverOp {
    /// One by which a host gives back these things that it has, and nothing else. None of its own operations may be on its way to one of them.
    #[must_use]
    pub fn only(host: Host, these: impl IntoIterator<Item = Held>) -> Self {
        Self { quest: Quest::Only(these.into_iter().collect()), ..Self::new(host, host) }
    }

    /// An operation by which `host` gives back what `dead` held.
    #[must_use]
    pub const fn new(host: Host, dead: Host) -> Self {
        Self {
            host,
            dead,
            quest: Quest::All,
            recovered: Recovered { extents: 0, chunks: 0, spans: 0, unknown: 0 },
            next: 0,
            end: u32::MAX,
            seen: 0,
            used: Vec::new(),
            section: 0,
            lost: 0,
            unknown: 0,
            certain: None,
            surprises: 0,
            record: None,
            spans: [0; SPANS],
            chunk_log: Vec::new(),
            span_log: Vec::new(),
            chunk_keys: Vec::new(),
            other_keys: Vec::new(),
            state: State::Idle,
        }
    }

    /// The same, of these sections only.
    #[must_use]
    pub fn within(self, sections: Range<u32>) -> Self {
        Self { next: sections.start, seen: sections.start, end: sections.end, ..self }
    }
}

impl Machine for RecoverOp {
    type Output = Recovered;

    fn start(&mut self, cache: &mut NodeCache) -> Step<Recovered> {
        self.go_on(cache)
    }

    fn step(&mut self, cache: &mut NodeCache, result: StepResult<'_>) -> Step<Recovered> {
        let next = match std::mem::replace(&mut self.state, State::Idle) {
            State::Idle => panic!("no action is under way"),
            State::Surveying => Ok(self.surveyed(cache, result.words())),
            State::ReadingChunkKeys => {
                self.keep_chunk_keys(result.words());
                Ok(self.read_other_keys(State::ReadingSpanKeys))
            }
            State::ReadingSpanKeys => {
                self.keep_other_keys(result.words());
                Ok(self.look_at_section(cache))
            }
            State::ReadingChunkKeysAgain => {
                self.keep_chunk_keys(result.words());
                Ok(self.read_other_keys(State::ReadingSpanKeysAgain))
            }
            State::ReadingSpanKeysAgain => {
                self.keep_other_keys(result.words());
                self.forget_keyed();
                Ok(self.go_on(cache))
            }
            State::Revoking(freed, found) => Ok(self.commit(cache, freed, found)),
            State::ProbingSection => self.section_found(cache, result.found()),
            State::ReadingSpans => {
                self.spans.copy_from_slice(result.words());
                Ok(self.read_spans(State::ReadingSpansAgain))
            }
            State::ReadingSpansAgain => self.spans_read(cache, result.words()),
            State::ProbingSectionAgain => self.section_found_again(cache, result.found()),
            State::ReadingChunkLog => {
                self.chunk_log.extend_from_slice(result.words());
                Ok(self.read_span_log(cache))
            }
            State::ReadingSpanLog => {
                self.span_log.extend_from_slice(result.words());
                Ok(self.judge_from(cache, 0))
            }
            State::ProbingSpan(place) => self.probed(cache, place, result.found()),
            State::Freeing(commit, found, span) => self.freeing(cache, (commit, found, span), result),
            State::Hinting(mut hint, span) => Ok(match hint.step(cache, result) {
                Some(action) => self.post(State::Hinting(hint, span), action),
                None => self.judge_from(cache, span),
            }),
        };
        next.unwrap_or_else(|error| Step::Done(Err(error)))
    }
}

impl RecoverOp {
    fn post(&mut self, state: State, action: Action) -> Step<Recovered> {
        self.state = state;
        Step::Post(action)
    }

    /// The next section that has something in it. What the dead host held stands still, so that no torn READ hides it.
    fn go_on(&mut self, cache: &NodeCache) -> Step<Recovered> {
        let end = self.end.min(cache.section_count());
        while self.next < self.seen {
            let first = self.seen - u32::try_from(self.used.len()).unwrap_or(0);
            let section = self.next;
            self.next += 1;
            if self.used[(section - first) as usize] {
                self.section = section;
                self.lost = 0;
                return self.begin_section();
            }
        }
        if self.seen >= end {
            return Step::Done(Ok(self.recovered));
        }
        let many = READ_WORDS_MAX.min(end - self.seen);
        self.post(State::Surveying, Action::read(WordAt::Section(self.seen), many))
    }

    fn surveyed(&mut self, cache: &NodeCache, words: &[u64]) -> Step<Recovered> {
        self.used.clear();
        // Where the dead host has something the word is another, whatever a READ makes of it.
        let is_withheld = |word: SectionWord| word.is_withheld() && self.dead != Host::NODE;
        self.used.extend(
            words.iter().map(|word| SectionWord(*word)).map(|word| word.bits() != 0 && !is_withheld(word)),
        );
        self.seen += u32::try_from(words.len()).unwrap_or(0);
        self.go_on(cache)
    }

    /// V2: the section first, then its spans, then the log.
    fn begin_section(&mut self) -> Step<Recovered> {
        self.unknown = 0;
        self.certain = None;
        self.quest.begin_section(self.section);
        self.read_chunk_keys(State::ReadingChunkKeys)
    }

    fn read_chunk_keys(&mut self, state: State) -> Step<Recovered> {
        let at = WordAt::chunk_key(self.section * SECTION_CHUNKS);
        self.post(state, Action::read(at, SECTION_CHUNKS))
    }

    fn keep_chunk_keys(&mut self, entries: &[u64]) {
        self.chunk_keys.clear();
        self.chunk_keys.extend_from_slice(entries);
    }

    fn read_other_keys(&mut self, state: State) -> Step<Recovered> {
        let at = WordAt::section_key(self.section);
        self.post(state, Action::read(at, 2 * SECTION_SPANS))
    }

    fn keep_other_keys(&mut self, entries: &[u64]) {
        self.other_keys.clear();
        self.other_keys.extend_from_slice(entries);
    }

    /// Keys are written before the log. So what has no key now had not got its entry either when the log was read; what has one is being taken by somebody who
    /// lives.
    fn forget_keyed(&mut self) {
        let mut quest = std::mem::take(&mut self.quest);
        quest.forget_unkeyed(self.section, |grant| self.key_of(grant) != Key(0));
        self.quest = quest;
    }

    fn look_at_section(&mut self, cache: &NodeCache) -> Step<Recovered> {
        self.surprises = cache.surprises();
        if Mutation::SectionLast.is_active() {
            return self.read_spans(State::ReadingSpans);
        }
        self.post(State::ProbingSection, Action::probe(WordAt::Section(self.section)))
    }

    fn section_found(&mut self, cache: &mut NodeCache, found: u64) -> Next {
        cache.learn(WordAt::Section(self.section), found)?;
        self.surprises = cache.surprises();
        self.record = SectionWord(found).log().ok().flatten();
        if Mutation::SectionLast.is_active() {
            return Ok(self.read_chunk_log(cache));
        }
        if SectionWord(found).bits() == 0 {
            return Ok(self.go_on(cache));
        }
        Ok(self.read_spans(State::ReadingSpans))
    }

    fn read_spans(&mut self, state: State) -> Step<Recovered> {
        let at = WordAt::Span(self.section * SECTION_SPANS);
        self.post(state, Action::read(at, SECTION_SPANS))
    }

    fn spans_read(&mut self, cache: &mut NodeCache, words: &[u64]) -> Next {
        if words != self.spans {
            lose(&mut self.lost)?;
            self.spans.copy_from_slice(words);
            return Ok(self.read_spans(State::ReadingSpansAgain));
        }
        for (span, word) in (self.section * SECTION_SPANS..).zip(words) {
            cache.learn(WordAt::Span(span), *word)?;
        }
        let at = WordAt::Section(self.section);
        let is_last = Mutation::SectionLast.is_active();
        let state = if is_last { State::ProbingSection } else { State::ProbingSectionAgain };
        Ok(self.post(state, Action::probe(at)))
    }

    fn section_found_again(&mut self, cache: &mut NodeCache, found: u64) -> Next {
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
        self.post(State::ReadingChunkLog, Action::read(at, SECTION_CHUNKS))
    }

    fn read_span_log(&mut self, cache: &NodeCache) -> Step<Recovered> {
        let section = cache.section(self.section);
        let is_held =
            |(place, word): (u8, &SpanWord)| word.is_closed() && section.state(place) != SpanState::Empty;
        if !(0..).zip(self.words().iter()).any(is_held) {
            return self.judge_from(cache, 0);
        }
        let at = WordAt::span_entry(self.section * SECTION_SPANS);
        self.post(State::ReadingSpanLog, Action::read(at, SECTION_SPANS))
    }

    fn words(&self) -> [SpanWord; SPANS] {
        self.spans.map(SpanWord)
    }

    /// V3: give back what is the dead host's, from the span with this place on.
    fn judge_from(&mut self, cache: &NodeCache, mut place: u8) -> Step<Recovered> {
        if self.surprises != cache.surprises() && !Mutation::SectionLast.is_active() {
            // Others have changed the section since its spans were looked at.
            return self.begin_section();
        }
        while u32::from(place) < SECTION_SPANS {
            match self.judge(cache, place) {
                Verdict::Pass(next) => place = next,
                Verdict::Free(freed, found) => return self.free(cache, freed, found),
                Verdict::Doubt => {
                    let at = WordAt::Span(self.section * SECTION_SPANS + u32::from(place));
                    return self.post(State::ProbingSpan(place), Action::probe(at));
                }
                Verdict::Unhint if !self.quest.gives() => place += 1,
                Verdict::Unhint => {
                    let span = self.section * SECTION_SPANS + u32::from(place);
                    place += 1;
                    // Rule H: the section's word is older than the look that found the span open.
                    if let Some((hint, action)) = Hint::opened(span, false, cache) {
                        return self.post(State::Hinting(hint, place), action);
                    }
                }
            }
        }
        self.recovered.unknown += self.unknown;
        if self.quest.has_told_of_unkeyed(self.section) {
            return self.read_chunk_keys(State::ReadingChunkKeysAgain);
        }
        self.go_on(cache)
    }

    /// Revokes the keys of what is freed as they were before it was judged, by CASes that expect them: a later owner has another key.
    fn free(&mut self, cache: &NodeCache, freed: Freed, found: Recovered) -> Step<Recovered> {
        let action =
            if Mutation::SkipStrike.is_active() { Action::default() } else { self.revocations(freed) };
        if action.is_empty() {
            return self.commit(cache, freed, found);
        }
        self.post(State::Revoking(freed, found), action)
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
        self.post(State::Freeing(commit, found, next), action)
    }

    fn probed(&mut self, cache: &mut NodeCache, place: u8, found: u64) -> Next {
        if found != self.spans[usize::from(place)] {
            lose(&mut self.lost)?;
            return Ok(self.begin_section());
        }
        self.certain = Some(place);
        Ok(self.judge_from(cache, place))
    }

    fn freeing(
        &mut self,
        cache: &mut NodeCache,
        (mut commit, found, next): (FreeCommit, Recovered, u8),
        result: StepResult<'_>,
    ) -> Next {
        match commit.step(cache, result)? {
            FreeProgress::Post(action) => Ok(self.post(State::Freeing(commit, found, next), action)),
            FreeProgress::Done => {
                self.recovered.add(found);
                Ok(self.judge_from(cache, next))
            }
            FreeProgress::Overtaken => {
                lose(&mut self.lost)?;
                if Mutation::RecoverBlind.is_active() {
                    let (commit, action) = FreeCommit::begin(self.host, commit.freed(), self.lost, cache);
                    return Ok(self.post(State::Freeing(commit, found, next), action));
                }
                Ok(self.begin_section())
            }
        }
    }
}

impl Recovered {
    /// Count what was found elsewhere, too.
    pub const fn add(&mut self, other: Self) {
        self.extents += other.extents;
        self.chunks += other.chunks;
        self.spans += other.spans;
        self.unknown += other.unknown;
    }
}
