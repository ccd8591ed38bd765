//! The control word of a span: a bit for each of its 32 chunks, and the inline log.

use aquifer_fabric::Host;

use super::{AlignedRun, IllegalWord, InlineLog, LogOp, high, join, log, low};
use crate::size::{SPAN_CHUNKS, SizeClass};

/// Chunks of a span.
pub(super) const PLACES: u8 = 32;
const _: () = assert!(PLACES as u32 == SPAN_CHUNKS);

/// The places at which a run of each order may begin.
const ALIGNED: [u32; 6] = [0xffff_ffff, 0x5555_5555, 0x1111_1111, 0x0101_0101, 0x0001_0001, 0x0000_0001];

/// The control word of a span.
///
/// A span without a set bit is *closed*: not open for chunks, whatever the section says. The CAS
/// that opens a span sets its first bits, and the CAS that closes it clears the last ones.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct SpanWord(pub u64);

impl SpanWord {
    /// The bits of the chunks; 1 is allocated.
    #[must_use]
    pub const fn bits(self) -> u32 {
        low(self.0)
    }

    /// Whether no chunk is allocated, so that the span is not open for chunks.
    #[must_use]
    pub const fn is_closed(self) -> bool {
        self.bits() == 0
    }

    /// Whether every chunk is allocated.
    #[must_use]
    pub const fn is_full(self) -> bool {
        self.bits() == u32::MAX
    }

    /// The number of chunks that can be allocated without opening the span.
    #[must_use]
    pub const fn free_chunks(self) -> u32 {
        if self.is_closed() { 0 } else { self.bits().count_zeros() }
    }

    /// The first aligned run of 2^`order` free chunks.
    #[must_use]
    pub fn find(self, order: u8) -> Option<AlignedRun> {
        let mut free = !self.bits();
        for step in 0..order {
            free &= free >> (1_u32 << step);
        }
        free &= ALIGNED.get(usize::from(order))?;
        AlignedRun::new(u8::try_from(free.trailing_zeros()).ok()?, order)
    }

    /// Whether all chunks of the run are allocated.
    #[must_use]
    pub const fn holds(self, run: AlignedRun) -> bool {
        self.bits() & run.mask() == run.mask()
    }

    /// The word after `host` has allocated a free run.
    #[must_use]
    pub const fn allocate(self, run: AlignedRun, host: Host) -> Self {
        self.with(self.bits() | run.mask(), LogOp::Alloc, run, host)
    }

    /// The word after `host` has freed a run. The span is closed if no other chunk is allocated.
    #[must_use]
    pub const fn free(self, run: AlignedRun, host: Host) -> Self {
        self.free_mask(run.mask(), run, host)
    }

    /// The word after `host` has freed the chunks of `mask`, which are several extents. The log
    /// names one of them, `run`.
    #[must_use]
    pub const fn free_mask(self, mask: u32, run: AlignedRun, host: Host) -> Self {
        let bits = self.bits() & !mask;
        self.with(bits, if bits == 0 { LogOp::Close } else { LogOp::Free }, run, host)
    }

    /// The word after `host` has marked a closed span as ready.
    #[must_use]
    pub const fn mark_ready(self, host: Host) -> Self {
        self.with(0, LogOp::Ready, AlignedRun::single(0), host)
    }

    /// Whether the span may be opened or allocated whole: it is closed, and marked ready or never
    /// changed.
    #[must_use]
    pub fn is_ready(self) -> bool {
        self.is_closed() && matches!(self.log(), Ok(None | Some(InlineLog { op: LogOp::Ready, .. })))
    }

    const fn with(self, bits: u32, op: LogOp, run: AlignedRun, host: Host) -> Self {
        let log = InlineLog { op, run, host, stamp: log::next_stamp(high(self.0)) };
        Self(join(log.encode(PLACES), bits))
    }

    /// The inline log; `None` if the word was never changed.
    ///
    /// # Errors
    /// If the bits are not a log.
    pub fn log(self) -> Result<Option<InlineLog>, IllegalWord> {
        InlineLog::decode(high(self.0), PLACES)
    }

    /// Checks that these 64 bits can be a span's word: the state is a result of the change in the
    /// log.
    ///
    /// # Errors
    /// The reason why the word is illegal.
    pub fn check(self) -> Result<(), IllegalWord> {
        let bits = self.bits();
        let Some(log) = self.log()? else {
            return if bits == 0 { Ok(()) } else { Err(IllegalWord::Log(high(self.0))) };
        };
        let is_legal = log.run.order() < SizeClass::SPAN.k()
            && match log.op {
                LogOp::Open => false,
                LogOp::Alloc => self.holds(log.run),
                LogOp::Free => bits & log.run.mask() == 0 && bits != 0,
                LogOp::Close | LogOp::Ready => bits == 0,
            };
        if is_legal { Ok(()) } else { Err(IllegalWord::Contradiction { bits, log }) }
    }
}
