//! The mutations of the providers: checks that tests omit on purpose.
//!
//! The documents of the providers in `docs/formats` name each mutation at its check.

aquifer_mutation::mutations! {
    /// A check that is omitted.
    pub enum Mutation {
        /// A welcome may name regions that overlap.
        AcceptOverlap,
        /// A ticket for any service is admitted.
        AcceptAnyService,
        /// An access may end behind the range that its key opens.
        IgnoreRangeEnd,
        /// A word of a translation table that names no unit of the memory names the last one.
        AcceptWrongUnit,
        /// An access that spans units is translated by the word of its first unit.
        TranslateOnce,
        /// A target's message of any length is read.
        TrustMessageLength,
        /// A welcome over shared memory may have more or fewer regions than its count.
        TrustRegionCount,
        /// The numbers of slots in control memory may contradict its size.
        TrustTableSizes,
        /// A message in a mailbox may be longer than its slot.
        TrustSlotLength,
    }
}
