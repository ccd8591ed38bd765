//! Steps of the protocol that tests break on purpose.

use super::{Action, WordAt};

aquifer_mutation::mutations! {
    /// A step of the protocol that a test omits or does wrong.
    pub enum Mutation {
        /// A1: retry with the word found, but with bits of the cached word.
        AllocateFromStale,
        /// A2: allocate the first chunks of an empty span without opening it in the section.
        SkipOpen,
        /// A3: allocate chunks of a closed span that another host is opening or closing.
        EnterClosed,
        /// A4: after a lost race, set the full hint with the other spans as they were cached.
        FullFromStale,
        /// A5: do not read the span after setting its full hint.
        SkipRecheck,
        /// A6, F2: clear a full hint without reading the span.
        ClearFullBlind,
        /// A7: allocate a group of which only the first span is known to be empty.
        AllocateHalfEmpty,
        /// C1: set the contended hint, whatever the state of the span is now.
        SetContendedBlind,
        /// C2: clear the contended hint, whatever the state of the span is now.
        ClearContendedBlind,
        /// K, F1: free without checking that the extent is allocated under that key.
        FreeUnchecked,
        /// F2: do not check for a full hint after freeing chunks of a full span.
        SkipClearFull,
        /// F3: close the span in the section before its last bits are clear.
        CloseFirst,
        /// F4: never close the span in the section.
        SkipClose,
        /// F4: after a lost race, close with the other spans as they were cached.
        CloseFromStale,
        /// F5: free only the first span of a group.
        FreeHalf,
        /// L: do not advance the timestamp.
        KeepStamp,
        /// L: keep the record of the change before.
        KeepRecord,
        /// R: report a full node by the cached words.
        TrustCache,
        /// A0: open a span, or allocate it whole, without checking that it is ready.
        SkipReady,
        /// A0: mark a span as ready by the cached word of its section.
        ReadyFromCache,
        /// A8: return an extent whose record is not in the log.
        SkipRecord,
        /// L: overwrite a record that is not in the log.
        SkipFlush,
        /// L: copy a record to the log, whatever its entry is now.
        BlindFlush,
        /// V2: read the section after its spans.
        SectionLast,
        /// V3: free the holdings in a word even if the word has changed since.
        RecoverBlind,
        /// A0, A1: allocate memory of another tenant.
        AllocateForeign,
        /// A3: do not write the owner of the span.
        SkipOwner,
        /// A8: do not write the owners of a group's spans.
        SkipGroupOwners,
        /// K: free without revoking the key.
        SkipRevoke,
        /// K: resume a free without checking that the word still has the same record.
        ResumeBlind,
        /// A9: keep the sections that were allocated of a stretch that could not be completed.
        KeepPart,
    }
}

impl Action {
    /// A CAS that commits a change (L).
    pub(super) fn commit(at: WordAt, expected: u64, desired: u64) -> Self {
        /// The timestamp in a word.
        const STAMP: u64 = 0x7ff << 32;
        /// The log in a word.
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
