//! The steps of the protocol that tests break on purpose.

use super::{Action, WordAt};

aquifer_mutation::mutations! {
    /// A step of the protocol done wrong.
    pub enum Mutation {
        /// A1: retry with the word found, but with bits from the word remembered.
        TakeFromStale,
        /// A2: take the first chunks of an empty span without opening it in the section.
        SkipOpen,
        /// A3: take chunks of a closed span that another host is opening or closing.
        EnterClosed,
        /// A4: after a lost race set the full hint with the other spans as they were remembered.
        FullFromStale,
        /// A5: do not look at the span again after setting the full hint.
        SkipRecheck,
        /// F2: take a full hint back without looking at the span again.
        OpenBlind,
        /// A7: take a group of which only the first span is known to be empty.
        TakeHalfEmpty,
        /// C1: mark a span as contended whatever it is by now.
        MarkBlind,
        /// C2: calm a span whatever it is by now.
        CalmBlind,
        /// K, F1: give back without asking whether it was taken, by that key.
        GiveUnchecked,
        /// F2: do not look for a full hint after giving back of a full span.
        SkipUnhint,
        /// F3: close the span in the section before its last bits are clear.
        CloseFirst,
        /// F4: never close the span in the section.
        SkipClose,
        /// F4: after a lost race close with the other spans as they were remembered.
        CloseFromStale,
        /// F5: give back only the first span of a group.
        GiveHalf,
        /// L: leave the timestamp as it was.
        KeepStamp,
        /// L: leave the record of the change before.
        KeepRecord,
        /// R: believe the cache that nothing is free.
        TrustCache,
        /// A0: open a span, or take it whole, without looking whether it is ready.
        SkipReady,
        /// A0: mark a span as ready by what is remembered of its section.
        ReadyFromMemory,
        /// A8: hand out an extent whose record is not in the log.
        SkipRecord,
        /// L: write over a record that is not in the log.
        SkipFlush,
        /// L: copy a record to the log whatever is there by now.
        BlindFlush,
        /// V2: look at the section after its spans.
        SectionLast,
        /// V3: give back what was judged, even if the word has changed since.
        RecoverBlind,
        /// A0, A1: take what is another tenant's.
        TakeForeign,
        /// A3: do not say whose the span is.
        SkipOwner,
        /// A8: do not say whose the spans of a group are.
        SkipOwners,
        /// K: give back without striking out the key.
        SkipStrike,
        /// K: of what is resumed believe that nobody has had the place since.
        ResumeBlind,
        /// A9: keep what was taken of a stretch that cannot be had whole.
        KeepPart,
    }
}

impl Action {
    /// The CAS that commits a change (L).
    pub(super) fn commit(at: WordAt, expected: u64, desired: u64) -> Self {
        /// The log's timestamp, in a word.
        const STAMP: u64 = 0x7ff << 32;
        const LOG: u64 = 0xffff_ffff << 32;
        let kept = if Mutation::KeepStamp.is_active() {
            STAMP
        } else if Mutation::KeepRecord.is_active() {
            LOG & !STAMP
        } else {
            0
        };
        Self::cas(at, expected, (desired & !kept) | (expected & kept))
    }
}
