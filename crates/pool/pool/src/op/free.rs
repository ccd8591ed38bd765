//! Frees extents that share a control word (K, F1 to F6).
//!
//! Extents of one span are freed together: one batch revokes their keys (K), and one CAS frees
//! those whose keys were revoked (F1, F3). Extents of whole spans are freed one after another (F5).

mod commit;

use aquifer_fabric::{Host, Key, KeyEntry};
use smallvec::SmallVec;

use super::{
    Action, Grant, Mutation, Next, OpError, StateMachine, Step, StepResult, WordAt, damaged, lose,
    revocation, word_of,
};
use crate::cache::NodeCache;
use crate::size::{SECTION_CHUNKS, SECTION_SPANS, SPAN_CHUNKS};
use crate::word::{AlignedRun, InlineLog, LogOp, SectionWord, SpanState, SpanWord, record_of};
pub(super) use commit::{FreeCommit, FreeProgress, Freed};

/// The outcome for each extent, in the order of the arguments.
pub type Outcomes = SmallVec<[Result<(), OpError>; 1]>;

/// Frees extents that share a control word.
///
/// If the operation is dropped before it is done, some extents may be free, and their span may be
/// left half closed.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct FreeOp {
    host: Host,
    /// The control word that the extents share.
    at: WordAt,
    outcomes: Outcomes,
    /// Extents that are not freed yet. One CAS frees extents that do not overlap, or one group of
    /// spans.
    waiting: Extents,
    /// Extents that the next CAS frees.
    chosen: Extents,
    /// Whether this operation has read the cached word, so that it may refuse a free.
    is_fresh: bool,
    lost: u32,
    /// The record that the word had when another process began this free. As long as the word has
    /// that record, no other client has used the place since.
    begun_at: Option<u32>,
    state: FreeState,
}

type Extents = SmallVec<[ExtentToFree; 1]>;

/// An extent that is to be freed.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
struct ExtentToFree {
    /// The extent's index among the outcomes.
    index: usize,
    grant: Grant,
    /// The extent's place in the word.
    run: AlignedRun,
    is_revoked: bool,
}

/// The step in progress.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
enum FreeState {
    Idle,
    /// Reads the word: by the cached word some extents cannot be freed, or the free is resumed.
    Probing,
    /// F5: reads the spans of the group, which must be closed.
    ReadingGroup,
    /// K: revokes the keys; the second value has the entries that the CASes expect.
    Revoking(Freed, SmallVec<[u64; 1]>),
    /// F1 to F6: frees the extents whose keys were revoked.
    Committing(FreeCommit),
}

impl FreeOp {
    /// Creates an operation that frees an extent of `host`.
    #[must_use]
    pub fn new(host: Host, grant: Grant) -> Self {
        Self::many(host, [grant])
    }

    /// Creates an operation that frees extents of `host` that are all in the same control word.
    ///
    /// # Panics
    /// If there is no extent, or they are in different words.
    #[must_use]
    pub fn many(host: Host, grants: impl IntoIterator<Item = Grant>) -> Self {
        let (mut outcomes, mut waiting, mut at) = (Outcomes::new(), Extents::new(), None);
        for (index, grant) in grants.into_iter().enumerate() {
            assert_eq!(*at.get_or_insert(word_of(grant)), word_of(grant), "the extents share a control word");
            let is_of_class = grant.key == Key(0) || grant.key.class() == Some(grant.class.k());
            let run = run_of(grant).filter(|_| is_of_class);
            outcomes.push(if run.is_some() { Ok(()) } else { Err(OpError::NotAllocated) });
            waiting.extend(run.map(|run| ExtentToFree { index, grant, run, is_revoked: false }));
        }
        Self {
            host,
            at: at.expect("there is something to free"),
            outcomes,
            waiting,
            chosen: Extents::new(),
            is_fresh: false,
            lost: 0,
            begun_at: None,
            state: FreeState::Idle,
        }
    }

    /// Resumes a free that was begun when the word had this record, and that may be half done: the
    /// key may be revoked already. If the word has another record now, or gets one meanwhile, the
    /// outcome is `NotAllocated`, although the extent may still be allocated to this host.
    #[must_use]
    pub fn resumed(self, record: u32) -> Self {
        Self { begun_at: Some(record), ..self }
    }
}

impl StateMachine for FreeOp {
    type Output = Outcomes;

    fn start(&mut self, cache: &mut NodeCache) -> Step<Outcomes> {
        let (WordAt::Span(place) | WordAt::Section(place) | WordAt::Log(place) | WordAt::Key(place)) =
            self.at;
        let section = if matches!(self.at, WordAt::Span(_)) { place / SECTION_SPANS } else { place };
        if section >= cache.section_count() {
            self.refuse_waiting(OpError::NotAllocated);
        }
        if self.begun_at.is_some() && !self.waiting.is_empty() {
            return self.post(FreeState::Probing, Action::probe(self.at));
        }
        self.next(cache)
    }

