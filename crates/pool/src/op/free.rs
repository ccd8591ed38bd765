//! Giving an extent back.

use aquifer_fabric::{Host, Key, KeyEntry};

use super::give::{Gift, Give, Given};
use super::{
    Action, Grant, Machine, Mutation, OpError, Step, StepResult, WordAt, damaged, lose, record_at, word_of,
};
use crate::cache::NodeCache;
use crate::size::{SECTION_CHUNKS, SECTION_SPANS, SPAN_CHUNKS};
use crate::word::{InlineLog, LogEntry, LogOp, Run, SectionWord, SpanState, SpanWord};

/// Gives one extent back. Dropped before it is done it may have given it back, and may have left its span closed.
#[derive(Clone, Debug)]
pub struct FreeOp {
    host: Host,
    grant: Grant,
    mutation: Mutation,
    lost: u32,
    /// The key that it had does not open it any more.
    is_shut: bool,
    /// The next, if it is bound, and the log tells that the extent is this host's.
    left: Option<Key>,
    /// It may have been begun before, by one that was killed over it.
    is_resumed: bool,
    state: State,
}

#[derive(Clone, Copy, Debug)]
enum State {
    Idle,
    /// What we remember says that it cannot be freed: is that so?
    Probing,
    /// F5: are the group's spans closed, now that the section is as remembered?
    ReadingGroup,
    /// K: is the key still the one that opens it? Then it is struck out, and this one bound in its place.
    Striking {
        gift: Gift,
        expected: u64,
        next: Key,
    },
    /// F1 to F6.
    Giving(Give),
}

type Next = Result<Step<()>, OpError>;

impl FreeOp {
    /// An operation that gives back what `host` has taken.
    #[must_use]
    pub const fn new(host: Host, grant: Grant) -> Self {
        Self::mutated(host, grant, Mutation::None)
    }

    /// The same with a fault, for tests.
    #[must_use]
    pub const fn mutated(host: Host, grant: Grant, mutation: Mutation) -> Self {
        Self {
            host,
            grant,
            mutation,
            lost: 0,
            is_shut: false,
            left: None,
            is_resumed: false,
            state: State::Idle,
        }
    }

    /// The same of what may be given back in part, and what nobody has taken since: its key may be struck out already, and the next be there.
    #[must_use]
    pub const fn resumed(self) -> Self {
        Self { is_resumed: true, ..self }
    }
}

impl Machine for FreeOp {
    type Output = ();

    fn start(&mut self, cache: &mut NodeCache) -> Step<()> {
        let is_of_class = self.grant.key == Key(0) || self.grant.key.class() == Some(self.grant.class.k());
        let is_possible = self.run().is_some() && is_of_class;
        if !is_possible || self.grant.chunk / SECTION_CHUNKS >= cache.section_count() {
            return Step::Done(Err(OpError::NotAllocated));
        }
        match self.judged(cache) {
            Ok(step) => step,
            // What we remember may be old.
            Err(_) => self.post(State::Probing, Action::Probe { at: word_of(self.grant) }),
        }
    }

    fn step(&mut self, cache: &mut NodeCache, result: StepResult<'_>) -> Step<()> {
        let next = match std::mem::replace(&mut self.state, State::Idle) {
            State::Idle => panic!("no action is under way"),
            State::Probing => {
                cache.learn(word_of(self.grant), result.found()).and_then(|()| self.judged(cache))
            }
            State::ReadingGroup => self.group_read(cache, result),
            State::Striking { gift, expected, next } => self.struck(cache, gift, (expected, next), result),
            State::Giving(give) => self.giving(cache, give, result),
        };
        next.unwrap_or_else(|error| Step::Done(Err(error)))
    }
}

impl FreeOp {
    fn post(&mut self, state: State, action: Action) -> Step<()> {
        self.state = state;
        Step::Post(action)
    }

    fn section(&self) -> u32 {
        self.grant.chunk / SECTION_CHUNKS
    }

    fn span(&self) -> u32 {
        self.grant.chunk / SPAN_CHUNKS
    }

    /// The extent's place in its word; `None` if it is not aligned to its size.
    pub(super) fn run(&self) -> Option<Run> {
        let class = self.grant.class;
        let first = if class.is_within_span() {
            self.grant.chunk % SPAN_CHUNKS
        } else if self.grant.chunk.is_multiple_of(SPAN_CHUNKS) {
            self.span() % SECTION_SPANS
        } else {
            return None;
        };
        Run::new(u8::try_from(first).ok()?, class.order())
    }

    /// Whether what is remembered says that it may be given back, if it is one within a span.
    pub(super) fn may_be_given(&self, cache: &NodeCache) -> bool {
        let is_there = self.section() < cache.section_count() && self.grant.class.is_within_span();
        is_there && self.run().is_some_and(|run| self.judge_span(cache.span(self.span()), run).is_ok())
    }

    /// Judge by what is remembered, and go on if the extent may be given back.
    fn judged(&mut self, cache: &mut NodeCache) -> Next {
        let run = self.run().ok_or(OpError::NotAllocated)?;
        if self.grant.class.is_within_span() {
            self.judge_span(cache.span(self.span()), run)?;
            return Ok(self.give(cache, Gift::Chunks { span: self.span(), mask: run.mask(), run }));
        }
        self.judge_section(cache.section(self.section()), run)?;
        // A section's 11 may be a hint of spans full of others' chunks; the spans themselves tell.
        let count = self.grant.class.chunks() / SPAN_CHUNKS;
        Ok(self.post(State::ReadingGroup, Action::Read { at: WordAt::Span(self.span()), count }))
    }

