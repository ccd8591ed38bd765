//! L: copies a record that is still needed to the full log before it is overwritten.
//!
//! A record is needed if it names an owner: *alloc* in a span's word, *alloc* and *open* in a
//! section's.

use aquifer_fabric::Host;

use super::{ATTEMPTS_MAX, Action, Mutation, OpError, StepResult, WordAt};
use crate::cache::NodeCache;
use crate::size::{SECTION_SPANS, SPAN_CHUNKS};
use crate::word::{InlineLog, LogEntry, LogOp, SectionWord, SpanWord};

/// A record that is being copied to the log.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(super) struct Flush {
    host: Host,
    at: WordAt,
    entry: WordAt,
    lost: u32,
    state: FlushState,
}

/// The step in progress.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum FlushState {
    /// Reads the entry, to check whether it has the record already.
    ProbingEntry,
    /// Reads the word again. If it is unchanged, the entry has no newer record.
    ProbingWord { entry: u64 },
    /// Swaps the entry, expecting the value that was read.
    WritingEntry { entry: u64 },
}

/// The outcome of a step.
#[derive(Debug)]
pub(super) enum FlushProgress {
    Post(Action),
    /// The word may be changed now.
    Done,
    /// The word has changed. It is cached as found.
    Overtaken,
}

impl Flush {
    /// Begins the copy of the record in the cached word; `None` if it need not be copied.
    pub(super) fn begin(host: Host, at: WordAt, cache: &NodeCache) -> Option<(Self, Action)> {
        if cache.is_saved(at) || Mutation::SkipFlush.is_active() {
            return None;
        }
        let entry = entry_of(at, cache.word(at))?;
        let flush = Self { host, at, entry, lost: 0, state: FlushState::ProbingEntry };
        Some((flush, Action::probe(entry)))
    }

    pub(super) fn step(
        &mut self,
        cache: &mut NodeCache,
        result: StepResult<'_>,
    ) -> Result<FlushProgress, OpError> {
        if result.words().is_empty() {
            // Only the mutation BlindFlush posts a WRITE, which has no answer.
            return Ok(self.done(cache));
        }
        let (word, found) = (cache.word(self.at), result.found());
        Ok(match self.state {
            FlushState::ProbingEntry if LogEntry(found).is_record_of(word) => self.done(cache),
            FlushState::ProbingEntry if Mutation::BlindFlush.is_active() => self.write_entry(cache, found),
            FlushState::ProbingEntry => {
                self.state = FlushState::ProbingWord { entry: found };
                FlushProgress::Post(Action::probe(self.at))
            }
            FlushState::ProbingWord { entry } if found == word => self.write_entry(cache, entry),
            FlushState::ProbingWord { .. } => {
                cache.learn(self.at, found)?;
                FlushProgress::Overtaken
            }
            FlushState::WritingEntry { entry } if found == entry => self.done(cache),
            FlushState::WritingEntry { .. } => {
                self.lost += 1;
                if self.lost > ATTEMPTS_MAX {
                    return Err(OpError::Busy { attempts: ATTEMPTS_MAX });
                }
                self.state = FlushState::ProbingEntry;
                FlushProgress::Post(Action::probe(self.entry))
            }
        })
    }

    fn write_entry(&mut self, cache: &mut NodeCache, entry: u64) -> FlushProgress {
        let desired = LogEntry::of(cache.word(self.at), cache.nonce(self.host)).0;
        self.state = FlushState::WritingEntry { entry };
        if Mutation::BlindFlush.is_active() {
            return FlushProgress::Post(Action::write(self.entry, desired));
        }
        FlushProgress::Post(Action::cas(self.entry, entry, desired))
    }

    fn done(&self, cache: &mut NodeCache) -> FlushProgress {
        cache.mark_saved(self.at);
        FlushProgress::Done
    }
}

/// The entry for the record of a word; `None` if the record is not needed after a change.
fn entry_of(at: WordAt, word: u64) -> Option<WordAt> {
    match at {
        WordAt::Span(span) => match SpanWord(word).log() {
            Ok(Some(InlineLog { op: LogOp::Alloc, run, .. })) => {
                Some(WordAt::chunk_entry(span * SPAN_CHUNKS + u32::from(run.first())))
            }
            _ => None,
        },
        WordAt::Section(section) => match SectionWord(word).log() {
            Ok(Some(InlineLog { op: LogOp::Alloc | LogOp::Open, run, .. })) => {
                Some(WordAt::span_entry(section * SECTION_SPANS + u32::from(run.first())))
            }
            _ => None,
        },
        WordAt::Log(_) | WordAt::Key(_) => None,
    }
}
