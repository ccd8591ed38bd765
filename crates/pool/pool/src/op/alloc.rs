//! Allocates an extent (A0 to A8).

mod record;
mod search;

use aquifer_fabric::{Host, Key, KeyEntry};

use super::flush::{Flush, FlushProgress};
use super::free::{FreeCommit, FreeProgress, Freed};
use super::hint::Hint;
use super::ready::{ReadyCheck, ReadyProgress};
use super::{
    Action, CONTENDED_AFTER, Grant, Mutation, Next, OpError, StateMachine, Step, StepResult, WordAt, damaged,
    lose, word_of,
};
use crate::cache::{Candidate, NodeCache, place_in_section};
use crate::error::Damage;
use crate::size::{SECTION_CHUNKS, SECTION_SPANS, SPAN_CHUNKS, SizeClass};
use crate::word::{AlignedRun, LogOp, SectionWord, SpanWord};
use search::{Pass, SectionSearch};

/// Allocates one extent of a node.
///
/// If the operation is dropped before it is done, the extent may be allocated; then the inline log
/// records it.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct AllocOp {
    host: Host,
    class: SizeClass,
    search: SectionSearch,
    fixed_group: Option<FixedGroup>,
    lost: u32,
    /// The span at which the last race was lost, and the races lost there in a row.
    last_losses: Option<(u32, u32)>,
    /// Whether this operation has opened the span of the extent.
    has_opened: bool,
    /// Whether the caller posts the WRITEs of A8, before any other action.
    defers_record: bool,
    /// The WRITEs of A8 that the caller has yet to post.
    record: Action,
    state: AllocState,
}

/// The only group that may be allocated.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
struct FixedGroup {
    section: u32,
    group: AlignedRun,
    /// The key of the extent. `None` if the node allocates the group for itself: then the group has
    /// no key, and may belong to any tenant.
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
    /// The span whose full hint A2 sets.
    full_span: Option<u32>,
}

/// The change that the next CAS commits.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum Commit {
    /// A1, or A3 if this operation has opened the span: allocates chunks.
    Chunks { span: u32, run: AlignedRun, is_opener: bool },
    /// A2: opens an empty span.
    Open { span: u32 },
    /// A7: allocates a group of spans.
    Whole { section: u32, group: AlignedRun },
}

impl Commit {
    fn at(self) -> WordAt {
        match self {
            Self::Chunks { span, .. } => WordAt::Span(span),
            Self::Open { span } => WordAt::Section(span / SECTION_SPANS),
            Self::Whole { section, .. } => WordAt::Section(section),
        }
    }

    /// The word after the commit. A2 also sets the full hint of `full_span`.
    fn desired(self, cache: &NodeCache, host: Host, full_span: Option<u32>) -> u64 {
        match self {
            Self::Chunks { span, run, .. } => cache.span(span).allocate(run, host).0,
            Self::Open { span } => {
                let (section, place) = (cache.section(span / SECTION_SPANS), place_in_section(span));
                match full_span {
                    Some(full) => section.open_beside(place, place_in_section(full), host).0,
                    None => section.open(place, host).0,
                }
            }
            Self::Whole { section, group } => cache.section(section).allocate(group, host).0,
        }
    }
}

/// The step in progress.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum AllocState {
    Idle,
    /// A0: checks that the spans are ready.
    CheckingReady(ReadyCheck, Commit),
    /// L: copies the record that the commit overwrites to the log.
    Flushing(Flush, Commit),
    /// A1, A2, A3, A7: the CAS.
    Committing(Committing),
    /// A6 before A3: clears the full hint that A2 has set on a span that is not full. The second
    /// value is the span that A2 has opened.
    ClearingFull(Hint, u32),
    /// A8: writes key and record.
    Recording(Grant),
    /// A1 has allocated chunks of a span that now belongs to another tenant: frees them.
    FreeingForeign(FreeCommit),
    /// R: reads the words of sections.
    ReadingSections {
        first: u32,
        count: u32,
    },
    /// R: reads the spans of a section.
    Surveying {
        section: u32,
    },
    /// C1, or A4 to A6 of a span that others have filled; the search follows.
    HintingInSearch(Hint),
    /// A4 to A6, or C2; the extent is allocated already.
    Hinting(Hint, Grant),
}