    fn step(&mut self, cache: &mut NodeCache, result: StepResult<'_>) -> Step<Outcomes> {
        let next = match std::mem::replace(&mut self.state, FreeState::Idle) {
            FreeState::Idle => panic!("no action is in flight"),
            FreeState::Probing => self.probed(cache, result.found()),
            FreeState::ReadingGroup => self.group_read(cache, result),
            FreeState::Revoking(freed, expected) => Ok(self.revoked(cache, freed, &expected, result)),
            FreeState::Committing(commit) => self.committing(cache, commit, result),
        };
        next.unwrap_or_else(|error| {
            self.refuse_chosen(error);
            self.refuse_waiting(error);
            self.done()
        })
    }
}

impl FreeOp {
    fn post(&mut self, state: FreeState, action: Action) -> Step<Outcomes> {
        self.state = state;
        Step::Post(action)
    }

    fn done(&mut self) -> Step<Outcomes> {
        Step::Done(Ok(std::mem::take(&mut self.outcomes)))
    }

    fn refuse(&mut self, extent: ExtentToFree, error: OpError) {
        self.outcomes[extent.index] = Err(error);
    }

    fn refuse_chosen(&mut self, error: OpError) {
        std::mem::take(&mut self.chosen).into_iter().for_each(|extent| self.refuse(extent, error));
    }

    fn refuse_waiting(&mut self, error: OpError) {
        std::mem::take(&mut self.waiting).into_iter().for_each(|extent| self.refuse(extent, error));
    }

    fn probed(&mut self, cache: &mut NodeCache, found: u64) -> Next<Outcomes> {
        cache.learn(self.at, found)?;
        let is_untouched = self.begun_at.is_none_or(|record| record_of(found) == record);
        if !is_untouched && !Mutation::ResumeBlind.is_active() {
            return Err(OpError::NotAllocated);
        }
        self.is_fresh = true;
        Ok(self.next(cache))
    }

    /// Frees the next of the waiting extents.
    fn next(&mut self, cache: &mut NodeCache) -> Step<Outcomes> {
        self.chosen.clear();
        let mut mask = 0;
        for extent in std::mem::take(&mut self.waiting) {
            // A CAS of a section's word frees one group.
            let is_next = match self.at {
                WordAt::Span(_) => mask & extent.run.mask() == 0,
                _ => self.chosen.is_empty(),
            };
            match self.judge(cache, extent.run) {
                Ok(()) if !is_next => self.waiting.push(extent),
                Ok(()) => {
                    mask |= extent.run.mask();
                    self.chosen.push(extent);
                }
                Err(error) if self.is_fresh => self.refuse(extent, error),
                // The cached word may be out of date.
                Err(_) => {
                    self.waiting.push(extent);
                }
            }
        }
        match (self.chosen.is_empty(), self.waiting.is_empty()) {
            (false, _) => self.free_chosen(cache),
            (true, false) => self.post(FreeState::Probing, Action::probe(self.at)),
            (true, true) => self.done(),
        }
    }

    fn free_chosen(&mut self, cache: &mut NodeCache) -> Step<Outcomes> {
        match self.at {
            WordAt::Span(_) => {
                let freed = self.chunks();
                self.revoke(cache, freed)
            }
            _ => {
                let grant = self.chosen[0].grant;
                let count = grant.class.chunks() / SPAN_CHUNKS;
                let read = Action::read(WordAt::Span(grant.chunk / SPAN_CHUNKS), count);
                self.post(FreeState::ReadingGroup, read)
            }
        }
    }

    fn chunks(&self) -> Freed {
        let first = self.chosen[0];
        let mask = self.chosen.iter().map(|extent| extent.run.mask()).sum();
        Freed::Chunks { span: first.grant.chunk / SPAN_CHUNKS, mask, run: first.run }
    }

    fn group_read(&mut self, cache: &mut NodeCache, result: StepResult<'_>) -> Next<Outcomes> {
        let ExtentToFree { grant, run, .. } = self.chosen[0];
        let (first, count) = (grant.chunk / SPAN_CHUNKS, grant.class.chunks() / SPAN_CHUNKS);
        cache.learn_spans(first, count, result)?;
        let is_closed = (first..first + count).all(|span| cache.span(span).is_closed());
        if !is_closed && !Mutation::FreeUnchecked.is_active() {
            self.refuse_chosen(OpError::NotAllocated);
            return Ok(self.next(cache));
        }
        let group = if Mutation::FreeHalf.is_active() { AlignedRun::single(run.first()) } else { run };
        Ok(self.revoke(cache, Freed::Whole { section: grant.chunk / SECTION_CHUNKS, group }))
    }

