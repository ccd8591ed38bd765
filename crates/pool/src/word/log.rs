//! The inline log: what the last change of a word was, and who made it.

use aquifer_fabric::Host;

use super::{IllegalWord, Run};

/// How many timestamps there are before they begin again.
pub const STAMPS: u16 = 1 << STAMP_BITS;

const STAMP_BITS: u32 = 11;
const HOST_SHIFT: u32 = STAMP_BITS;
const HOST_BITS: u32 = 12;
const RUN_SHIFT: u32 = HOST_SHIFT + HOST_BITS;
const RUN_BITS: u32 = 6;
const OP_SHIFT: u32 = RUN_SHIFT + RUN_BITS;
const STAMP_MASK: u32 = (1 << STAMP_BITS) - 1;
const HOST_MASK: u32 = (1 << HOST_BITS) - 1;
const RUN_MASK: u32 = (1 << RUN_BITS) - 1;

/// What was done.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum LogOp {
    /// A span was opened for chunks (sections only).
    Open,
    /// The run was taken.
    Alloc,
    /// The run was given back.
    Free,
    /// In a section: the span is empty again. In a span: the run was given back and was the last.
    Close,
    /// The span is closed and its section knows it: a new life of it may begin (spans only).
    Ready,
}

/// The record of a word's last change.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct InlineLog {
    /// What was done.
    pub op: LogOp,
    /// To which chunks or spans.
    pub run: Run,
    /// By which host.
    pub host: Host,
    /// The word's count of changes, modulo [`STAMPS`]. Changes of hints count too.
    pub stamp: u16,
}

impl InlineLog {
    /// The bits of the log of a word with so many `places`.
    pub(super) const fn encode(self, places: u8) -> u32 {
        let op: u32 = match self.op {
            LogOp::Open => 1,
            LogOp::Alloc => 2,
            LogOp::Free => 3,
            LogOp::Close => 4,
            LogOp::Ready => 5,
        };
        (op << OP_SHIFT)
            | (self.run.number(places) << RUN_SHIFT)
            | ((self.host.0 as u32 & HOST_MASK) << HOST_SHIFT)
            | (self.stamp as u32 & STAMP_MASK)
    }

    /// The log in these bits; `None` if the word was never changed.
    pub(super) fn decode(raw: u32, places: u8) -> Result<Option<Self>, IllegalWord> {
        if raw == 0 {
            return Ok(None);
        }
        let op = match raw >> OP_SHIFT {
            1 => LogOp::Open,
            2 => LogOp::Alloc,
            3 => LogOp::Free,
            4 => LogOp::Close,
            5 => LogOp::Ready,
            _ => return Err(IllegalWord::Log(raw)),
        };
        let host = Host(((raw >> HOST_SHIFT) & HOST_MASK) as u16);
        let run = Run::from_number((raw >> RUN_SHIFT) & RUN_MASK, places);
        match run {
            Some(run) if host.0 != 0 => Ok(Some(Self { op, run, host, stamp: stamp(raw) })),
            _ => Err(IllegalWord::Log(raw)),
        }
    }
}

/// The timestamp in the bits of a log.
pub(super) const fn stamp(raw: u32) -> u16 {
    (raw & STAMP_MASK) as u16
}

/// The timestamp after this one.
pub(super) const fn next_stamp(raw: u32) -> u16 {
    (stamp(raw) + 1) % STAMPS
}

/// The record without its timestamp.
pub(super) const fn untimed(raw: u32) -> u32 {
    raw & !STAMP_MASK
}

/// The same record with the next timestamp.
pub(super) const fn touched(raw: u32) -> u32 {
    (raw & !STAMP_MASK) | next_stamp(raw) as u32
}
