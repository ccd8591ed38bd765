//! The scope of a recovery: the holdings of a host that are freed, or only listed.

use std::collections::BTreeSet;
use std::ops::Range;

use aquifer_fabric::{Host, Key};

use super::{RecoverOp, Recovered};
use crate::cache::NodeCache;
use crate::op::{Grant, StateMachine, Step, StepResult};
use crate::size::{SECTION_CHUNKS, SECTION_SPANS};

/// A holding: memory of a node that a host owns, by the words and the log.
///
/// It is an extent, or a span that the host is opening or closing. The leak scan lists the holdings
/// of a live host, and frees those that no ledger names.
///
/// If two passes find equal values, they found the same allocation: an allocation that was freed
/// and made again has another key, log entry, or timestamp.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub enum Holding {
    /// An extent with the key in its entry.
    Extent(Grant),
    /// An extent without a key: it is being allocated and has none yet, or it is being freed and
    /// its key is revoked already. Its log entry is written together with the key, and no two
    /// values of an entry are equal.
    Unkeyed {
        /// The extent, whose key is zero.
        grant: Grant,
        /// The extent's entry in `logs[]`.
        entry: u64,
    },
    /// A span that the host is opening or closing.
    Span {
        /// The span, counted over the node.
        span: u32,
        /// The span's word.
        word: u64,
        /// The timestamp of the record that names the host.
        stamp: u16,
    },
}

impl Holding {
    /// Creates the holding of an extent with its entry in the log.
    pub(super) fn extent(grant: Grant, entry: Option<&u64>) -> Self {
        match entry {
            Some(entry) if grant.key == Key(0) => Self::Unkeyed { grant, entry: *entry },
            _ => Self::Extent(grant),
        }
    }

    /// The section of the holding.
    #[must_use]
    pub const fn section(&self) -> u32 {
        match self {
            Self::Extent(grant) | Self::Unkeyed { grant, .. } => grant.chunk / SECTION_CHUNKS,
            Self::Span { span, .. } => *span / SECTION_SPANS,
        }
    }
}

/// The use of the holdings that a [`RecoverOp`] finds.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
pub(super) enum RecoveryScope {
    /// Frees all holdings: the host is dead.
    #[default]
    All,
    /// Frees only these holdings: the host is alive and has leaked them.
    Only(BTreeSet<Holding>),
    /// Frees no holding, and lists all.
    List(Vec<Holding>),
}

impl RecoveryScope {
    /// Begins a section. If the section is read again, its holdings are removed from the list.
    pub fn begin_section(&mut self, section: u32) {
        let Self::List(listed) = self else { return };
        while listed.pop_if(|holding| holding.section() == section).is_some() {}
    }

    /// Whether extents without keys were listed in the section.
    pub fn has_listed_unkeyed(&self, section: u32) -> bool {
        let Self::List(listed) = self else { return false };
        let mut of_section = listed.iter().rev().take_while(|holding| holding.section() == section);
        of_section.any(|holding| matches!(holding, Holding::Unkeyed { .. }))
    }

    /// Removes from the list those extents of the section that were without a key and have one now.
    pub fn remove_keyed(&mut self, section: u32, has_key: impl Fn(Grant) -> bool) {
        let Self::List(listed) = self else { return };
        let first = listed.iter().rposition(|holding| holding.section() != section).map_or(0, |at| at + 1);
        let is_keyed =
            |holding: &mut Holding| matches!(holding, Holding::Unkeyed { grant, .. } if has_key(*grant));
        listed.extract_if(first.., is_keyed).for_each(drop);
    }

    /// Whether to free a holding; lists the holding if this is a list. `None` stands for an extent
    /// that the words describe but that cannot exist.
    pub fn admit(&mut self, holding: Option<Holding>) -> bool {
        match self {
            Self::All => true,
            Self::Only(these) => holding.is_some_and(|holding| these.contains(&holding)),
            Self::List(listed) => {
                listed.extend(holding);
                false
            }
        }
    }

    /// The length of the list.
    pub const fn listed_count(&self) -> usize {
        match self {
            Self::List(listed) => listed.len(),
            Self::All | Self::Only(_) => 0,
        }
    }

    /// Shortens the list to a former length, because the words read since then are read again.
    pub fn truncate_list(&mut self, count: usize) {
        if let Self::List(listed) = self {
            listed.truncate(count);
        }
    }

    /// Whether the node's words may be changed.
    pub const fn is_freeing(&self) -> bool {
        !matches!(self, Self::List(_))
    }
}

/// Lists all holdings of a host in some sections of a node, while the host and others change them.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct HoldingsOp(RecoverOp);

impl HoldingsOp {
    /// Creates an operation that lists the holdings of `host` in these sections.
    #[must_use]
    pub fn new(host: Host, sections: Range<u32>) -> Self {
        let op = RecoverOp { scope: RecoveryScope::List(Vec::new()), ..RecoverOp::new(host, host) };
        Self(op.within(sections))
    }

    fn listed(&mut self, step: Step<Recovered>) -> Step<Vec<Holding>> {
        match step {
            Step::Post(action) => Step::Post(action),
            Step::Done(outcome) => Step::Done(outcome.map(|_| match std::mem::take(&mut self.0.scope) {
                RecoveryScope::List(listed) => listed,
                RecoveryScope::All | RecoveryScope::Only(_) => Vec::new(),
            })),
        }
    }
}

impl StateMachine for HoldingsOp {
    type Output = Vec<Holding>;

    fn start(&mut self, cache: &mut NodeCache) -> Step<Vec<Holding>> {
        let step = self.0.start(cache);
        self.listed(step)
    }

    fn step(&mut self, cache: &mut NodeCache, result: StepResult<'_>) -> Step<Vec<Holding>> {
        let step = self.0.step(cache, result);
        self.listed(step)
    }
}