impl AllocOp {
    /// Creates an operation that allocates an extent of `class` for `host`.
    #[must_use]
    pub fn new(host: Host, class: SizeClass) -> Self {
        Self {
            host,
            class,
            search: SectionSearch::new(),
            fixed_group: None,
            lost: 0,
            last_losses: None,
            has_opened: false,
            defers_record: false,
            record: Action::default(),
            state: AllocState::Idle,
        }
    }

    /// Creates an operation by which a node allocates this group of empty spans for itself, of any
    /// tenant and without a key.
    #[must_use]
    pub fn of_group(host: Host, section: u32, group: AlignedRun) -> Self {
        let class = SizeClass::of_spans(group.order());
        let group = FixedGroup { section, group, key: None };
        Self { fixed_group: Some(group), ..Self::new(host, class) }
    }

    /// Creates an operation that allocates this section and no other, with this key.
    pub(super) fn of_section(host: Host, section: u32, key: Key) -> Self {
        let group = FixedGroup { section, group: AlignedRun::SECTION, key: Some(key) };
        Self { fixed_group: Some(group), ..Self::new(host, SizeClass::SECTION) }
    }

    /// Leaves A8 to the caller, which must post the action that [`Self::pop_record`] returns.
    pub(super) fn deferring_record(self) -> Self {
        Self { defers_record: true, ..self }
    }

    /// Removes and returns the WRITEs of A8, which the caller must post before any other action;
    /// empty if there are none.
    pub(super) fn pop_record(&mut self) -> Action {
        std::mem::take(&mut self.record)
    }

    /// Whether the node allocates for itself.
    const fn is_for_node(&self) -> bool {
        matches!(self.fixed_group, Some(FixedGroup { key: None, .. }))
    }
}

impl StateMachine for AllocOp {
    type Output = Grant;

    fn start(&mut self, cache: &mut NodeCache) -> Step<Grant> {
        self.search(cache)
    }

    fn step(&mut self, cache: &mut NodeCache, result: StepResult<'_>) -> Step<Grant> {
        let next = match std::mem::replace(&mut self.state, AllocState::Idle) {
            AllocState::Idle => panic!("no action is in flight"),
            AllocState::CheckingReady(check, commit) => self.ready_checked(cache, check, commit, result),
            AllocState::Flushing(flush, commit) => self.flushing(cache, flush, commit, result),
            AllocState::Committing(posted) => self.committing(cache, posted, result),
            AllocState::Recording(grant) => {
                cache.mark_saved(word_of(grant));
                Ok(self.recorded(cache, grant))
            }
            AllocState::FreeingForeign(commit) => self.foreign_freed(cache, commit, result),
            AllocState::ReadingSections { first, count } => self.read_sections(cache, first, count, result),
            AllocState::Surveying { section } => self.surveyed(cache, section, result),
            AllocState::ClearingFull(mut hint, span) => Ok(match hint.step(cache, result) {
                Some(action) => self.post(AllocState::ClearingFull(hint, span), action),
                None => self.allocate_first(cache, span),
            }),
            AllocState::HintingInSearch(mut hint) => Ok(match hint.step(cache, result) {
                Some(action) => self.post(AllocState::HintingInSearch(hint), action),
                None => self.search(cache),
            }),
            AllocState::Hinting(mut hint, grant) => Ok(match hint.step(cache, result) {
                Some(action) => self.post(AllocState::Hinting(hint, grant), action),
                None => Step::Done(Ok(grant)),
            }),
        };
        next.unwrap_or_else(|error| Step::Done(Err(error)))
    }
}

impl AllocOp {
    fn post(&mut self, state: AllocState, action: Action) -> Step<Grant> {
        self.state = state;
        Step::Post(action)
    }

