//! The state machines of the pool: [`AllocOp`] takes an extent, [`StretchOp`] a larger one, [`FreeOp`] gives one back, [`RecoverOp`] gives back what a dead host held.
//!
//! They do no I/O. `start` and `step` return the next [`Action`] on the node's memory; whoever drives
//! them carries it out and comes back with a [`StepResult`]. The steps are named in `docs/formats/pool.md`
//! (A1, F2 …), and the code names them where it takes them.

mod alloc;
mod chain;
mod flush;
mod free;
mod give;
mod hint;
mod many;
mod mutation;
mod owed;
mod plant;
mod ready;
mod recover;
mod settle;
mod several;
mod stretch;

use std::fmt;

use aquifer_fabric::{Host, Key, KeyEntry};

pub use alloc::AllocOp;
pub use chain::{Chain, Chained};
pub use free::FreeOp;
pub use many::{AllocManyOp, Several};
pub use mutation::Mutation;
pub use plant::Plant;
pub use recover::{Held, HeldOp, RecoverOp, Recovered};
pub use settle::SettleOp;
pub use several::FreeManyOp;
pub use stretch::StretchOp;

use crate::cache::NodeCache;
use crate::error::Damage;
use crate::layout::SECTION_ENTRIES;
use crate::size::{SECTION_CHUNKS, SECTION_SPANS, SPAN_CHUNKS, SizeClass};

/// How often one operation may lose a race before it gives up.
pub const ATTEMPTS_MAX: u32 = 4096;
/// Races lost at one span after which a client marks it as contended, and goes elsewhere.
pub const CONTENDED_AFTER: u32 = 3;
/// Most words of one [`Action::Read`].
pub const READ_WORDS_MAX: u32 = 512;
/// Most sections of one [`Action::Survey`].
pub const SURVEY_SECTIONS_MAX: u32 = READ_WORDS_MAX / (2 * SECTION_SPANS);

/// Names a control word, or an entry of the full log.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum WordAt {
    /// That of the section with this index.
    Section(u32),
    /// That of the span with this index, counted over all sections.
    Span(u32),
    /// The entry of `logs[]` with this index, counted over all sections.
    Log(u32),
    /// The entry of `keys[]` with this index, likewise.
    Key(u32),
}

impl WordAt {
    /// A section's entries before those of its spans.
    const SPAN_ENTRIES: u32 = 16;
    /// A section's entries before those of its chunks.
    const CHUNK_ENTRIES: u32 = Self::SPAN_ENTRIES + SECTION_SPANS;

    /// The entry of a span, for the record of a group that begins with it.
    #[must_use]
    pub const fn span_entry(span: u32) -> Self {
        Self::Log(span / SECTION_SPANS * SECTION_ENTRIES + Self::SPAN_ENTRIES + span % SECTION_SPANS)
    }

    /// The entry of a chunk, for the record of an extent that begins with it.
    #[must_use]
    pub const fn chunk_entry(chunk: u32) -> Self {
        Self::Log(chunk / SECTION_CHUNKS * SECTION_ENTRIES + Self::CHUNK_ENTRIES + chunk % SECTION_CHUNKS)
    }

    /// The key of a section that is one extent.
    #[must_use]
    pub const fn section_key(section: u32) -> Self {
        Self::Key(section * SECTION_ENTRIES)
    }

    /// The key of an extent that begins with this span; and whose the span is, whether or not it is one.
    #[must_use]
    pub const fn span_key(span: u32) -> Self {
        Self::Key(span / SECTION_SPANS * SECTION_ENTRIES + Self::SPAN_ENTRIES + span % SECTION_SPANS)
    }

    /// The key of an extent that begins with this chunk.
    #[must_use]
    pub const fn chunk_key(chunk: u32) -> Self {
        Self::Key(chunk / SECTION_CHUNKS * SECTION_ENTRIES + Self::CHUNK_ENTRIES + chunk % SECTION_CHUNKS)
    }

    /// The entry of an extent's key.
    #[must_use]
    pub const fn key_of(grant: Grant) -> Self {
        if grant.class.is_within_span() {
            Self::chunk_key(grant.chunk)
        } else if grant.class.k() < SizeClass::SECTION.k() {
            Self::span_key(grant.chunk / SPAN_CHUNKS)
        } else {
            Self::section_key(grant.chunk / SECTION_CHUNKS)
        }
    }
}

