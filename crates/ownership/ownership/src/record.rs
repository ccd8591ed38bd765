//! The directory's record of a segment, and the transactions that change it.

use serde::{Deserialize, Serialize};

use crate::Life;
use crate::Mutation;

/// The directory's record of a segment: its owner, and the hand-over that has begun.
///
/// From the receipt of a [`Message::Transfer`](crate::Message::Transfer) until the target has
/// confirmed it, the target is the owner, although the record names the source.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub struct SegmentRecord {
    /// The last owner that was confirmed.
    pub owner: Life,
    /// The number of the last hand-over that was confirmed or retracted.
    pub generation: u64,
    /// The target of the next hand-over, if it has begun.
    pub intent: Option<Life>,
}

/// A transaction on a record. Fails if the life of its author has ended.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Change {
    /// The owner intends to hand the segment over.
    Intend {
        /// The owner.
        owner: Life,
        /// The number of the hand-over: one more than the record's.
        generation: u64,
        /// The target.
        to: Life,
    },
    /// The target of an intent has received the segment.
    Confirm {
        /// The target.
        to: Life,
        /// The number of the hand-over.
        generation: u64,
    },
    /// The owner retracts an intent. The number of the hand-over is not used again.
    Retract {
        /// The owner.
        owner: Life,
        /// The number of the hand-over.
        generation: u64,
        /// Why the target does not own the segment.
        because: Retraction,
    },
}

/// Why the target of an intent does not own the segment.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Retraction {
    /// The transfer was not sent, or the target refuses it for ever.
    Refused,
    /// The life of the target has ended, so the target owns nothing. The transaction checks this.
    Fenced,
}

/// Facts about a segment that its record does not show.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Evidence {
    /// A target that has refused a hand-over for ever, and the number of that hand-over.
    pub refused: Option<(Life, u64)>,
    /// The life of this host, if the host does not have the segment: its agent has lost it, or has
    /// received no answer to the transaction that made it the owner.
    pub unheld: Option<Life>,
}

impl SegmentRecord {
    /// The record of a new segment, whose hand-overs have numbers above `generation`.
    #[must_use]
    pub const fn new(owner: Life, generation: u64) -> Self {
        Self { owner, generation, intent: None }
    }

    /// Whether no host has the segment or can get it by a hand-over: its owner is dead, and the
    /// target of the intent is dead as well, or has refused the hand-over.
    #[must_use]
    pub fn is_lost(&self, evidence: Evidence, mut lives: impl FnMut(Life) -> bool) -> bool {
        let has_refused = |to: Life| evidence.refused == Some((to, self.generation + 1));
        let is_owned = Some(self.owner) != evidence.unheld && lives(self.owner);
        let may_arrive = |to: Life| !has_refused(to) && !Mutation::RestoreUnfenced.is_active();
        !is_owned && !self.intent.is_some_and(|to| may_arrive(to) && lives(to))
    }

    /// Carries out a transaction, if the record permits it. `lives` returns whether a life lasts.
    /// Returns whether the transaction was carried out.
    #[must_use]
    pub fn apply(&mut self, change: &Change, lives: impl Fn(Life) -> bool) -> bool {
        let next = self.generation + 1;
        let is_permitted = match *change {
            Change::Intend { owner, generation, .. } => {
                let is_free = self.intent.is_none() || Mutation::ReplaceIntent.is_active();
                owner == self.owner && generation == next && is_free && lives(owner)
            }
            Change::Confirm { to, generation } => self.intent == Some(to) && generation == next && lives(to),
            Change::Retract { owner, generation, because } => {
                let is_fenced = match because {
                    Retraction::Refused => true,
                    Retraction::Fenced => {
                        self.intent.is_some_and(|to| !lives(to)) || Mutation::RetakeUnfenced.is_active()
                    }
                };
                let is_next = generation == next || Mutation::RetractAny.is_active();
                owner == self.owner && self.intent.is_some() && is_next && is_fenced && lives(owner)
            }
        };
        if !is_permitted {
            return false;
        }
        match *change {
            Change::Intend { to, .. } => self.intent = Some(to),
            Change::Confirm { to, .. } => *self = Self { owner: to, generation: next, intent: None },
            Change::Retract { .. } => *self = Self { generation: next, intent: None, ..*self },
        }
        true
    }
}
