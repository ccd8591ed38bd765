//! F1 to F6: frees by a CAS that expects the word by which the free was decided, and then closes
//! the span and changes its hints.

use aquifer_fabric::Host;

use crate::cache::{NodeCache, place_in_section};
use crate::error::Damage;
use crate::op::flush::{Flush, FlushProgress};
use crate::op::hint::Hint;
use crate::op::{ATTEMPTS_MAX, Action, CONTENDED_AFTER, Mutation, OpError, StepResult, WordAt, damaged};
use crate::size::SECTION_SPANS;
use crate::word::{AlignedRun, SpanState, SpanWord};

/// The memory that one CAS frees.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(in crate::op) enum Freed {
    /// The chunks of `mask` of an open span. The log names `run`, one of the extents among them.
    Chunks { span: u32, mask: u32, run: AlignedRun },
    /// Spans that were allocated whole.
    Whole { section: u32, group: AlignedRun },
    /// A span that a dead host was opening or closing.
    Span { span: u32 },
}

/// A free in progress, from the copy of the record before (L) to the last hint.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(in crate::op) struct FreeCommit {
    host: Host,
    freed: Freed,
    /// Number of races lost so far.
    lost: u32,
    state: CommitState,
}

/// The step in progress.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum CommitState {
    /// L: copies the record that the CAS overwrites to the log.
    Flushing(Flush),
    /// F1, F3: the CAS of the span's word.
    FreeingChunks,
    /// F5: the CAS of the section's word.
    FreeingGroup,
    /// L before F4: copies the section's record to the log.
    FlushingClose(Flush),
    /// F4: the CAS of the section's word, which closes the span in it.
    Closing,
    /// F6: the CAS of the span's word to *ready*.
    MarkingReady,
    /// F2, C1, C2: changes a hint; the memory is free already.
    Hinting(Hint),
}

/// The outcome of a step.
#[derive(Debug)]
pub(in crate::op) enum FreeProgress {
    Post(Action),
    Done,
    /// The word has changed, and nothing was freed. It is cached as found.
    Overtaken,
}

/// The outcome of a step, or the error with which the free ends.
type CommitStep = Result<FreeProgress, OpError>;

impl FreeCommit {
    /// Begins to free memory that is allocated by the cached words. `lost`: races lost for it
    /// before.
    pub(in crate::op) fn begin(host: Host, freed: Freed, lost: u32, cache: &NodeCache) -> (Self, Action) {
        let mut commit = Self { host, freed, lost, state: CommitState::Closing };
        let action = match Flush::begin(host, commit.at(), cache) {
            Some((flush, action)) => {
                commit.state = CommitState::Flushing(flush);
                action
            }
            None => commit.commit(cache),
        };
        (commit, action)
    }

    pub(in crate::op) fn step(&mut self, cache: &mut NodeCache, result: StepResult<'_>) -> CommitStep {
        match self.state {
            CommitState::Flushing(mut flush) => Ok(match flush.step(cache, result)? {
                FlushProgress::Post(action) => self.post(CommitState::Flushing(flush), action),
                FlushProgress::Done => FreeProgress::Post(self.commit(cache)),
                FlushProgress::Overtaken => FreeProgress::Overtaken,
            }),
            CommitState::FreeingChunks => self.chunks_freed(cache, result.found()),
            CommitState::FreeingGroup => self.group_freed(cache, result.found()),
            CommitState::FlushingClose(mut flush) => match flush.step(cache, result)? {
                FlushProgress::Post(action) => Ok(self.post(CommitState::FlushingClose(flush), action)),
                FlushProgress::Done => Ok(self.post_close(cache)),
                FlushProgress::Overtaken => self.retry_close(cache),
            },
            CommitState::Closing => self.closed(cache, result.found()),
            CommitState::MarkingReady => self.marked_ready(cache, result.found()),
            CommitState::Hinting(mut hint) => Ok(match hint.step(cache, result) {
                Some(action) => self.post(CommitState::Hinting(hint), action),
                None => FreeProgress::Done,
            }),
        }
    }

    pub(in crate::op) const fn freed(&self) -> Freed {
        self.freed
    }

    fn post(&mut self, state: CommitState, action: Action) -> FreeProgress {
        self.state = state;
        FreeProgress::Post(action)
    }

    /// The word whose CAS frees the memory.
    fn at(&self) -> WordAt {
        match self.freed {
            Freed::Chunks { span, .. } => WordAt::Span(span),
            Freed::Whole { section, .. } => WordAt::Section(section),
            Freed::Span { span } => WordAt::Section(span / SECTION_SPANS),
        }
    }

    fn span(&self) -> u32 {
        match self.freed {
            Freed::Chunks { span, .. } | Freed::Span { span } => span,
            Freed::Whole { section, group } => section * SECTION_SPANS + u32::from(group.first()),
        }
    }

    fn commit(&mut self, cache: &NodeCache) -> Action {
        let at = self.at();
        let (state, desired) = match self.freed {
            Freed::Chunks { span, mask, run } => {
                let desired = cache.span(span).free_mask(mask, run, self.host);
                if desired.is_closed() && Mutation::CloseFirst.is_active() {
                    return self.close(cache, span);
                }
                (CommitState::FreeingChunks, desired.0)
            }
            Freed::Whole { section, group } => {
                (CommitState::FreeingGroup, cache.section(section).free(group, self.host).0)
            }
            Freed::Span { span } => return self.close(cache, span),
        };
        self.state = state;
        Action::commit(at, cache.word(at), desired)
    }

