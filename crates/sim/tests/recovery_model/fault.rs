//! The rules, each of which is left out once.

/// A rule that is left out, to see that it is needed.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Fault {
    None,
    /// A record is written over without having been copied to the log.
    SkipFlush,
    /// A record is copied by a WRITE, however late that comes.
    BlindFlush,
    /// A span is opened or taken whole without looking whether it was marked as ready.
    SkipMark,
    /// A span is marked as ready by what was remembered of its section.
    MarkFromMemory,
    /// Whoever recovers looks at the section after it has looked at the spans.
    SectionLast,
    /// An extent is handed out before its own record is in the log.
    SkipRecord,
    /// A record of the own host is taken to be in the log, though another thread of it may be about to put it there.
    OwnIsKnown,
    /// A record is copied without a second look at its word.
    SkipLookAgain,
    /// The section is read once more after a span was seen to be ready, and what begins the span's new life expects that.
    ReadyFirst,
    /// Whoever recovers does not look at the section again after a span.
    SkipSectionAgain,
    /// A record is taken to be in the log as it was left, though others may have had the chunk since.
    TrustLeft,
}

impl Fault {
    pub const ALL: [Self; 11] = [
        Self::SkipFlush,
        Self::BlindFlush,
        Self::SkipMark,
        Self::MarkFromMemory,
        Self::SectionLast,
        Self::SkipRecord,
        Self::OwnIsKnown,
        Self::SkipLookAgain,
        Self::ReadyFirst,
        Self::SkipSectionAgain,
        Self::TrustLeft,
    ];
}
