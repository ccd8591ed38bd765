//! Taking an extent.

mod record;
mod search;

use aquifer_fabric::{Host, Key, KeyEntry};

use super::flush::{Flush, Flushed};
use super::free::{FreeCommit, FreeProgress, Freed};
use super::hint::Hint;
use super::ready::{Readied, Ready};
use super::{
    Action, CONTENDED_AFTER, Grant, Machine, Mutation, OpError, Step, StepResult, WordAt, damaged, lose,
    word_of,
};
use crate::cache::{Candidate, NodeCache, place_in_section};
use crate::error::Damage;
use crate::size::{SECTION_CHUNKS, SECTION_SPANS, SPAN_CHUNKS, SizeClass};
use crate::word::{LogOp, Run, SectionWord, SpanWord};
use search::{Pass, Search};

/// Takes one extent of a node. Dropped before it is done it may have taken one (the inline log says so).
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct AllocOp {
    host: Host,
    class: SizeClass,
    search: Search,
    only: Option<Only>,
    lost: u32,
    /// The span at which races were lost last, and how many.
    losing: Option<(u32, u32)>,
    /// What is taken is the first of a span.
    has_opened: bool,
    /// Whether A8 is left to the caller, who does it before anything else; and what it is to write then.
    leaves_record: bool,
    record: Action,
    state: State,
}

/// The only group that is to be taken.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
struct Only {
    section: u32,
    group: Run,
    /// Whoever had it last: to be cleared, or lent no more, not to be used. Else the key is given.
    key: Option<Key>,
}

/// A CAS that was posted.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
struct Committing {
    commit: Commit,
    expected: u64,
    desired: u64,
    /// The extent's key, if key and record are written with the CAS.
    key: Option<Key>,
    /// The span that A2 says is full.
    filled: Option<u32>,
}

/// The CAS that takes something.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum Commit {
    /// A1, or A3 if we opened the span.
    Take { span: u32, run: Run, ours: bool },
    /// A2.
    Open { span: u32 },
    /// A7.
    TakeWhole { section: u32, group: Run },
}

impl Commit {
    fn at(self) -> WordAt {
        match self {
            Self::Take { span, .. } => WordAt::Span(span),
            Self::Open { span } => WordAt::Section(span / SECTION_SPANS),
            Self::TakeWhole { section, .. } => WordAt::Section(section),
        }
    }

