//! The bytes of an open connection: requests in one direction, answers and messages in the other.
//! All lengths are padded to multiples of 8, so that words stay aligned in both buffers and are
//! never torn.

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::work::WorkError;

/// Bytes of the head of a request.
pub const REQUEST_BYTES: usize = size_of::<RequestHead>();
/// Bytes of the head of an answer.
pub const ANSWER_BYTES: usize = size_of::<AnswerHead>();

/// Request: READ `len` bytes at `addr`.
pub const READ: u8 = 1;
/// Request: WRITE the `len` bytes that follow to `addr`.
pub const WRITE: u8 = 2;
/// Request: if the word at `addr` equals `value`, store the word that follows.
pub const SWAP: u8 = 3;
/// Request: add `value` to the word at `addr`.
pub const ADD: u8 = 4;
/// Request: deliver the message of `len` bytes that follows.
pub const SEND: u8 = 5;
/// Request: the initiator has taken `len` messages. Neither answered nor counted.
pub const CREDIT: u8 = 6;
/// Request: end the session. Not answered.
pub const BYE: u8 = 7;

/// Answer to the oldest unanswered request. `len` bytes follow if that was a READ.
pub const ANSWER: u8 = 1;
/// Message of the target: `len` bytes follow.
pub const MESSAGE: u8 = 2;
/// Farewell: the target shuts down, with `value` requests of this session done.
pub const FAREWELL: u8 = 3;

/// The head of a request.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned, Debug)]
#[repr(C)]
pub struct RequestHead {
    /// The kind of the request.
    pub kind: u8,
    /// Reserved: 0.
    pub reserved: [u8; 3],
    /// Length in bytes.
    pub len: U32,
    /// Remote address.
    pub addr: U64,
    /// Operand of an atomic.
    pub value: U64,
    /// The key that opens `addr`.
    pub key: U32,
    /// Reserved: 0.
    pub reserved2: U32,
}

impl RequestHead {
    /// Creates a request without address and operand.
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

/// The head of an answer, a message or a farewell.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned, Debug)]
#[repr(C)]
pub struct AnswerHead {
    /// The kind: an answer, a message or a farewell.
    pub kind: u8,
    /// The outcome, as a number of [`status`].
    pub status: u8,
    /// Reserved: 0.
    pub reserved: U16,
    /// Number of bytes that follow.
    pub len: U32,
    /// The value found by an atomic, or the number of bytes.
    pub value: U64,
}

impl AnswerHead {
    /// Creates the head of an answer.
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

    /// The outcome; `None` if the status is unknown.
    #[must_use]
    pub fn outcome(&self) -> Option<Result<u64, WorkError>> {
        Some(match self.status {
            0 => Ok(self.value.get()),
            1 => Err(WorkError::RemoteAccess),
            2 => Err(WorkError::Misaligned),
            3 => Err(WorkError::TooLong),
            4 => Err(WorkError::ReceiverNotReady),
            5 => Err(WorkError::Fenced),
            6 => Err(WorkError::Storage),
            _ => return None,
        })
    }
}

/// The status number of an error that a target can report.
///
/// # Panics
/// If a target cannot report the error.
#[must_use]
pub fn status(error: WorkError) -> u8 {
    match error {
        WorkError::RemoteAccess => 1,
        WorkError::Misaligned => 2,
        WorkError::TooLong => 3,
        WorkError::ReceiverNotReady => 4,
        WorkError::Fenced => 5,
        WorkError::Storage => 6,
        WorkError::LocalAccess
        | WorkError::PeerGone
        | WorkError::Timeout
        | WorkError::Away
        | WorkError::Flushed => {
            unreachable!("a target does not report {error:?}")
        }
    }
}

/// The padded length.
#[must_use]
pub fn padded(len: u32) -> usize {
    (len as usize).next_multiple_of(8)
}