    /// Whether a record of an allocation speaks against the extent being ours.
    fn judge_log(&self, log: Option<InlineLog>, run: Run) -> Result<(), OpError> {
        match log {
            Some(log) if log.op == LogOp::Alloc && log.run.overlaps(run) => {
                if log.run != run {
                    Err(OpError::NotAllocated)
                } else if log.host != self.host {
                    Err(OpError::NotOurs(log.host))
                } else {
                    Ok(())
                }
            }
            Some(log) if log.op == LogOp::Open && log.run.overlaps(run) => Err(OpError::NotAllocated),
            _ => Ok(()),
        }
    }

    fn judge_span(&self, word: SpanWord, run: Run) -> Result<(), OpError> {
        if self.mutation == Mutation::GiveUnchecked {
            return Ok(());
        }
        if !word.holds(run) {
            return Err(OpError::NotAllocated);
        }
        self.judge_log(word.log().map_err(|cause| damaged(WordAt::Span(self.span()), word.0, cause))?, run)
    }

    fn judge_section(&self, word: SectionWord, run: Run) -> Result<(), OpError> {
        if self.mutation == Mutation::GiveUnchecked {
            return Ok(());
        }
        if !word.all(run, SpanState::Full) {
            return Err(OpError::NotAllocated);
        }
        self.judge_log(
            word.log().map_err(|cause| damaged(WordAt::Section(self.section()), word.0, cause))?,
            run,
        )
    }

    fn group_read(&mut self, cache: &mut NodeCache, result: StepResult<'_>) -> Next {
        let (first, count) = (self.span(), self.grant.class.chunks() / SPAN_CHUNKS);
        cache.learn_spans(first, count, result)?;
        let closed = (first..first + count).all(|span| cache.span(span).is_closed());
        let group = match self.run() {
            Some(run) if self.mutation == Mutation::GiveHalf => Run::single(run.first()),
            Some(run) if closed || self.mutation == Mutation::GiveUnchecked => run,
            _ => return Err(OpError::NotAllocated),
        };
        Ok(self.give(cache, Gift::Whole { section: self.section(), group }))
    }

    /// K: nobody gets at it any more by the key that it had. Who gives back what is not there any more finds another key, or none.
    fn give(&mut self, cache: &mut NodeCache, gift: Gift) -> Step<()> {
        let has_key = self.grant.key != Key(0) && self.mutation != Mutation::SkipStrike;
        if self.is_shut || !has_key {
            return self.give_shut(cache, gift);
        }
        let expected = KeyEntry::opened(self.grant.key, cache.tenant()).0;
        if self.is_resumed {
            return self.strike(gift, expected);
        }
        let next = cache.fresh_key(self.grant.class);
        let (at, desired) = (WordAt::key_of(self.grant), KeyEntry::opened(next, cache.tenant()).0);
        let then = record_at(self.grant);
        self.post(State::Striking { gift, expected, next }, Action::CasThen { at, expected, desired, then })
    }

    /// K, and no key comes in its place.
    fn strike(&mut self, gift: Gift, expected: u64) -> Step<()> {
        let (at, desired) = (WordAt::key_of(self.grant), self.shut(expected));
        self.post(State::Striking { gift, expected, next: Key(0) }, Action::Cas { at, expected, desired })
    }

    /// The entry when the key is struck out of it. That of a span still says whose it is.
    fn shut(&self, entry: u64) -> u64 {
        match WordAt::key_of(self.grant) {
            at if at == WordAt::span_key(self.span()) => KeyEntry(entry).without_key().0,
            _ => 0,
        }
    }

    fn struck(
        &mut self,
        cache: &mut NodeCache,
        gift: Gift,
        (expected, next): (u64, Key),
        result: StepResult<'_>,
    ) -> Next {
        let found = result.found();
        let key = KeyEntry(found).key();
        if found == expected {
            if let StepResult::FoundThen(_, entry) = result {
                self.left = self.is_told_by(LogEntry(entry)).then_some(next);
            }
        } else if self.mutation != Mutation::GiveUnchecked && !(self.is_resumed && key == Key(0)) {
            // The client that took it was another tenant's; or what is resumed had got so far.
            let is_its = key == self.grant.key || self.is_resumed;
            lose(&mut self.lost)?;
            return if is_its { Ok(self.strike(gift, found)) } else { Err(OpError::NotAllocated) };
        }
        self.is_shut = true;
        Ok(self.give_shut(cache, gift))
    }

    /// Whether an entry of the log tells that this is an extent of this host.
    pub(super) fn is_told_by(&self, entry: LogEntry) -> bool {
        let is_within = self.grant.class.is_within_span();
        let log = if is_within { entry.of_span() } else { entry.of_section() };
        log.ok()
            .flatten()
            .is_some_and(|log| log.op == LogOp::Alloc && Some(log.run) == self.run() && log.host == self.host)
    }

    fn give_shut(&mut self, cache: &mut NodeCache, gift: Gift) -> Step<()> {
        if let Some(key) = self.left {
            cache.leave(self.grant.chunk, self.grant.class, key);
        }
        let (give, action) = Give::begin(self.host, gift, self.lost, cache, self.mutation);
        self.post(State::Giving(give), action)
    }

    fn giving(&mut self, cache: &mut NodeCache, mut give: Give, result: StepResult<'_>) -> Next {
        match give.step(cache, result)? {
            Given::Post(action) => Ok(self.post(State::Giving(give), action)),
            Given::Done => Ok(Step::Done(Ok(()))),
            Given::Overtaken => {
                lose(&mut self.lost)?;
                self.judged(cache)
            }
        }
    }
}