    /// Checks that the inline log does not contradict an allocation of this run to this host.
    fn judge_log(&self, log: Option<InlineLog>, run: AlignedRun) -> Result<(), OpError> {
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

    /// Whether this place may be freed, by the cached word.
    fn judge(&self, cache: &NodeCache, run: AlignedRun) -> Result<(), OpError> {
        if Mutation::FreeUnchecked.is_active() {
            return Ok(());
        }
        let word = cache.word(self.at);
        let (is_allocated, log) = match self.at {
            WordAt::Span(_) => (SpanWord(word).holds(run), SpanWord(word).log()),
            _ => (SectionWord(word).all(run, SpanState::Full), SectionWord(word).log()),
        };
        if !is_allocated {
            return Err(OpError::NotAllocated);
        }
        self.judge_log(log.map_err(|cause| damaged(self.at, word, cause))?, run)
    }

    /// K: revokes the keys, before the place is free.
    fn revoke(&mut self, cache: &NodeCache, freed: Freed) -> Step<Outcomes> {
        let tenant = cache.tenant();
        self.post_revocation(cache, freed, |extent| KeyEntry::open(extent.grant.key, tenant).0)
    }

    fn post_revocation(
        &mut self,
        cache: &NodeCache,
        freed: Freed,
        entry: impl Fn(&ExtentToFree) -> u64,
    ) -> Step<Outcomes> {
        let is_keyed = |extent: &&ExtentToFree| extent.grant.key != Key(0) && !extent.is_revoked;
        let keyed = self.chosen.iter().filter(is_keyed).filter(|_| !Mutation::SkipRevoke.is_active());
        let (mut expected, mut action) = (SmallVec::new(), Action::default());
        for extent in keyed {
            let before = entry(extent);
            expected.push(before);
            action = action.then(revocation(WordAt::key_of(extent.grant), before));
        }
        if action.is_empty() {
            return self.commit(cache, freed);
        }
        self.post(FreeState::Revoking(freed, expected), action)
    }

    /// K has been executed. An extent whose entry had another key, or none, is not allocated any
    /// more.
    fn revoked(
        &mut self,
        cache: &mut NodeCache,
        freed: Freed,
        expected: &[u64],
        result: StepResult<'_>,
    ) -> Step<Outcomes> {
        let mut answers = expected.iter().zip(result.words());
        for mut extent in std::mem::take(&mut self.chosen) {
            if extent.is_revoked || extent.grant.key == Key(0) {
                self.chosen.push(extent);
                continue;
            }
            let Some((expected, found)) = answers.next() else { continue };
            let key = KeyEntry(*found).key();
            let was_revoked_before = self.begun_at.is_some() && key == Key(0);
            if found == expected || was_revoked_before || Mutation::FreeUnchecked.is_active() {
                extent.is_revoked = true;
                self.chosen.push(extent);
            } else if self.begun_at.is_some() && key == extent.grant.key && lose(&mut self.lost).is_ok() {
                // The client that allocated it was of another tenant.
                let found = *found;
                self.chosen.push(extent);
                return self.post_revocation(cache, freed, |_| found);
            } else {
                self.refuse(extent, OpError::NotAllocated);
            }
        }
        match freed {
            _ if self.chosen.is_empty() => self.next(cache),
            Freed::Chunks { .. } => {
                let freed = self.chunks();
                self.commit(cache, freed)
            }
            Freed::Whole { .. } | Freed::Span { .. } => self.commit(cache, freed),
        }
    }

    fn commit(&mut self, cache: &NodeCache, freed: Freed) -> Step<Outcomes> {
        let (commit, action) = FreeCommit::begin(self.host, freed, self.lost, cache);
        self.post(FreeState::Committing(commit), action)
    }

    fn committing(
        &mut self,
        cache: &mut NodeCache,
        mut commit: FreeCommit,
        result: StepResult<'_>,
    ) -> Next<Outcomes> {
        match commit.step(cache, result)? {
            FreeProgress::Post(action) => Ok(self.post(FreeState::Committing(commit), action)),
            FreeProgress::Done => Ok(self.next(cache)),
            FreeProgress::Overtaken if self.begun_at.is_some() => Err(OpError::NotAllocated),
            FreeProgress::Overtaken => {
                lose(&mut self.lost)?;
                // The word is cached as it was found.
                self.is_fresh = true;
                self.waiting.append(&mut self.chosen);
                Ok(self.next(cache))
            }
        }
    }
}

/// The extent's place in its word; `None` if it is not aligned to its size.
fn run_of(grant: Grant) -> Option<AlignedRun> {
    let span = grant.chunk / SPAN_CHUNKS;
    let first = if grant.class.is_within_span() {
        grant.chunk % SPAN_CHUNKS
    } else if grant.chunk.is_multiple_of(SPAN_CHUNKS) {
        span % SECTION_SPANS
    } else {
        return None;
    };
    AlignedRun::new(u8::try_from(first).ok()?, grant.class.order())
}
