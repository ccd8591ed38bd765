//! The pool's state machines, which do no I/O.
//!
//! [`AllocOp`] allocates an extent, [`AllocManyOp`] and [`StretchOp`] several. [`FreeOp`] frees
//! extents. [`RecoverOp`] frees the holdings of a dead host, and [`HoldingsOp`] lists those of a
//! host.
//!
//! `start` and `step` return the next [`Action`] on the node's memory. The driver executes it and
//! calls `step` with the [`StepResult`]. `docs/formats/pool.md` describes the steps of the protocol
//! by the names that the code uses (A1, F2 …).

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

pub use action::{Action, StepResult, WordAccess};
pub use alloc::AllocOp;
pub use free::{FreeOp, Outcomes};
pub use many::{AllocManyOp, GrantBatch};
pub use mutation::Mutation;
pub use recover::{Holding, HoldingsOp, RecoverOp, Recovered};
pub use stretch::StretchOp;
pub use word_at::WordAt;

use crate::cache::NodeCache;
use crate::error::Damage;
use crate::size::{SECTION_CHUNKS, SECTION_SPANS, SPAN_CHUNKS, SizeClass};

/// Lost races after which an operation fails with [`OpError::Busy`].
pub const ATTEMPTS_MAX: u32 = 4096;
/// Races lost at one span after which a client sets its contended hint and searches elsewhere.
pub const CONTENDED_AFTER: u32 = 3;
/// Most words of one READ of an [`Action`].
pub const READ_WORDS_MAX: u32 = 512;
/// Most sections of one survey ([`Action::survey`]).
pub const SURVEY_SECTIONS_MAX: u32 = READ_WORDS_MAX / (2 * SECTION_SPANS);

/// The next step of an operation.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Step<T> {
    /// An action that the driver executes. Then it calls [`StateMachine::step`] with the result.
    Post(Action),
    /// The operation has ended.
    Done(Result<T, OpError>),
}

/// An operation on a node's pool as a pure state machine.
pub trait StateMachine {
    /// The result of the operation.
    type Output;

    /// The first step.
    fn start(&mut self, cache: &mut NodeCache) -> Step<Self::Output>;

    /// The next step after `result`, the answer to the last action.
    ///
    /// # Panics
    /// If no action was posted, or the result is of another action.
    fn step(&mut self, cache: &mut NodeCache, result: StepResult<'_>) -> Step<Self::Output>;
}

/// An extent of a node, by its first chunk.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct Grant {
    /// The first chunk, counted over the node.
    pub chunk: u32,
    /// The size.
    pub class: SizeClass,
    /// The key; 0 if the extent has none.
    pub key: Key,
}

/// Why an operation failed.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum OpError {
    /// There is no free extent of the size.
    Full,
    /// The extent is not allocated.
    NotAllocated,
    /// The extent belongs to another host, which is the payload.
    NotOurs(Host),
    /// The operation lost [`ATTEMPTS_MAX`] races.
    Busy {
        /// Races lost.
        attempts: u32,
    },
    /// A control word is illegal.
    Damaged {
        /// The word's place.
        at: WordAt,
        /// The word.
        word: u64,
        /// The reason why the word is illegal.
        cause: Damage,
    },
}

/// The next step, or the error with which the operation ends.
type Next<T> = Result<Step<T>, OpError>;

/// Counts a lost race; an error after [`ATTEMPTS_MAX`].
fn lose(lost: &mut u32) -> Result<(), OpError> {
    *lost += 1;
    if *lost > ATTEMPTS_MAX { Err(OpError::Busy { attempts: ATTEMPTS_MAX }) } else { Ok(()) }
}

/// The error for an illegal word.
pub(crate) fn damaged(at: WordAt, word: u64, cause: impl Into<Damage>) -> OpError {
    OpError::Damaged { at, word, cause: cause.into() }
}

/// The control word in which an extent is allocated.
pub(crate) const fn word_of(grant: Grant) -> WordAt {
    if grant.class.is_within_span() {
        WordAt::Span(grant.chunk / SPAN_CHUNKS)
    } else {
        WordAt::Section(grant.chunk / SECTION_CHUNKS)
    }
}

/// The entry in `logs[]` for an extent's record.
pub(crate) const fn record_at(grant: Grant) -> WordAt {
    if grant.class.is_within_span() {
        WordAt::chunk_entry(grant.chunk)
    } else {
        WordAt::span_entry(grant.chunk / SPAN_CHUNKS)
    }
}

/// A CAS that revokes the key of an entry. The entry of a span keeps the owner of the span.
fn revocation(at: WordAt, entry: u64) -> Action {
    let desired = if at.is_key_of_span() { KeyEntry(entry).without_key().0 } else { 0 };
    Action::cas(at, entry, desired)
}