    /// Begins to allocate a candidate of the search.
    fn attempt(&mut self, cache: &mut NodeCache, section: u32, candidate: Candidate) -> Step<Grant> {
        match candidate {
            Candidate::Chunks { span, run } => {
                self.begin(cache, Commit::Chunks { span, run, is_opener: false })
            }
            Candidate::Empty { span } if Mutation::SkipOpen.is_active() => self.allocate_first(cache, span),
            Candidate::Empty { span } => {
                let group = AlignedRun::single(place_in_section(span));
                self.check_ready(cache, section, group, Commit::Open { span })
            }
            Candidate::Whole { group } => {
                self.check_ready(cache, section, group, Commit::Whole { section, group })
            }
        }
    }

    /// A0, before A2 and A7.
    fn check_ready(
        &mut self,
        cache: &mut NodeCache,
        section: u32,
        group: AlignedRun,
        commit: Commit,
    ) -> Step<Grant> {
        let allows_foreign = self.is_for_node() || Mutation::AllocateForeign.is_active();
        match ReadyCheck::begin(self.host, section, group, allows_foreign, cache) {
            Some((check, action)) => self.post(AllocState::CheckingReady(check, commit), action),
            None => self.begin(cache, commit),
        }
    }

    /// Handles the answer of A0.
    fn ready_checked(
        &mut self,
        cache: &mut NodeCache,
        mut check: ReadyCheck,
        commit: Commit,
        result: StepResult<'_>,
    ) -> Next<Grant> {
        match check.step(cache, result)? {
            ReadyProgress::Post(action) => Ok(self.post(AllocState::CheckingReady(check, commit), action)),
            ReadyProgress::Done => Ok(self.begin(cache, commit)),
            ReadyProgress::Overtaken => self.overtaken(cache),
            ReadyProgress::Foreign => Ok(self.search(cache)),
        }
    }

    /// L, if the record that the commit overwrites is not in the log; then the commit.
    fn begin(&mut self, cache: &mut NodeCache, commit: Commit) -> Step<Grant> {
        match Flush::begin(self.host, commit.at(), cache) {
            Some((flush, action)) => self.post(AllocState::Flushing(flush, commit), action),
            None => self.commit(cache, commit),
        }
    }

    /// Handles the answer of L.
    fn flushing(
        &mut self,
        cache: &mut NodeCache,
        mut flush: Flush,
        commit: Commit,
        result: StepResult<'_>,
    ) -> Next<Grant> {
        match flush.step(cache, result)? {
            FlushProgress::Post(action) => Ok(self.post(AllocState::Flushing(flush, commit), action)),
            FlushProgress::Done => Ok(self.commit(cache, commit)),
            FlushProgress::Overtaken => self.overtaken(cache),
        }
    }

    /// Searches again after a lost race. The word is cached as found.
    fn overtaken(&mut self, cache: &mut NodeCache) -> Next<Grant> {
        lose(&mut self.lost)?;
        if !self.class.is_within_span() && self.search.pass == Pass::Cached {
            // A client that searches from the same place would win the next race, too.
            cache.scatter_first_section(self.class, self.host);
        }
        Ok(self.search(cache))
    }

    /// Posts the CAS, with the actions before and after it.
    fn commit(&mut self, cache: &mut NodeCache, commit: Commit) -> Step<Grant> {
        let full_span = match commit {
            Commit::Open { span } => cache.pop_unhinted_full(span / SECTION_SPANS),
            _ => None,
        };
        let (expected, desired) = (cache.word(commit.at()), commit.desired(cache, self.host, full_span));
        let mut action = Action::commit(commit.at(), expected, desired);
        let mut key = None;
        match commit {
            // No other client can allocate in the span before it is open, so A8 may be posted
            // before the CAS.
            Commit::Chunks { span, run, is_opener: true } => {
                let grant = self.fresh_grant(cache, first_of(span, run));
                key = Some(grant.key);
                action = self.record_before_commit(cache, grant, desired).then(action);
            }
            Commit::Chunks { span, .. }
                if !cache.is_owner_known(span) && !Mutation::AllocateForeign.is_active() =>
            {
                action = action.then(Action::read(WordAt::span_key(span), 1));
            }
            _ => {}
        }
        if let Some(full) = full_span {
            action = action.then(Action::probe(WordAt::Span(full)));
        }
        self.post(AllocState::Committing(Committing { commit, expected, desired, key, full_span }), action)
    }

