//! A span's word: a bit for each of its 32 chunks, and the inline log.

use aquifer_fabric::Host;

use super::{IllegalWord, InlineLog, LogOp, Run, high, join, log, low};
use crate::size::{SPAN_CHUNKS, SizeClass};

pub(super) const PLACES: u8 = 32;
const _: () = assert!(PLACES as u32 == SPAN_CHUNKS);

/// Where a run of each order may begin.
const ALIGNED: [u32; 6] = [0xffff_ffff, 0x5555_5555, 0x1111_1111, 0x0101_0101, 0x0001_0001, 0x0000_0001];

/// The state of a span. No bit set means *closed*: not open for chunks, whatever the section says.
/// Opening writes the first bits and closing clears the last, each in one CAS.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct SpanWord(pub u64);

impl SpanWord {
    /// The chunk bits.
    #[must_use]
    pub const fn bits(self) -> u32 {
        low(self.0)
    }

    /// Not open for chunks.
    #[must_use]
    pub const fn is_closed(self) -> bool {
        self.bits() == 0
    }

    /// Every chunk is taken.
    #[must_use]
    pub const fn is_full(self) -> bool {
        self.bits() == u32::MAX
    }

    /// Chunks that can be taken from the span as it is.
    #[must_use]
    pub const fn free_chunks(self) -> u32 {
        if self.is_closed() { 0 } else { self.bits().count_zeros() }
    }

    /// The first aligned run of 2^`order` free chunks.
    #[must_use]
    pub fn find(self, order: u8) -> Option<Run> {
        let mut free = !self.bits();
        for step in 0..order {
            free &= free >> (1_u32 << step);
        }
        free &= ALIGNED.get(usize::from(order))?;
        Run::new(u8::try_from(free.trailing_zeros()).ok()?, order)
    }

    /// Whether all chunks of the run are taken.
    #[must_use]
    pub const fn holds(self, run: Run) -> bool {
        self.bits() & run.mask() == run.mask()
    }

    /// The word after `host` has taken a free run.
    #[must_use]
    pub const fn take(self, run: Run, host: Host) -> Self {
        self.with(self.bits() | run.mask(), LogOp::Alloc, run, host)
    }

    /// The word after `host` has given a run back; closed if it was the last.
    #[must_use]
    pub const fn give(self, run: Run, host: Host) -> Self {
        self.give_all(run.mask(), run, host)
    }

    /// The word after `host` has given back the chunks of `mask`, of which `run` is some: what a dead host held in the span.
    #[must_use]
    pub const fn give_all(self, mask: u32, run: Run, host: Host) -> Self {
        let bits = self.bits() & !mask;
        self.with(bits, if bits == 0 { LogOp::Close } else { LogOp::Free }, run, host)
    }

    /// The word after `host` has marked a closed span as ready for a new life.
    #[must_use]
    pub const fn mark_ready(self, host: Host) -> Self {
        self.with(0, LogOp::Ready, Run::single(0), host)
    }

    /// Whether a new life may begin: closed, and marked so or never changed.
    #[must_use]
    pub fn is_ready(self) -> bool {
        self.is_closed() && matches!(self.log(), Ok(None | Some(InlineLog { op: LogOp::Ready, .. })))
    }

    const fn with(self, bits: u32, op: LogOp, run: Run, host: Host) -> Self {
        let log = InlineLog { op, run, host, stamp: log::next_stamp(high(self.0)) };
        Self(join(log.encode(PLACES), bits))
    }

    /// The inline log; `None` if the word was never changed.
    ///
    /// # Errors
    /// If the bits cannot be a log.
    pub fn log(self) -> Result<Option<InlineLog>, IllegalWord> {
        InlineLog::decode(high(self.0), PLACES)
    }

    /// Whether these 64 bits can be a span's word: the log is the record of a change whose result is in the bits.
    ///
    /// # Errors
    /// What is wrong.
    pub fn check(self) -> Result<(), IllegalWord> {
        let bits = self.bits();
        let Some(log) = self.log()? else {
            return if bits == 0 { Ok(()) } else { Err(IllegalWord::Log(high(self.0))) };
        };
        let right = log.run.order() < SizeClass::SPAN.k()
            && match log.op {
                LogOp::Open => false,
                LogOp::Alloc => self.holds(log.run),
                LogOp::Free => bits & log.run.mask() == 0 && bits != 0,
                LogOp::Close | LogOp::Ready => bits == 0,
            };
        if right { Ok(()) } else { Err(IllegalWord::Contradiction { bits, log }) }
    }
}
