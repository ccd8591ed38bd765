//! What of all that a host has is to be given back.

use std::collections::BTreeSet;
use std::ops::Range;

use aquifer_fabric::{Host, Key};

use super::{RecoverOp, Recovered};
use crate::cache::NodeCache;
use crate::op::{Grant, Machine, Step, StepResult};
use crate::size::{SECTION_CHUNKS, SECTION_SPANS};

/// Something that a host has of a node, as words and log tell it. What is found again, the same in all its parts, is the same thing.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub enum Held {
    /// An extent, by the key in its entry.
    Extent(Grant),
    /// One without a key: whoever takes it has not got so far as to write one, or whoever gives it back has struck it out. By the entry of its log, which is written
    /// with a key, and never looks as it once did.
    Unkeyed {
        /// What was taken.
        grant: Grant,
        /// The entry.
        entry: u64,
    },
    /// A span that it is about to open, or to close.
    Span {
        /// Which, counted over the node.
        span: u32,
        /// Its word.
        word: u64,
        /// When the record was made that tells of it.
        stamp: u16,
    },
}

impl Held {
    /// An extent, and its entry in the log.
    pub(super) fn extent(grant: Grant, entry: Option<&u64>) -> Self {
        match entry {
            Some(entry) if grant.key == Key(0) => Self::Unkeyed { grant, entry: *entry },
            _ => Self::Extent(grant),
        }
    }

    /// The section that it is in.
    #[must_use]
    pub const fn section(&self) -> u32 {
        match self {
            Self::Extent(grant) | Self::Unkeyed { grant, .. } => grant.chunk / SECTION_CHUNKS,
            Self::Span { span, .. } => *span / SECTION_SPANS,
        }
    }
}

/// What is to be done with what is found.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
pub(super) enum Quest {
    /// All is given back.
    #[default]
    All,
    /// These are; it is another's who is alive.
    Only(BTreeSet<Held>),
    /// It is told of; nothing is changed.
    Tell(Vec<Held>),
}

impl Quest {
    /// A section is looked at, perhaps once more.
    pub fn begin_section(&mut self, section: u32) {
        let Self::Tell(told) = self else { return };
        while told.pop_if(|held| held.section() == section).is_some() {}
    }

    /// Whether extents of the section were told of that have no key.
    pub fn has_told_of_unkeyed(&self, section: u32) -> bool {
        let Self::Tell(told) = self else { return false };
        let mut last = told.iter().rev().take_while(|held| held.section() == section);
        last.any(|held| matches!(held, Held::Unkeyed { .. }))
    }

    /// Those that have a key now are not told of.
    pub fn forget_unkeyed(&mut self, section: u32, has_key: impl Fn(Grant) -> bool) {
        let Self::Tell(told) = self else { return };
        let first = told.iter().rposition(|held| held.section() != section).map_or(0, |at| at + 1);
        let is_keyed = |held: &mut Held| matches!(held, Held::Unkeyed { grant, .. } if has_key(*grant));
        told.extract_if(first.., is_keyed).for_each(drop);
    }

    /// Something was found; whether it is to be given back. What is impossible is nothing that anybody knows of.
    pub fn meet(&mut self, held: Option<Held>) -> bool {
        match self {
            Self::All => true,
            Self::Only(these) => held.is_some_and(|held| these.contains(&held)),
            Self::Tell(told) => {
                told.extend(held);
                false
            }
        }
    }

    /// How much was told of.
    pub const fn told(&self) -> usize {
        match self {
            Self::Tell(told) => told.len(),
            Self::All | Self::Only(_) => 0,
        }
    }

    /// What was told of since then was in doubt.
    pub fn take_back(&mut self, since: usize) {
        if let Self::Tell(told) = self {
            told.truncate(since);
        }
    }

    /// Whether anything is changed at all.
    pub const fn gives(&self) -> bool {
        !matches!(self, Self::Tell(_))
    }
}

/// Finds all that a host has in some sections of a node. Others, and the host itself, may go on meanwhile.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct HeldOp(RecoverOp);

impl HeldOp {
    /// What this host has in these sections.
    #[must_use]
    pub fn new(host: Host, sections: Range<u32>) -> Self {
        let op = RecoverOp { quest: Quest::Tell(Vec::new()), ..RecoverOp::new(host, host) };
        Self(op.within(sections))
    }

    fn told(&mut self, step: Step<Recovered>) -> Step<Vec<Held>> {
        match step {
            Step::Post(action) => Step::Post(action),
            Step::Done(outcome) => Step::Done(outcome.map(|_| match std::mem::take(&mut self.0.quest) {
                Quest::Tell(told) => told,
                Quest::All | Quest::Only(_) => Vec::new(),
            })),
        }
    }
}

impl Machine for HeldOp {
    type Output = Vec<Held>;

    fn start(&mut self, cache: &mut NodeCache) -> Step<Vec<Held>> {
        let step = self.0.start(cache);
        self.told(step)
    }

    fn step(&mut self, cache: &mut NodeCache, result: StepResult<'_>) -> Step<Vec<Held>> {
        let step = self.0.step(cache, result);
        self.told(step)
    }
}
