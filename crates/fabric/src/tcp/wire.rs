//! What goes over an open connection: requests one way, answers and messages the other. All lengths are padded to multiples of 8 on the wire, so
//! that words stay aligned in the buffers of both ends and are never seen torn.

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::work::WorkError;

/// Bytes of a request's head.
pub const REQUEST_BYTES: usize = size_of::<Request>();
/// Bytes of an answer's head.
pub const ANSWER_BYTES: usize = size_of::<Answer>();

/// READ `len` bytes at `addr`.
pub const READ: u8 = 1;
/// WRITE the `len` bytes that follow to `addr`.
pub const WRITE: u8 = 2;
/// If the word at `addr` is `value`, store the word that follows.
pub const SWAP: u8 = 3;
/// Add `value` to the word at `addr`.
pub const ADD: u8 = 4;
/// Deliver the `len` bytes that follow.
pub const SEND: u8 = 5;
/// The initiator has taken `len` messages. Not answered, not counted.
pub const CREDIT: u8 = 6;
/// The initiator leaves in good order: its session ends. Not answered.
pub const BYE: u8 = 7;

/// The answer to the oldest unanswered request; with `len` bytes behind it if that was a READ.
pub const ANSWER: u8 = 1;
/// A message of `len` bytes, which follow.
pub const MESSAGE: u8 = 2;
/// The target goes away in good order, having done `value` requests of this session.
pub const FAREWELL: u8 = 3;

/// The head of a request.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned, Debug)]
#[repr(C)]
pub struct Request {
    /// What to do.
    pub kind: u8,
    /// 0.
    pub reserved: [u8; 3],
    /// Bytes.
    pub len: U32,
    /// Where.
    pub addr: U64,
    /// Operand of atomics.
    pub value: U64,
    /// Key that opens `addr`.
    pub key: U32,
    /// 0.
    pub reserved2: U32,
}

impl Request {
    /// A request without address and operand.
    #[must_use]
    pub fn new(kind: u8, len: u32) -> Self {
        let zero = U64::new(0);
        Self {
            kind,
            reserved: [0; 3],
            len: len.into(),
            addr: zero,
            value: zero,
            key: 0.into(),
            reserved2: 0.into(),
        }
    }
}

/// The head of what a target says.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned, Debug)]
#[repr(C)]
pub struct Answer {
    /// What follows.
    pub kind: u8,
    /// See [`status`].
    pub status: u8,
    /// 0.
    pub reserved: U16,
    /// Bytes that follow.
    pub len: U32,
    /// For atomics what was found; for the rest bytes.
    pub value: U64,
}

impl Answer {
    /// The head of an answer.
    #[must_use]
    pub fn new(kind: u8, outcome: Result<u64, WorkError>, len: u32) -> Self {
        Self {
            kind,
            status: outcome.err().map_or(0, status),
            reserved: 0.into(),
            len: len.into(),
            value: outcome.unwrap_or(0).into(),
        }
    }

    /// The outcome that it tells, if there is such a one.
    #[must_use]
    pub fn outcome(&self) -> Option<Result<u64, WorkError>> {
        Some(match self.status {
            0 => Ok(self.value.get()),
            1 => Err(WorkError::RemoteAccess),
            2 => Err(WorkError::Misaligned),
            3 => Err(WorkError::TooLong),
            4 => Err(WorkError::ReceiverNotReady),
            5 => Err(WorkError::Fenced),
            _ => return None,
        })
    }
}

/// The status of an error that a target can tell.
///
/// # Panics
/// If it is not one of those.
#[must_use]
pub fn status(error: WorkError) -> u8 {
    match error {
        WorkError::RemoteAccess => 1,
        WorkError::Misaligned => 2,
        WorkError::TooLong => 3,
        WorkError::ReceiverNotReady => 4,
        WorkError::Fenced => 5,
        WorkError::LocalAccess
        | WorkError::PeerGone
        | WorkError::Timeout
        | WorkError::Away
        | WorkError::Flushed => {
            unreachable!("a target never says {error:?}")
        }
    }
}

/// Bytes with padding.
#[must_use]
pub fn padded(len: u32) -> usize {
    (len as usize).next_multiple_of(8)
}