    /// The word as it is remembered after that; if this is A2, and there is a span that this client `filled`, it says so, too.
    fn desired(self, cache: &NodeCache, host: Host, filled: Option<u32>) -> u64 {
        match self {
            Self::Take { span, run, .. } => cache.span(span).take(run, host).0,
            Self::Open { span } => {
                let (section, place) = (cache.section(span / SECTION_SPANS), place_in_section(span));
                match filled {
                    Some(filled) => section.open_beside(place, place_in_section(filled), host).0,
                    None => section.open(place, host).0,
                }
            }
            Self::TakeWhole { section, group } => cache.section(section).take(group, host).0,
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum State {
    Idle,
    /// A0.
    Readying(Ready, Commit),
    /// The record that the commit writes over goes to the log.
    Flushing(Flush, Commit),
    /// The word is expected as it was when this was posted.
    Committing(Committing),
    /// A6, before A3: what A2 has said to be full is not.
    Reopening(Hint, u32),
    /// A8: our own record, and the key.
    Recording(Grant),
    /// What was taken is of a span that is another tenant's by now: it goes back.
    Returning(FreeCommit),
    /// R.
    ReadingSections {
        first: u32,
        count: u32,
    },
    /// R.
    Surveying {
        section: u32,
    },
    /// C1, A4–A6 of a span that others filled.
    Marking(Hint),
    /// A4–A6, C2; the extent is ours already.
    Hinting(Hint, Grant),
}

type Next = Result<Step<Grant>, OpError>;

impl AllocOp {
    /// An operation that takes an extent of `class` for `host`.
    #[must_use]
    pub fn new(host: Host, class: SizeClass) -> Self {
        Self {
            host,
            class,
            search: Search::new(),
            only: None,
            lost: 0,
            losing: None,
            has_opened: false,
            leaves_record: false,
            record: Action::default(),
            state: State::Idle,
        }
    }

    /// An operation by which a node takes this group of empty spans, whoever had them. It gets no key.
    #[must_use]
    pub fn of_group(host: Host, section: u32, group: Run) -> Self {
        let class = SizeClass::of_spans(group.order());
        Self { only: Some(Only { section, group, key: None }), ..Self::new(host, class) }
    }

    /// An operation that takes this section, and no other, under a key that is given.
    pub(super) fn of_section(host: Host, section: u32, key: Key) -> Self {
        let only = Only { section, group: Run::SECTION, key: Some(key) };
        Self { only: Some(only), ..Self::new(host, SizeClass::SECTION) }
    }

    /// The same, with its A8 left to the caller: see [`Self::take_record`].
    pub(super) fn leaving_record(self) -> Self {
        Self { leaves_record: true, ..self }
    }

    /// What A8 is to write; empty as long as nothing is allocated.
    pub(super) fn take_record(&mut self) -> Action {
        std::mem::take(&mut self.record)
    }

    /// Whether it is the node that takes something for itself.
    const fn is_for_node(&self) -> bool {
        matches!(self.only, Some(Only { key: None, .. }))
    }
}

impl Machine for AllocOp {
    type Output = Grant;

    fn start(&mut self, cache: &mut NodeCache) -> Step<Grant> {
        self.search(cache)
    }

    fn step(&mut self, cache: &mut NodeCache, result: StepResult<'_>) -> Step<Grant> {
        let next = match std::mem::replace(&mut self.state, State::Idle) {
            State::Idle => panic!("no action is under way"),
            State::Readying(ready, commit) => self.readying(cache, ready, commit, result),
            State::Flushing(flush, commit) => self.flushing(cache, flush, commit, result),
            State::Committing(posted) => self.committing(cache, posted, result),
            State::Recording(grant) => {
                cache.settle(word_of(grant));
                Ok(self.recorded(cache, grant))
            }
            State::Returning(commit) => self.returning(cache, commit, result),
            State::ReadingSections { first, count } => self.read_sections(cache, first, count, result),
            State::Surveying { section } => self.surveyed(cache, section, result),
            State::Reopening(mut hint, span) => Ok(match hint.step(cache, result) {
                Some(action) => self.post(State::Reopening(hint, span), action),
                None => self.take_first(cache, span),
            }),
            State::Marking(mut hint) => Ok(match hint.step(cache, result) {
                Some(action) => self.post(State::Marking(hint), action),
                None => self.search(cache),
            }),
            State::Hinting(mut hint, grant) => Ok(match hint.step(cache, result) {
                Some(action) => self.post(State::Hinting(hint, grant), action),
                None => Step::Done(Ok(grant)),
            }),
        };
        next.unwrap_or_else(|error| Step::Done(Err(error)))
    }
}

impl AllocOp {
    fn post(&mut self, state: State, action: Action) -> Step<Grant> {
        self.state = state;
        Step::Post(action)
    }

    fn attempt(&mut self, cache: &mut NodeCache, section: u32, candidate: Candidate) -> Step<Grant> {
        match candidate {
            Candidate::Chunks { span, run } => self.begin(cache, Commit::Take { span, run, ours: false }),
            Candidate::Empty { span } if Mutation::SkipOpen.is_active() => self.take_first(cache, span),
            Candidate::Empty { span } => {
                let group = Run::single(place_in_section(span));
                self.begin_life(cache, section, group, Commit::Open { span })
            }
            Candidate::Whole { group } => {
                self.begin_life(cache, section, group, Commit::TakeWhole { section, group })
            }
        }
    }

    /// A0, before A2 and A7.
    fn begin_life(&mut self, cache: &mut NodeCache, section: u32, group: Run, commit: Commit) -> Step<Grant> {
        let takes_foreign = self.is_for_node() || Mutation::TakeForeign.is_active();
        match Ready::begin(self.host, section, group, takes_foreign, cache) {
            Some((ready, action)) => self.post(State::Readying(ready, commit), action),
            None => self.begin(cache, commit),
        }
    }

    fn readying(
        &mut self,
        cache: &mut NodeCache,
        mut ready: Ready,
        commit: Commit,
        result: StepResult<'_>,
    ) -> Next {
        match ready.step(cache, result)? {
            Readied::Post(action) => Ok(self.post(State::Readying(ready, commit), action)),
            Readied::Done => Ok(self.begin(cache, commit)),
            Readied::Overtaken => self.overtaken(cache),
            Readied::Foreign => Ok(self.search(cache)),
        }
    }

    /// L: the record of before goes to the log, if it must; then the commit.
    fn begin(&mut self, cache: &mut NodeCache, commit: Commit) -> Step<Grant> {
        match Flush::begin(self.host, commit.at(), cache) {
            Some((flush, action)) => self.post(State::Flushing(flush, commit), action),
            None => self.commit(cache, commit),
        }
    }

    fn flushing(
        &mut self,
        cache: &mut NodeCache,
        mut flush: Flush,
        commit: Commit,
        result: StepResult<'_>,
    ) -> Next {
        match flush.step(cache, result)? {
            Flushed::Post(action) => Ok(self.post(State::Flushing(flush, commit), action)),
            Flushed::Done => Ok(self.commit(cache, commit)),
            Flushed::Overtaken => self.overtaken(cache),
        }
    }

    /// What was remembered is old, and was learnt.
    fn overtaken(&mut self, cache: &mut NodeCache) -> Next {
        lose(&mut self.lost)?;
        if !self.class.is_within_span() && self.search.pass == Pass::Remembered {
            // Who lost against somebody that searches from the same place would lose again.
            cache.scatter_start(self.class, self.host);
        }
        Ok(self.search(cache))
    }

    fn commit(&mut self, cache: &mut NodeCache, commit: Commit) -> Step<Grant> {
        let filled = match commit {
            Commit::Open { span } => cache.take_filled(span / SECTION_SPANS),
            _ => None,
        };
        let (expected, desired) = (cache.word(commit.at()), commit.desired(cache, self.host, filled));
        let mut action = Action::commit(commit.at(), expected, desired);
        let mut key = None;
        match commit {
            // No other client can allocate in the span before it is open, so A8 goes before the CAS.
            Commit::Take { span, run, ours: true } => {
                let grant = self.fresh_grant(cache, first_of(span, run));
                key = Some(grant.key);
                action = self.first_record(cache, grant, desired).then(action);
            }
            Commit::Take { span, .. } if !cache.is_known(span) && !Mutation::TakeForeign.is_active() => {
                action = action.then(Action::read(WordAt::span_key(span), 1));
            }
            _ => {}
        }
        if let Some(filled) = filled {
            action = action.then(Action::probe(WordAt::Span(filled)));
        }
        self.post(State::Committing(Committing { commit, expected, desired, key, filled }), action)
    }

    fn committing(&mut self, cache: &mut NodeCache, posted: Committing, result: StepResult<'_>) -> Next {
        let Committing { commit, expected, desired, .. } = posted;
        let found = result.found();
        let won = found == expected;
        match commit {
            Commit::Take { span, run, ours } if won => self.taken(cache, (span, run, ours), posted, result),
            Commit::Take { .. } => self.taking_lost(cache, posted, found),
            Commit::Open { span } => {
                self.learn_section(cache, commit.at(), won, desired, found)?;
                if won { Ok(self.opened(cache, span, posted.filled, result)) } else { self.overtaken(cache) }
            }
            Commit::TakeWhole { section, group } => {
                self.learn_section(cache, commit.at(), won, desired, found)?;
                if won { Ok(self.taken_whole(cache, section, group)) } else { self.overtaken(cache) }
            }
        }
    }

    /// A2 has succeeded, and may have said of another span that it is full: A5.
    fn opened(
        &mut self,
        cache: &mut NodeCache,
        span: u32,
        filled: Option<u32>,
        result: StepResult<'_>,
    ) -> Step<Grant> {
        if let (Some(filled), (_, Some(word))) = (filled, result.found_then())
            && let Some((hint, action)) = Hint::said_full(filled, SpanWord(word), cache)
        {
            return self.post(State::Reopening(hint, span), action);
        }
        self.take_first(cache, span)
    }

    /// A7 has succeeded.
    fn taken_whole(&mut self, cache: &mut NodeCache, section: u32, group: Run) -> Step<Grant> {
        let (chunk, class) = (first_of_group(section, group), self.class);
        let grant = match self.only {
            Some(only) => Grant { chunk, class, key: only.key.unwrap_or(Key(0)) },
            None => self.fresh_grant(cache, chunk),
        };
        self.record(cache, grant)
    }

    fn fresh_grant(&self, cache: &mut NodeCache, chunk: u32) -> Grant {
        Grant { chunk, class: self.class, key: cache.fresh_key(self.class) }
    }

    /// A1, or A3 if we opened the span, has succeeded.
    fn taken(
        &mut self,
        cache: &mut NodeCache,
        (span, run, ours): (u32, Run, bool),
        posted: Committing,
        result: StepResult<'_>,
    ) -> Next {
        let (at, chunk) = (posted.commit.at(), first_of(span, run));
        let changed = cache.change_span(span, SpanWord(posted.desired));
        changed.map_err(|cause| damaged(at, posted.desired, cause))?;
        self.settle_opening(cache, span, ours);
        self.has_opened = ours;
        if ours {
            cache.learn_owner(span, KeyEntry::shut(cache.tenant()));
        }
        // As long as we have something of the span, it stays its owner's.
        if let (false, (_, Some(entry))) = (ours, result.found_then()) {
            cache.learn_owner(span, KeyEntry(entry));
            if !KeyEntry(entry).is_of(cache.tenant()) {
                return Ok(self.give_up(cache, span, run));
            }
        }
        if let Some(key) = posted.key {
            cache.settle(at);
            return Ok(self.recorded(cache, Grant { chunk, class: self.class, key }));
        }
        let grant = self.fresh_grant(cache, chunk);
        Ok(self.record(cache, grant))
    }

    fn learn_section(
        &self,
        cache: &mut NodeCache,
        at: WordAt,
        won: bool,
        desired: u64,
        found: u64,
    ) -> Result<(), OpError> {
        match at {
            WordAt::Section(section) if won => cache
                .change_section(section, SectionWord(desired))
                .map_err(|cause| damaged(at, desired, cause)),
            _ => cache.learn(at, found),
        }
    }

    /// Chunks of a span that is another tenant's go back; nobody was told of them.
    fn give_up(&mut self, cache: &NodeCache, span: u32, run: Run) -> Step<Grant> {
        let freed = Freed::Chunks { span, mask: run.mask(), run };
        let (commit, action) = FreeCommit::begin(self.host, freed, self.lost, cache);
        self.post(State::Returning(commit), action)
    }

    fn returning(&mut self, cache: &mut NodeCache, mut commit: FreeCommit, result: StepResult<'_>) -> Next {
        match commit.step(cache, result)? {
            FreeProgress::Post(action) => Ok(self.post(State::Returning(commit), action)),
            FreeProgress::Done => Ok(self.search(cache)),
            FreeProgress::Overtaken => {
                lose(&mut self.lost)?;
                let (commit, action) = FreeCommit::begin(self.host, commit.freed(), self.lost, cache);
                Ok(self.post(State::Returning(commit), action))
            }
        }
    }

    /// A3: the span is ours to open. The word we remember may be that of an earlier life; then the CAS tells.
    fn take_first(&mut self, cache: &mut NodeCache, span: u32) -> Step<Grant> {
        let run = Run::new(0, self.class.order()).unwrap_or(Run::single(0));
        self.commit(cache, Commit::Take { span, run, ours: true })
    }

    /// Who opened a span is needed only until its first chunk is taken.
    fn settle_opening(&self, cache: &mut NodeCache, span: u32, ours: bool) {
        let section = span / SECTION_SPANS;
        let log = cache.section(section).log().ok().flatten();
        let is_of_it = log.is_some_and(|log| {
            log.op == LogOp::Open && log.host == self.host && log.run == Run::single(place_in_section(span))
        });
        if ours && is_of_it {
            cache.settle(WordAt::Section(section));
        }
    }

    fn taking_lost(&mut self, cache: &mut NodeCache, posted: Committing, found: u64) -> Next {
        let Commit::Take { span, ours, .. } = posted.commit else { panic!("{posted:?} takes no chunks") };
        let at = WordAt::Span(span);
        lose(&mut self.lost)?;
        cache.learn(at, found)?;
        let is_closed = SpanWord(found).is_closed();
        if ours {
            // Between opening and this only we may change the word, so what we remembered was old.
            return if is_closed {
                Ok(self.take_first(cache, span))
            } else {
                Err(damaged(at, found, Damage::Intruder))
            };
        }
        if Mutation::TakeFromStale.is_active() {
            let action = Action::commit(at, found, posted.desired);
            return Ok(self.post(State::Committing(Committing { expected: found, ..posted }), action));
        }
        let times = match self.losing {
            Some((last, times)) if last == span => times + 1,
            _ => 1,
        };
        self.losing = Some((span, times));
        if times > CONTENDED_AFTER && self.search.avoid != Some(span) && !is_closed {
            self.search.avoid = Some(span);
            if let Some((hint, action)) = Hint::mark(span, cache) {
                return Ok(self.post(State::Marking(hint), action));
            }
        }
        Ok(self.search(cache))
    }

    fn read_sections(
        &mut self,
        cache: &mut NodeCache,
        first: u32,
        count: u32,
        result: StepResult<'_>,
    ) -> Next {
        // A READ may tear a word. What looks impossible is left to the CAS, which does not.
        cache.learn_sections(first, count, result).ok();
        self.search.fresh = self.search.scanned + count;
        Ok(self.search(cache))
    }

    fn surveyed(&mut self, cache: &mut NodeCache, section: u32, result: StepResult<'_>) -> Next {
        cache.learn_survey(section, 1, result).ok();
        // Rule H: the section's word was read before that. Whoever filled the span may never say so.
        let filled = cache.unsaid_full(section, result).and_then(|span| Hint::filled(span, cache));
        Ok(match filled {
            Some((hint, action)) => self.post(State::Marking(hint), action),
            None => self.search(cache),
        })
    }
}

/// The first chunk of a run of a span, counted over the node.
fn first_of(span: u32, run: Run) -> u32 {
    span * SPAN_CHUNKS + u32::from(run.first())
}

/// The first chunk of a group of a section's spans, likewise.
fn first_of_group(section: u32, group: Run) -> u32 {
    section * SECTION_CHUNKS + u32::from(group.first()) * SPAN_CHUNKS
}