impl fmt::Display for WordAt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Section(index) => write!(f, "the word of section {index}"),
            Self::Span(index) => write!(f, "the word of span {index}"),
            Self::Log(index) => write!(f, "log entry {index}"),
            Self::Key(index) => write!(f, "key entry {index}"),
        }
    }
}

/// What a machine wants done to the node's memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Action {
    /// Compare and swap. Answered by [`StepResult::Found`].
    Cas {
        /// The word.
        at: WordAt,
        /// What it must be.
        expected: u64,
        /// What it becomes.
        desired: u64,
    },
    /// Learn a word's value, atomically and in order with every CAS (a fetch-and-add of nothing). Answered by
    /// [`StepResult::Found`].
    Probe {
        /// The word.
        at: WordAt,
    },
    /// Read neighbouring words without any promise that they are of one moment. Answered by [`StepResult::Words`].
    Read {
        /// The first word.
        at: WordAt,
        /// How many; at most [`READ_WORDS_MAX`].
        count: u32,
    },
    /// Compare and swap, then read a word. Answered by [`StepResult::FoundThen`].
    CasThen {
        /// The word.
        at: WordAt,
        /// What it must be.
        expected: u64,
        /// What it becomes.
        desired: u64,
        /// The word to be read after that.
        then: WordAt,
    },
    /// Compare and swap, then learn a word's value as [`Action::Probe`] does. Answered by [`StepResult::FoundThen`].
    CasProbe {
        /// The word.
        at: WordAt,
        /// What it must be.
        expected: u64,
        /// What it becomes.
        desired: u64,
        /// The word to be learnt after that.
        probe: WordAt,
    },
    /// Write entries, then compare and swap. Answered by [`StepResult::Found`].
    WriteThen {
        /// What is written.
        writes: Writes,
        /// The word that is swapped after that.
        at: WordAt,
        /// What it must be.
        expected: u64,
        /// What it becomes.
        desired: u64,
    },
    /// Write what is found in a span that is opened, then compare and swap. Answered by [`StepResult::Found`].
    PlantThen {
        /// What is written.
        plant: Plant,
        /// The word that is swapped after that.
        at: WordAt,
        /// What it must be.
        expected: u64,
        /// What it becomes.
        desired: u64,
    },
    /// Compare and swap a span's word again and again. Answered by [`StepResult::Chained`].
    Chain(Chain),
    /// Read the words of the spans of neighbouring sections, then the spans' keys. Answered by [`StepResult::Words`]: 16 for each section, and
    /// 16 for each.
    Survey {
        /// The first section.
        section: u32,
        /// How many; at most [`SURVEY_SECTIONS_MAX`].
        count: u32,
    },
    /// Write entries of the log and of the keys. Answered by [`StepResult::Written`].
    Write(Writes),
    /// Compare and swap entries of the keys. Answered by [`StepResult::Struck`]: those that have changed stay as they are.
    Strike(Strikes),
    /// The same, then read the entries of the log that belong to them. Answered by [`StepResult::StruckThen`].
    StrikeThen(Strikes),
}

impl Action {
    /// A CAS with a look at another word behind it.
    pub(crate) fn then_probe(self, probe: WordAt) -> Self {
        match self {
            Self::Cas { at, expected, desired } => Self::CasProbe { at, expected, desired, probe },
            other => other,
        }
    }
}

/// Keys that are struck out at once: one owner's, of neighbouring entries.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Strikes {
    first: u32,
    /// The half of the entries that says whose they are.
    owner: u32,
    /// Zero for entries that are left alone.
    keys: [u32; Self::MAX],
    /// The keys that come in their place; zero for none.
    next: [u32; Self::MAX],
}

impl Strikes {
    /// Most entries of one action.
    pub const MAX: usize = 32;

