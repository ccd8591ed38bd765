//! The control word of a section: 2 bits for each of its 16 spans, and the inline log.

use aquifer_fabric::Host;

use super::{AlignedRun, IllegalWord, InlineLog, LogOp, high, join, log, low};
use crate::size::SECTION_SPANS;

/// Spans of a section.
pub(super) const PLACES: u8 = 16;
const _: () = assert!(PLACES as u32 == SECTION_SPANS);
/// The even bits, one for each span.
const EVEN: u32 = 0x5555_5555;

/// The places at which a group of each order may begin; span i is bit 2·i.
const ALIGNED: [u32; 5] = [EVEN, 0x1111_1111, 0x0101_0101, 0x0001_0001, 0x0000_0001];

/// The state of a span in its section's word.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum SpanState {
    /// Free.
    Empty,
    /// Open for chunks, or being opened or closed.
    Partial,
    /// Open for chunks, but hosts have lost several races at it, so that others search elsewhere.
    Contended,
    /// Allocated whole if the span's word is closed; else probably without a free chunk.
    Full,
}

impl SpanState {
    const fn code(self) -> u32 {
        match self {
            Self::Empty => 0b00,
            Self::Partial => 0b01,
            Self::Contended => 0b10,
            Self::Full => 0b11,
        }
    }
}

/// The control word of a section: the states of its spans, and the inline log.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct SectionWord(pub u64);

impl SectionWord {
    /// The word of a section that its node has never lent: the node has allocated all of it.
    pub const OFFLINE: Self = Self(0).allocate(AlignedRun::SECTION, Host::NODE);

    /// Whether the node itself has allocated the whole section, to take it offline or to clear it.
    #[must_use]
    pub const fn is_offline(self) -> bool {
        self.bits() == u32::MAX && self.has_record_of(Self::OFFLINE)
    }

    /// The 16 codes.
    #[must_use]
    pub const fn bits(self) -> u32 {
        low(self.0)
    }

    /// The state of span `index`, 0 to 15.
    #[must_use]
    pub const fn state(self, index: u8) -> SpanState {
        match (self.bits() >> (2 * index)) & 0b11 {
            0b00 => SpanState::Empty,
            0b01 => SpanState::Partial,
            0b10 => SpanState::Contended,
            _ => SpanState::Full,
        }
    }

    /// The spans in this state; span i is bit 2·i.
    #[must_use]
    const fn spans(self, state: SpanState) -> u32 {
        // Two codes are equal if neither bit differs.
        let differing = self.bits() ^ (state.code() * EVEN);
        !(differing | (differing >> 1)) & EVEN
    }

    /// The spans in this state, lowest first.
    pub fn spans_in(self, state: SpanState) -> impl Iterator<Item = u8> {
        let mut remaining = self.spans(state);
        std::iter::from_fn(move || {
            let index =
                u8::try_from(remaining.checked_ilog2().map(|_| remaining.trailing_zeros())? / 2).ok()?;
            remaining &= remaining - 1;
            Some(index)
        })
    }

    /// A bit for each empty span.
    #[must_use]
    pub const fn empty_spans(self) -> u16 {
        let empty = self.spans(SpanState::Empty);
        // Packs the even bits.
        let pairs = (empty | (empty >> 1)) & 0x3333_3333;
        let fours = (pairs | (pairs >> 2)) & 0x0f0f_0f0f;
        let eights = (fours | (fours >> 4)) & 0x00ff_00ff;
        ((eights | (eights >> 8)) & 0xffff) as u16
    }

    /// Whether both words have the same record, apart from the timestamp.
    #[must_use]
    pub const fn has_record_of(self, other: Self) -> bool {
        log::untimed(high(self.0)) == log::untimed(high(other.0))
    }

    /// Whether any span is in this state.
    #[must_use]
    pub const fn has(self, state: SpanState) -> bool {
        self.spans(state) != 0
    }

    /// The first aligned group of 2^`order` empty spans.
    #[must_use]
    pub fn find(self, order: u8) -> Option<AlignedRun> {
        self.find_among(order, u16::MAX)
    }

