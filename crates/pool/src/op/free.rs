//! Giving an extent back.

use aquifer_fabric::{Host, Key, KeyEntry};

use super::give::{Gift, Give, Given};
use super::{
    Action, Grant, Machine, Mutation, OpError, Step, StepResult, WordAt, damaged, lose, record_at, word_of,
};
use crate::cache::NodeCache;
use crate::size::{SECTION_CHUNKS, SECTION_SPANS, SPAN_CHUNKS};
use crate::word::{InlineLog, LogEntry, LogOp, Run, SectionWord, SpanState, SpanWord, record_of};

/// Gives one extent back. Dropped before it is done it may have given it back, and may have left its span closed.
#[derive(Clone, Debug)]
pub struct FreeOp {
    host: Host,
    grant: Grant,
    lost: u32,
    /// The key that it had does not open it any more.
    is_shut: bool,
    /// The next, if it is bound, and the log tells that the extent is this host's.
    left: Option<Key>,
    /// No key comes in the place of the one that it had.
    leaves_nothing: bool,
    /// A span that is closed by it may rest.
    may_rest: bool,
    /// It may have been begun before, when its word had this record: as long as it has, nobody has had the place since.
    begun_at: Option<u32>,
    state: State,
}

#[derive(Clone, Copy, Debug)]
enum State {
    Idle,
    /// What we remember says that it cannot be freed: is that so? Or what is resumed: has the word the same record still?
    Probing,
    /// F5: are the group's spans closed, now that the section is as remembered?
    ReadingGroup,
    /// K: is the key still the one that opens it? Then it is struck out, and this one bound in its place.
    Striking {
        gift: Gift,
        expected: u64,
        next: Key,
    },
    /// Of what is resumed another key was found: has the word the same record still, so that nobody can have bound it who has the place by now?
    Doubting {
        gift: Gift,
        entry: u64,
    },
    /// F1 to F6.
    Giving(Give),
}

type Next = Result<Step<()>, OpError>;

impl FreeOp {
    /// An operation that gives back what `host` has taken.
    #[must_use]
    pub const fn new(host: Host, grant: Grant) -> Self {
        Self {
            host,
            grant,
            lost: 0,
            is_shut: false,
            left: None,
            leaves_nothing: false,
            may_rest: false,
            begun_at: None,
            state: State::Idle,
        }
    }

    /// The same, and nothing is left for the next time: who takes it again writes key and record.
    #[must_use]
    pub const fn leaving_nothing(self) -> Self {
        Self { leaves_nothing: true, ..self }
    }

    /// The same, and if nothing else is taken in the span, and not too many rest, it rests: whoever drives this has to have it settled some time ([`super::SettleOp`]).
    #[must_use]
    pub const fn resting(self) -> Self {
        Self { may_rest: true, ..self }
    }

    /// The same of what may be given back in part, and was begun when its word had that record: its key may be struck out already, and another be there. If the word has
    /// another record now, or gets one meanwhile, it is `NotAllocated`, though it may be ours still.
    #[must_use]
    pub const fn resumed(self, record: u32) -> Self {
        Self { begun_at: Some(record), ..self.leaving_nothing() }
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
        if self.begun_at.is_some() {
            return self.post(State::Probing, Action::Probe { at: word_of(self.grant) });
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
                let learnt = cache.learn(word_of(self.grant), result.found());
                learnt.and_then(|()| self.assert_untouched(result.found())).and_then(|()| self.judged(cache))
            }
            State::Doubting { gift, entry } => {
                self.assert_untouched(result.found()).map(|()| self.strike(gift, entry))
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

    /// Of what is resumed nobody has had the place since it was begun.
    fn assert_untouched(&self, word: u64) -> Result<(), OpError> {
        match self.begun_at {
            _ if Mutation::ResumeBlind.is_active() => Ok(()),
            Some(record) if record_of(word) != record => Err(OpError::NotAllocated),
            _ => Ok(()),
        }
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
        if Mutation::GiveUnchecked.is_active() {
            return Ok(());
        }
        if !word.holds(run) {
            return Err(OpError::NotAllocated);
        }
        self.judge_log(word.log().map_err(|cause| damaged(WordAt::Span(self.span()), word.0, cause))?, run)
    }

    fn judge_section(&self, word: SectionWord, run: Run) -> Result<(), OpError> {
        if Mutation::GiveUnchecked.is_active() {
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
            Some(run) if Mutation::GiveHalf.is_active() => Run::single(run.first()),
            Some(run) if closed || Mutation::GiveUnchecked.is_active() => run,
            _ => return Err(OpError::NotAllocated),
        };
        Ok(self.give(cache, Gift::Whole { section: self.section(), group }))
    }

    /// K: nobody gets at it any more by the key that it had. Who gives back what is not there any more finds another key, or none.
    fn give(&mut self, cache: &mut NodeCache, gift: Gift) -> Step<()> {
        let has_key = self.grant.key != Key(0) && !Mutation::SkipStrike.is_active();
        if self.is_shut || !has_key {
            return self.give_shut(cache, gift);
        }
        let expected = KeyEntry::opened(self.grant.key, cache.tenant()).0;
        if self.leaves_nothing {
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
        } else if !(Mutation::GiveUnchecked.is_active() || self.begun_at.is_some() && key == Key(0)) {
            lose(&mut self.lost)?;
            return match self.begun_at {
                // The client that took it was another tenant's.
                _ if key == self.grant.key => Ok(self.strike(gift, found)),
                // The next key, or another's.
                Some(_) => {
                    let state = State::Doubting { gift, entry: found };
                    Ok(self.post(state, Action::Probe { at: word_of(self.grant) }))
                }
                None => Err(OpError::NotAllocated),
            };
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
        let (give, action) = Give::begin(self.host, gift, self.lost, cache);
        // Only where it left something it would be taken again.
        let rests = self.may_rest && self.left.is_some();
        self.post(State::Giving(give.resting(rests)), action)
    }

    fn giving(&mut self, cache: &mut NodeCache, mut give: Give, result: StepResult<'_>) -> Next {
        match give.step(cache, result)? {
            Given::Post(action) => Ok(self.post(State::Giving(give), action)),
            Given::Done => Ok(Step::Done(Ok(()))),
            Given::Overtaken if self.begun_at.is_some() => Err(OpError::NotAllocated),
            Given::Overtaken => {
                lose(&mut self.lost)?;
                self.judged(cache)
            }
        }
    }
}