    /// Those that strike out all keys that are among these entries: one, since all chunks of a span are one tenant's.
    pub(crate) fn among(first: WordAt, entries: &[u64], strikes: &mut Vec<Self>) {
        let WordAt::Key(first) = first else { panic!("{first} is no key entry") };
        let mut last: Option<Self> = None;
        for (place, entry) in entries[..entries.len().min(Self::MAX)].iter().enumerate() {
            let (owner, key) = ((entry >> 32) as u32, KeyEntry(*entry).key().0);
            if key == 0 {
                continue;
            }
            if last.is_none_or(|last| last.owner != owner) {
                strikes.extend(last.replace(Self {
                    first,
                    owner,
                    keys: [0; Self::MAX],
                    next: [0; Self::MAX],
                }));
            }
            if let Some(last) = &mut last {
                last.keys[place] = key;
            }
        }
        strikes.extend(last);
    }

    /// Those of these extents, which are all of one span and this client's tenant's, with fresh ones in their place.
    pub(crate) fn of_span(span: u32, grants: impl Iterator<Item = Grant>, cache: &mut NodeCache) -> Self {
        let WordAt::Key(first) = WordAt::chunk_key(span * SPAN_CHUNKS) else { unreachable!("it is a key's") };
        let owner = (KeyEntry::shut(cache.tenant()).0 >> 32) as u32;
        let mut strikes = Self { first, owner, keys: [0; Self::MAX], next: [0; Self::MAX] };
        for grant in grants {
            let place = (grant.chunk % SPAN_CHUNKS) as usize;
            strikes.keys[place] = grant.key.0;
            strikes.next[place] = cache.fresh_key(grant.class).0;
        }
        strikes
    }

    /// The key that comes in the place of an extent's.
    pub(crate) const fn next(&self, grant: Grant) -> Key {
        Key(self.next[(grant.chunk % SPAN_CHUNKS) as usize])
    }

    /// The first of the entries of the log that belong to them; there are [`Self::MAX`].
    #[must_use]
    pub const fn log(&self) -> WordAt {
        WordAt::Log(self.first)
    }

    /// Which of them were struck out, by what each swap has found: a bit for each entry, counted from the first.
    pub fn struck(self, found: impl IntoIterator<Item = u64>) -> u32 {
        let was_struck = |((at, expected, _), found): ((WordAt, u64, u64), u64)| match at {
            WordAt::Key(entry) if found == expected => 1 << (entry - self.first),
            _ => 0,
        };
        self.swaps().zip(found).map(was_struck).sum()
    }

    /// The words, what each must be, and what it becomes.
    pub fn swaps(self) -> impl Iterator<Item = (WordAt, u64, u64)> {
        let swap = move |(at, (key, next))| {
            let owner = u64::from(self.owner) << 32;
            (WordAt::Key(at), owner | u64::from(key), owner | u64::from(next))
        };
        (self.first..).zip(self.keys.into_iter().zip(self.next)).filter(|(_, (key, _))| *key != 0).map(swap)
    }
}

/// What is written at once.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Writes {
    parts: [Option<Part>; Self::PARTS_MAX],
}

/// Neighbouring words that are written.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Part {
    /// The first.
    pub at: WordAt,
    /// What it becomes.
    pub value: u64,
    /// How many others follow it.
    pub more: u8,
    /// What these become.
    pub rest: u64,
}

impl Writes {
    /// Most parts of one action.
    pub const PARTS_MAX: usize = 3;

    /// The parts.
    pub fn parts(&self) -> impl Iterator<Item = Part> {
        self.parts.iter().flatten().copied()
    }

    /// One word more.
    #[must_use]
    pub(crate) fn and(self, at: WordAt, value: u64) -> Self {
        self.and_run(Part { at, value, more: 0, rest: 0 })
    }

    #[must_use]
    pub(crate) fn and_run(mut self, part: Part) -> Self {
        let free = self.parts.iter_mut().find(|part| part.is_none());
        *free.expect("no action writes more parts") = Some(part);
        self
    }
}

impl Part {
    /// How many words.
    #[must_use]
    pub const fn count(self) -> usize {
        self.more as usize + 1
    }

    /// The words.
    pub fn words(self) -> impl Iterator<Item = u64> {
        std::iter::once(self.value).chain(std::iter::repeat_n(self.rest, self.more.into()))
    }
}