    /// The first aligned group of 2^`order` empty spans that are all in the set `among`, a bit for
    /// each span.
    #[must_use]
    pub fn find_among(self, order: u8, among: u16) -> Option<AlignedRun> {
        let mut empty = self.spans(SpanState::Empty) & spread(among.into());
        for step in 0..order {
            empty &= empty >> (2_u32 << step);
        }
        empty &= ALIGNED.get(usize::from(order))?;
        if empty == 0 {
            return None;
        }
        AlignedRun::new(u8::try_from(empty.trailing_zeros() / 2).ok()?, order)
    }

    /// Whether every span of the group is in this state.
    #[must_use]
    pub const fn all(self, run: AlignedRun, state: SpanState) -> bool {
        let wanted = spread(run.mask());
        self.spans(state) & wanted == wanted
    }

    /// The word after `host` has allocated an empty group whole.
    #[must_use]
    pub const fn allocate(self, run: AlignedRun, host: Host) -> Self {
        self.with(run, SpanState::Full, LogOp::Alloc, host)
    }

    /// The word after `host` has freed a group.
    #[must_use]
    pub const fn free(self, run: AlignedRun, host: Host) -> Self {
        self.with(run, SpanState::Empty, LogOp::Free, host)
    }

    /// The word after `host` has opened span `index` for chunks.
    #[must_use]
    pub const fn open(self, index: u8, host: Host) -> Self {
        self.with(AlignedRun::single(index), SpanState::Partial, LogOp::Open, host)
    }

    /// The word after `host` has opened span `index`, and set the full hint of span `full` in the
    /// same CAS.
    #[must_use]
    pub const fn open_beside(self, index: u8, full: u8, host: Host) -> Self {
        Self(join(high(self.0), self.replace(AlignedRun::single(full), SpanState::Full))).open(index, host)
    }

    /// The word after `host` has closed span `index`.
    #[must_use]
    pub const fn close(self, index: u8, host: Host) -> Self {
        self.with(AlignedRun::single(index), SpanState::Empty, LogOp::Close, host)
    }

    /// The word with another hint for span `index`.
    ///
    /// A hint commits nothing, so the record stays. The timestamp advances, so that a CAS that
    /// expects the word before fails.
    #[must_use]
    pub const fn hint(self, index: u8, state: SpanState) -> Self {
        Self(join(log::with_next_stamp(high(self.0)), self.replace(AlignedRun::single(index), state)))
    }

    const fn replace(self, run: AlignedRun, state: SpanState) -> u32 {
        let places = spread(run.mask());
        (self.bits() & !(places * 0b11)) | (places * state.code())
    }

    const fn with(self, run: AlignedRun, state: SpanState, op: LogOp, host: Host) -> Self {
        let log = InlineLog { op, run, host, stamp: log::next_stamp(high(self.0)) };
        Self(join(log.encode(PLACES), self.replace(run, state)))
    }

    /// The inline log; `None` if the word was never changed.
    ///
    /// # Errors
    /// If the bits are not a log.
    pub fn log(self) -> Result<Option<InlineLog>, IllegalWord> {
        InlineLog::decode(high(self.0), PLACES)
    }

    /// Checks that these 64 bits can be a section's word: the state is a result of the change in
    /// the log.
    ///
    /// # Errors
    /// The reason why the word is illegal.
    pub fn check(self) -> Result<(), IllegalWord> {
        let bits = self.bits();
        let Some(log) = self.log()? else {
            return if bits == 0 { Ok(()) } else { Err(IllegalWord::Log(high(self.0))) };
        };
        let is_legal = match log.op {
            LogOp::Open => log.run.order() == 0 && self.state(log.run.first()) != SpanState::Empty,
            LogOp::Alloc => self.all(log.run, SpanState::Full),
            LogOp::Free => self.all(log.run, SpanState::Empty),
            LogOp::Close => log.run.order() == 0 && self.all(log.run, SpanState::Empty),
            LogOp::Ready => false,
        };
        if is_legal { Ok(()) } else { Err(IllegalWord::Contradiction { bits, log }) }
    }
}

/// Spreads the low 16 bits of a mask: bit i becomes bit 2·i.
const fn spread(mask: u32) -> u32 {
    let mut x = mask & 0xffff;
    x = (x | (x << 8)) & 0x00ff_00ff;
    x = (x | (x << 4)) & 0x0f0f_0f0f;
    x = (x | (x << 2)) & 0x3333_3333;
    (x | (x << 1)) & EVEN
}
