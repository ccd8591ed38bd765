//! L: before a record that may still be needed is written over, it is copied to the full log.
//!
//! Needed is what says who holds something: *alloc* in a span's word, *alloc* and *open* in a section's.

use aquifer_fabric::Host;

use super::{ATTEMPTS_MAX, Action, Mutation, OpError, StepResult, WordAt};
use crate::cache::NodeCache;
use crate::size::{SECTION_SPANS, SPAN_CHUNKS};
use crate::word::{InlineLog, LogEntry, LogOp, SectionWord, SpanWord};

/// A record on its way to the log.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(super) struct Flush {
    host: Host,
    at: WordAt,
    entry: WordAt,
    lost: u32,
    state: State,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum State {
    /// Is it there already?
    LookUp,
    /// Is the word still the same? Then no record that is newer was in the entry.
    LookAgain { entry: u64 },
    /// Unless the entry has changed since.
    Put { entry: u64 },
}

/// What a step led to.
#[derive(Debug)]
pub(super) enum Flushed {
    Post(Action),
    /// The word may be changed.
    Done,
    /// The word has changed, and is remembered as it is now.
    Overtaken,
}

impl Flush {
    /// What must be done before the word, as it is remembered, is changed; `None` if nothing.
    pub(super) fn begin(host: Host, at: WordAt, cache: &NodeCache) -> Option<(Self, Action)> {
        if cache.is_settled(at) || Mutation::SkipFlush.is_active() {
            return None;
        }
        let entry = entry_of(at, cache.word(at))?;
        let flush = Self { host, at, entry, lost: 0, state: State::LookUp };
        Some((flush, Action::probe(entry)))
    }

    pub(super) fn step(&mut self, cache: &mut NodeCache, result: StepResult<'_>) -> Result<Flushed, OpError> {
        if result.words().is_empty() {
            // Only the mutation writes.
            return Ok(self.done(cache));
        }
        let (word, found) = (cache.word(self.at), result.found());
        Ok(match self.state {
            State::LookUp if LogEntry(found).tells(word) => self.done(cache),
            State::LookUp if Mutation::BlindFlush.is_active() => self.put(cache, found),
            State::LookUp => {
                self.state = State::LookAgain { entry: found };
                Flushed::Post(Action::probe(self.at))
            }
            State::LookAgain { entry } if found == word => self.put(cache, entry),
            State::LookAgain { .. } => {
                cache.learn(self.at, found)?;
                Flushed::Overtaken
            }
            State::Put { entry } if found == entry => self.done(cache),
            State::Put { .. } => {
                self.lost += 1;
                if self.lost > ATTEMPTS_MAX {
                    return Err(OpError::Busy { attempts: ATTEMPTS_MAX });
                }
                self.state = State::LookUp;
                Flushed::Post(Action::probe(self.entry))
            }
        })
    }

    fn put(&mut self, cache: &mut NodeCache, entry: u64) -> Flushed {
        let desired = LogEntry::of(cache.word(self.at), cache.nonce(self.host)).0;
        self.state = State::Put { entry };
        if Mutation::BlindFlush.is_active() {
            return Flushed::Post(Action::write(self.entry, desired));
        }
        Flushed::Post(Action::cas(self.entry, entry, desired))
    }

    fn done(&self, cache: &mut NodeCache) -> Flushed {
        cache.settle(self.at);
        Flushed::Done
    }
}

/// Where the word's record belongs; `None` if nobody needs it when the word goes on.
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