/// What came of an action.
#[derive(Clone, Copy, Debug)]
pub enum StepResult<'a> {
    /// The value that a CAS or probe found.
    Found(u64),
    /// The same, and the word that was read after it.
    FoundThen(u64, u64),
    /// The words that were read.
    Words(&'a [u64]),
    /// It is there.
    Written,
    /// Which of the swaps were done, as [`Chain::outcome`] tells.
    Chained(Chained),
    /// Which of the entries were as expected: a bit for each, as [`Strikes::struck`] tells.
    Struck(u32),
    /// The same, and the words that were read after it.
    StruckThen(u32, &'a [u64]),
}

/// What comes next.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Step<T> {
    /// Carry this out, and come back with the result.
    Post(Action),
    /// The operation is over.
    Done(Result<T, OpError>),
}

/// An operation on a node's pool as a pure state machine.
pub trait Machine {
    /// What it yields.
    type Output;

    /// The first step.
    fn start(&mut self, cache: &mut NodeCache) -> Step<Self::Output>;

    /// The step after `result`, which answers the action of the step before.
    ///
    /// # Panics
    /// If no action is under way, or it was another: the driver is wrong.
    fn step(&mut self, cache: &mut NodeCache, result: StepResult<'_>) -> Step<Self::Output>;
}

/// An extent as the machines know it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Grant {
    /// Its first chunk, counted over the node.
    pub chunk: u32,
    /// Its size.
    pub class: SizeClass,
    /// Its key; [`Key`] zero if it has none.
    pub key: Key,
}

/// Why an operation did nothing.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum OpError {
    /// No free extent of the size.
    Full,
    /// No such extent.
    NotAllocated,
    /// The extent belongs to this host.
    NotOurs(Host),
    /// It lost too many races.
    Busy {
        /// How many.
        attempts: u32,
    },
    /// A control word is impossible.
    Damaged {
        /// Which.
        at: WordAt,
        /// What it holds.
        word: u64,
        /// What is wrong with it.
        cause: Damage,
    },
}

impl StepResult<'_> {
    /// The answer to a CAS or probe.
    ///
    /// # Panics
    /// If the driver answered another action than it was given.
    pub(crate) fn found(self) -> u64 {
        match self {
            Self::Found(word) | Self::FoundThen(word, _) => word,
            other => panic!("the driver answered a CAS or probe with {other:?}"),
        }
    }

    /// The answer to a strike.
    ///
    /// # Panics
    /// Likewise.
    pub(crate) fn struck(self) -> u32 {
        match self {
            Self::Struck(struck) | Self::StruckThen(struck, _) => struck,
            other => panic!("the driver answered a strike with {other:?}"),
        }
    }
}

impl StepResult<'_> {
    /// The answer to a chain.
    ///
    /// # Panics
    /// Likewise.
    pub(crate) fn chained(self) -> Chained {
        match self {
            Self::Chained(chained) => chained,
            other => panic!("the driver answered a chain with {other:?}"),
        }
    }
}

impl<'a> StepResult<'a> {
    /// The answer to a READ.
    ///
    /// # Panics
    /// If the driver answered another action than it was given.
    fn words(self) -> &'a [u64] {
        match self {
            Self::Words(words) => words,
            other => panic!("the driver answered a READ with {other:?}"),
        }
    }
}

/// Count a lost race.
fn lose(lost: &mut u32) -> Result<(), OpError> {
    *lost += 1;
    if *lost > ATTEMPTS_MAX { Err(OpError::Busy { attempts: ATTEMPTS_MAX }) } else { Ok(()) }
}

pub(crate) fn damaged(at: WordAt, word: u64, cause: impl Into<Damage>) -> OpError {
    OpError::Damaged { at, word, cause: cause.into() }
}

/// The word that an extent is taken in.
pub(crate) const fn word_of(grant: Grant) -> WordAt {
    if grant.class.is_within_span() {
        WordAt::Span(grant.chunk / SPAN_CHUNKS)
    } else {
        WordAt::Section(grant.chunk / SECTION_CHUNKS)
    }
}

/// The entry of the log for an extent's record.
pub(crate) const fn record_at(grant: Grant) -> WordAt {
    if grant.class.is_within_span() {
        WordAt::chunk_entry(grant.chunk)
    } else {
        WordAt::span_entry(grant.chunk / SPAN_CHUNKS)
    }
}
