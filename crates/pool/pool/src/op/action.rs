//! Actions of a state machine on the node's memory, and their answers.

use smallvec::SmallVec;

use super::{SURVEY_SECTIONS_MAX, WordAt};
use crate::size::SECTION_SPANS;

/// One operation on the node's memory.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum WordAccess {
    /// Compare and swap. Answered by the word that was found.
    Cas {
        /// The word.
        at: WordAt,
        /// The value that the word must have.
        expected: u64,
        /// The new value.
        desired: u64,
    },
    /// Fetch and add of 0: atomic, and in order with every CAS. Answered by the word that was
    /// found.
    Probe {
        /// The word.
        at: WordAt,
    },
    /// READ of neighbouring words. Answered by the words, which may be torn and of different
    /// moments.
    Read {
        /// The first word.
        at: WordAt,
        /// Number of words.
        count: u32,
    },
    /// WRITE of neighbouring words. Has no answer.
    Write {
        /// The first word.
        at: WordAt,
        /// The new value of the first word.
        first: u64,
        /// Number of words that follow.
        others: u8,
        /// The new value of each of these.
        value: u64,
    },
}

impl WordAccess {
    /// The words that a WRITE writes; none for other operations.
    pub fn written(&self) -> impl Iterator<Item = u64> + use<> {
        let (first, others, value) = match *self {
            Self::Write { first, others, value, .. } => (Some(first), others, value),
            _ => (None, 0, 0),
        };
        first.into_iter().chain(std::iter::repeat_n(value, others.into()))
    }
}

/// Operations that are posted together and take effect in this order. The answer has the words of
/// each, in the same order.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
pub struct Action(SmallVec<[WordAccess; 4]>);

impl Action {
    /// The operations, in order.
    #[must_use]
    pub fn accesses(&self) -> &[WordAccess] {
        &self.0
    }

    /// Whether there are no operations.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The first CAS, as word, expected and desired value.
    #[must_use]
    pub fn first_cas(&self) -> Option<(WordAt, u64, u64)> {
        self.0.iter().find_map(|access| match *access {
            WordAccess::Cas { at, expected, desired } => Some((at, expected, desired)),
            _ => None,
        })
    }

    fn one(access: WordAccess) -> Self {
        let mut accesses = SmallVec::new();
        accesses.push(access);
        Self(accesses)
    }

    pub(crate) fn cas(at: WordAt, expected: u64, desired: u64) -> Self {
        Self::one(WordAccess::Cas { at, expected, desired })
    }

    pub(crate) fn probe(at: WordAt) -> Self {
        Self::one(WordAccess::Probe { at })
    }

    pub(crate) fn read(at: WordAt, count: u32) -> Self {
        Self::one(WordAccess::Read { at, count })
    }

    pub(crate) fn write(at: WordAt, word: u64) -> Self {
        Self::write_run(at, word, 0, 0)
    }

    /// Writes `first`, then `others` words with `value`.
    pub(crate) fn write_run(at: WordAt, first: u64, others: u8, value: u64) -> Self {
        Self::one(WordAccess::Write { at, first, others, value })
    }

    /// Reads the words of the spans of neighbouring sections, 16 for each, then the entries of
    /// these spans in `keys[]`.
    ///
    /// # Panics
    /// If there are more than [`SURVEY_SECTIONS_MAX`] sections.
    pub(crate) fn survey(section: u32, count: u32) -> Self {
        assert!(count <= SURVEY_SECTIONS_MAX, "{count} sections are too many for one survey");
        let spans = Self::read(WordAt::Span(section * SECTION_SPANS), count * SECTION_SPANS);
        (section..section + count).fold(spans, |action, section| {
            action.then(Self::read(WordAt::span_key(section * SECTION_SPANS), SECTION_SPANS))
        })
    }

    /// Appends the operations of `next`.
    #[must_use]
    pub(crate) fn then(mut self, next: Self) -> Self {
        self.0.extend(next.0);
        self
    }
}

/// The answer to an [`Action`]: the words that its operations found or read, in their order.
#[derive(Clone, Copy, Debug)]
pub struct StepResult<'a>(pub &'a [u64]);

impl<'a> StepResult<'a> {
    /// The first word of the answer.
    ///
    /// # Panics
    /// If there is no word: the driver has answered another action.
    pub(crate) fn found(self) -> u64 {
        *self.0.first().expect("the driver answers each CAS and probe")
    }

    /// The first two words of the answer; the second is `None` if there is only one.
    pub(crate) fn found_then(self) -> (u64, Option<u64>) {
        (self.found(), self.0.get(1).copied())
    }

    /// All words of the answer.
    pub(crate) const fn words(self) -> &'a [u64] {
        self.0
    }

    /// All words of the answer to READs of `count` words.
    ///
    /// # Panics
    /// If there are more or fewer: the driver has answered another action.
    pub(crate) fn words_read(self, count: u32) -> &'a [u64] {
        assert_eq!(self.0.len(), count as usize, "the driver answers a READ with all its words");
        self.0
    }
}