    /// Handles the answer of the CAS.
    fn committing(
        &mut self,
        cache: &mut NodeCache,
        posted: Committing,
        result: StepResult<'_>,
    ) -> Next<Grant> {
        let Committing { commit, expected, desired, .. } = posted;
        let found = result.found();
        let won = found == expected;
        match commit {
            Commit::Chunks { span, run, is_opener } if won => {
                self.chunks_allocated(cache, (span, run, is_opener), posted, result)
            }
            Commit::Chunks { .. } => self.chunks_lost(cache, posted, found),
            Commit::Open { span } => {
                self.learn_section(cache, commit.at(), won, desired, found)?;
                if won {
                    Ok(self.opened(cache, span, posted.full_span, result))
                } else {
                    self.overtaken(cache)
                }
            }
            Commit::Whole { section, group } => {
                self.learn_section(cache, commit.at(), won, desired, found)?;
                if won { Ok(self.group_allocated(cache, section, group)) } else { self.overtaken(cache) }
            }
        }
    }

    /// Handles the success of A2. If it has set the full hint of another span, A5 of that span
    /// follows.
    fn opened(
        &mut self,
        cache: &mut NodeCache,
        span: u32,
        full_span: Option<u32>,
        result: StepResult<'_>,
    ) -> Step<Grant> {
        if let (Some(full), (_, Some(word))) = (full_span, result.found_then())
            && let Some((hint, action)) = Hint::recheck_full(full, SpanWord(word), cache)
        {
            return self.post(AllocState::ClearingFull(hint, span), action);
        }
        self.allocate_first(cache, span)
    }

    /// Handles the success of A7.
    fn group_allocated(&mut self, cache: &mut NodeCache, section: u32, group: AlignedRun) -> Step<Grant> {
        let (chunk, class) = (first_of_group(section, group), self.class);
        let grant = match self.fixed_group {
            Some(fixed) => Grant { chunk, class, key: fixed.key.unwrap_or(Key(0)) },
            None => self.fresh_grant(cache, chunk),
        };
        self.record(cache, grant)
    }

    fn fresh_grant(&self, cache: &mut NodeCache, chunk: u32) -> Grant {
        Grant { chunk, class: self.class, key: cache.fresh_key(self.class) }
    }

