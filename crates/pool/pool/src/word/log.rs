//! The inline log: the last change of a control word, and the host that made it.

use aquifer_fabric::Host;

use super::{AlignedRun, IllegalWord};

/// The number of timestamps. After the last one, they begin again at 0.
pub const STAMPS: u16 = 1 << STAMP_BITS;

// The fields of a log from bit 0 on: timestamp, host, run, operation.
const STAMP_BITS: u32 = 11;
const HOST_SHIFT: u32 = STAMP_BITS;
const HOST_BITS: u32 = 12;
const RUN_SHIFT: u32 = HOST_SHIFT + HOST_BITS;
const RUN_BITS: u32 = 6;
const OP_SHIFT: u32 = RUN_SHIFT + RUN_BITS;
const STAMP_MASK: u32 = (1 << STAMP_BITS) - 1;
const HOST_MASK: u32 = (1 << HOST_BITS) - 1;
const RUN_MASK: u32 = (1 << RUN_BITS) - 1;

/// The kind of a change.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum LogOp {
    /// A span was opened for chunks. In sections' words only.
    Open,
    /// The run was allocated.
    Alloc,
    /// The run was freed.
    Free,
    /// In a section's word: the span became empty. In a span's word: the run was freed, and nothing
    /// else is allocated.
    Close,
    /// The span is closed, and empty in its section's word, so that it may be opened or allocated
    /// whole. In spans' words only.
    Ready,
}

/// The record of the last change of a control word.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct InlineLog {
    /// The kind of the change.
    pub op: LogOp,
    /// The chunks or spans that were changed.
    pub run: AlignedRun,
    /// The host that made the change.
    pub host: Host,
    /// The number of changes of the word, those of hints included, modulo [`STAMPS`].
    pub stamp: u16,
}

impl InlineLog {
    /// Encodes the log of a word of `places` chunks or spans.
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

    /// Decodes the log of a word of `places` chunks or spans; `None` if the word was never changed.
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
        let run = AlignedRun::from_number((raw >> RUN_SHIFT) & RUN_MASK, places);
        match run {
            Some(run) if host.0 != 0 => Ok(Some(Self { op, run, host, stamp: stamp(raw) })),
            _ => Err(IllegalWord::Log(raw)),
        }
    }
}

/// The timestamp of an encoded log.
pub(super) const fn stamp(raw: u32) -> u16 {
    (raw & STAMP_MASK) as u16
}

/// The timestamp that follows that of an encoded log.
pub(super) const fn next_stamp(raw: u32) -> u16 {
    (stamp(raw) + 1) % STAMPS
}

/// An encoded log without its timestamp.
pub(super) const fn untimed(raw: u32) -> u32 {
    raw & !STAMP_MASK
}

/// An encoded log with the next timestamp.
pub(super) const fn with_next_stamp(raw: u32) -> u32 {
    (raw & !STAMP_MASK) | next_stamp(raw) as u32
}