    fn chunks_freed(&mut self, cache: &mut NodeCache, found: u64) -> CommitStep {
        let Freed::Chunks { span, mask, run } = self.freed else { return Ok(FreeProgress::Done) };
        let before = cache.span(span);
        if found != before.0 {
            cache.learn(WordAt::Span(span), found)?;
            return Ok(FreeProgress::Overtaken);
        }
        let now = before.free_mask(mask, run, self.host);
        cache.change_span(span, now).map_err(|cause| damaged(WordAt::Span(span), now.0, cause))?;
        if now.is_closed() {
            let skip = Mutation::SkipClose.is_active() || Mutation::CloseFirst.is_active();
            return Ok(if skip { FreeProgress::Done } else { self.begin_close(cache) });
        }
        let hint = Hint::clear_full(span, before.is_full(), cache).or_else(|| match self.lost {
            0 => Hint::clear_contended(span, cache),
            1..=CONTENDED_AFTER => None,
            _ => Hint::set_contended(span, cache),
        });
        Ok(match hint {
            Some((hint, action)) => self.post(CommitState::Hinting(hint), action),
            None => FreeProgress::Done,
        })
    }

    fn group_freed(&mut self, cache: &mut NodeCache, found: u64) -> CommitStep {
        let Freed::Whole { section, group } = self.freed else { return Ok(FreeProgress::Done) };
        let (at, before) = (WordAt::Section(section), cache.section(section));
        if found != before.0 {
            cache.learn(at, found)?;
            return Ok(FreeProgress::Overtaken);
        }
        let now = before.free(group, self.host);
        cache.change_section(section, now).map_err(|cause| damaged(at, now.0, cause))?;
        Ok(FreeProgress::Done)
    }

    /// F4. Only the client that emptied the span does this. It overwrites hints that others set
    /// meanwhile.
    fn begin_close(&mut self, cache: &NodeCache) -> FreeProgress {
        let section = WordAt::Section(self.span() / SECTION_SPANS);
        match Flush::begin(self.host, section, cache) {
            Some((flush, action)) => self.post(CommitState::FlushingClose(flush), action),
            None => self.post_close(cache),
        }
    }

    fn post_close(&mut self, cache: &NodeCache) -> FreeProgress {
        let action = self.close(cache, self.span());
        FreeProgress::Post(action)
    }

    fn close(&mut self, cache: &NodeCache, span: u32) -> Action {
        self.state = CommitState::Closing;
        let section = span / SECTION_SPANS;
        let expected = cache.section(section);
        let desired = expected.close(place_in_section(span), self.host);
        Action::commit(WordAt::Section(section), expected.0, desired.0)
    }

    /// Whether this operation emptied the span itself, so that no other may close it.
    const fn has_emptied(&self) -> bool {
        matches!(self.freed, Freed::Chunks { .. })
    }

    /// Retries F4 after the section's word was changed by another client.
    fn retry_close(&mut self, cache: &NodeCache) -> CommitStep {
        if !self.has_emptied() {
            return Ok(FreeProgress::Overtaken);
        }
        self.lost += 1;
        if self.lost > ATTEMPTS_MAX {
            return Err(OpError::Busy { attempts: ATTEMPTS_MAX });
        }
        let (section, index) = (self.span() / SECTION_SPANS, place_in_section(self.span()));
        let word = cache.section(section);
        if word.state(index) == SpanState::Empty {
            return Err(damaged(WordAt::Section(section), word.0, Damage::UnexpectedWriter));
        }
        Ok(self.begin_close(cache))
    }

    fn closed(&mut self, cache: &mut NodeCache, found: u64) -> CommitStep {
        let (span, section) = (self.span(), self.span() / SECTION_SPANS);
        let (at, before) = (WordAt::Section(section), cache.section(section));
        if found != before.0 {
            cache.learn(at, found)?;
            if Mutation::CloseFromStale.is_active() && self.has_emptied() {
                let desired = before.close(place_in_section(span), self.host);
                return Ok(self.post(CommitState::Closing, Action::commit(at, found, desired.0)));
            }
            return self.retry_close(cache);
        }
        let now = before.close(place_in_section(span), self.host);
        cache.change_section(section, now).map_err(|cause| damaged(at, now.0, cause))?;
        let word = cache.span(span);
        if let Freed::Chunks { mask, run, .. } = self.freed
            && Mutation::CloseFirst.is_active()
        {
            let desired = word.free_mask(mask, run, self.host);
            return Ok(
                self.post(CommitState::FreeingChunks, Action::commit(WordAt::Span(span), word.0, desired.0))
            );
        }
        if word.is_ready() {
            return Ok(FreeProgress::Done);
        }
        let action = Action::commit(WordAt::Span(span), word.0, word.mark_ready(self.host).0);
        Ok(self.post(CommitState::MarkingReady, action))
    }

    /// F6. If the CAS failed, another client has marked the span already.
    fn marked_ready(&self, cache: &mut NodeCache, found: u64) -> CommitStep {
        let (span, before) = (self.span(), cache.span(self.span()));
        let learnt = if found == before.0 {
            cache.change_span(span, before.mark_ready(self.host))
        } else {
            cache.set_span(span, SpanWord(found))
        };
        learnt.map_err(|cause| damaged(WordAt::Span(span), found, cause))?;
        Ok(FreeProgress::Done)
    }
}