    /// Handles the success of A1, or of A3 if this operation has opened the span.
    fn chunks_allocated(
        &mut self,
        cache: &mut NodeCache,
        (span, run, is_opener): (u32, AlignedRun, bool),
        posted: Committing,
        result: StepResult<'_>,
    ) -> Next<Grant> {
        let (at, chunk) = (posted.commit.at(), first_of(span, run));
        let changed = cache.change_span(span, SpanWord(posted.desired));
        changed.map_err(|cause| damaged(at, posted.desired, cause))?;
        self.mark_opening_saved(cache, span, is_opener);
        self.has_opened = is_opener;
        if is_opener {
            cache.learn_owner(span, KeyEntry::closed(cache.tenant()));
        }
        // The owner cannot change while this host has an extent in the span, so it may be checked
        // now.
        if let (false, (_, Some(entry))) = (is_opener, result.found_then()) {
            cache.learn_owner(span, KeyEntry(entry));
            if !KeyEntry(entry).is_owned_by(cache.tenant()) {
                return Ok(self.free_foreign(cache, span, run));
            }
        }
        if let Some(key) = posted.key {
            cache.mark_saved(at);
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

    /// Frees chunks of another tenant's span, which were not returned to the caller.
    fn free_foreign(&mut self, cache: &NodeCache, span: u32, run: AlignedRun) -> Step<Grant> {
        let freed = Freed::Chunks { span, mask: run.mask(), run };
        let (commit, action) = FreeCommit::begin(self.host, freed, self.lost, cache);
        self.post(AllocState::FreeingForeign(commit), action)
    }

    /// Handles the answer of the free of foreign chunks.
    fn foreign_freed(
        &mut self,
        cache: &mut NodeCache,
        mut commit: FreeCommit,
        result: StepResult<'_>,
    ) -> Next<Grant> {
        match commit.step(cache, result)? {
            FreeProgress::Post(action) => Ok(self.post(AllocState::FreeingForeign(commit), action)),
            FreeProgress::Done => Ok(self.search(cache)),
            FreeProgress::Overtaken => {
                lose(&mut self.lost)?;
                let (commit, action) = FreeCommit::begin(self.host, commit.freed(), self.lost, cache);
                Ok(self.post(AllocState::FreeingForeign(commit), action))
            }
        }
    }

    /// A3: allocates the first chunks of the span that A2 has opened. The cached word may be out of
    /// date; then the CAS fails and returns the present word.
    fn allocate_first(&mut self, cache: &mut NodeCache, span: u32) -> Step<Grant> {
        let run = AlignedRun::new(0, self.class.order()).unwrap_or(AlignedRun::single(0));
        self.commit(cache, Commit::Chunks { span, run, is_opener: true })
    }

    /// Marks the record of A2 as one that may be overwritten. It is needed only until A3 is done.
    fn mark_opening_saved(&self, cache: &mut NodeCache, span: u32, is_opener: bool) {
        let section = span / SECTION_SPANS;
        let log = cache.section(section).log().ok().flatten();
        let is_opening = log.is_some_and(|log| {
            log.op == LogOp::Open
                && log.host == self.host
                && log.run == AlignedRun::single(place_in_section(span))
        });
        if is_opener && is_opening {
            cache.mark_saved(WordAt::Section(section));
        }
    }

    /// Handles a race that A1 or A3 has lost.
    fn chunks_lost(&mut self, cache: &mut NodeCache, posted: Committing, found: u64) -> Next<Grant> {
        let Commit::Chunks { span, is_opener, .. } = posted.commit else {
            panic!("{posted:?} allocates no chunks")
        };
        let at = WordAt::Span(span);
        lose(&mut self.lost)?;
        cache.learn(at, found)?;
        let is_closed = SpanWord(found).is_closed();
        if is_opener {
            // Between A2 and A3 only this client may change the word, so the cached word was out of
            // date.
            return if is_closed {
                Ok(self.allocate_first(cache, span))
            } else {
                Err(damaged(at, found, Damage::UnexpectedWriter))
            };
        }
        if Mutation::AllocateFromStale.is_active() {
            let action = Action::commit(at, found, posted.desired);
            return Ok(self.post(AllocState::Committing(Committing { expected: found, ..posted }), action));
        }
        let times = match self.last_losses {
            Some((last, times)) if last == span => times + 1,
            _ => 1,
        };
        self.last_losses = Some((span, times));
        if times > CONTENDED_AFTER && self.search.avoid != Some(span) && !is_closed {
            self.search.avoid = Some(span);
            if let Some((hint, action)) = Hint::set_contended(span, cache) {
                return Ok(self.post(AllocState::HintingInSearch(hint), action));
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
    ) -> Next<Grant> {
        // A READ may tear a word. Damage is found by the CAS, which does not.
        cache.learn_sections(first, count, result).ok();
        self.search.fresh = self.search.scanned + count;
        Ok(self.search(cache))
    }

    fn surveyed(&mut self, cache: &mut NodeCache, section: u32, result: StepResult<'_>) -> Next<Grant> {
        cache.learn_survey(section, 1, result).ok();
        // A4 of a span that another client has filled: that client may never set the hint. Rule H:
        // the section's word was read before the spans.
        let full = cache.find_unhinted_full(section, result).and_then(|span| Hint::set_full(span, cache));
        Ok(match full {
            Some((hint, action)) => self.post(AllocState::HintingInSearch(hint), action),
            None => self.search(cache),
        })
    }
}

/// The first chunk of a run of a span, counted over the node.
fn first_of(span: u32, run: AlignedRun) -> u32 {
    span * SPAN_CHUNKS + u32::from(run.first())
}

/// The first chunk of a group of a section's spans, counted over the node.
fn first_of_group(section: u32, group: AlignedRun) -> u32 {
    section * SECTION_CHUNKS + u32::from(group.first()) * SPAN_CHUNKS
}
