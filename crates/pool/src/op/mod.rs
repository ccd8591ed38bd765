//! The pool's state machines: [`AllocOp`] allocates an extent, [`AllocManyOp`] and [`StretchOp`] several, [`FreeOp`] frees extents,
//! [`RecoverOp`] frees what a dead host held.
//!
//! They do no I/O. `start` and `step` return the next [`Action`] on the node's memory; the driver
//! carries it out and comes back with a [`StepResult`]. The steps are named in `docs/formats/pool.md`
//! (A1, F2 …), and the code names them where it takes them.

mod action;
mod alloc;
mod flush;
mod free;
mod hint;
mod many;
mod mutation;
mod ready;
mod recover;
mod stretch;
mod word_at;

use aquifer_fabric::{Host, Key, KeyEntry};

pub use action::{Access, Action, StepResult};
pub use alloc::AllocOp;
pub use free::{FreeOp, Outcomes};
pub use many::{AllocManyOp, Several};
pub use mutation::Mutation;
pub use recover::{Held, HeldOp, RecoverOp, Recovered};
pub use stretch::StretchOp;
pub use word_at::WordAt;

use crate::cache::NodeCache;
use crate::error::Damage;
use crate::size::{SECTION_CHUNKS, SECTION_SPANS, SPAN_CHUNKS, SizeClass};

/// How often one operation may lose a race before it fails with [`OpError::Busy`].
pub const ATTEMPTS_MAX: u32 = 4096;
/// Races lost at one span after which a client marks it as contended, and looks elsewhere.
pub const CONTENDED_AFTER: u32 = 3;
/// Most words that one READ of an [`Action`] asks for.
pub const READ_WORDS_MAX: u32 = 512;
/// Most sections of one survey ([`Action::survey`]).
pub const SURVEY_SECTIONS_MAX: u32 = READ_WORDS_MAX / (2 * SECTION_SPANS);

/// What comes next.
#[derive(Clone, PartialEq, Eq, Debug)]
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
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct Grant {
    /// Its first chunk, counted over the node.
    pub chunk: u32,
    /// Its size.
    pub class: SizeClass,
    /// Its key; [`Key`] zero if it has none.
    pub key: Key,
}

/// Why an operation did nothing.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
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

/// A CAS that revokes the key of an entry. The entry of a span still says whose the span is.
fn revocation(at: WordAt, entry: u64) -> Action {
    let desired = if at.is_key_of_span() { KeyEntry(entry).without_key().0 } else { 0 };
    Action::cas(at, entry, desired)
}
