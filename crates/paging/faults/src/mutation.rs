//! Checks of data from programs, the kernel and earlier agents, which tests omit on purpose.
//!
//! `docs/formats/paging.md` names each at its check.

aquifer_mutation::mutations! {
    /// A check that is omitted.
    pub enum Mutation {
        /// The number of pages in a command to the worker is not bounded.
        TrustBatchCount,
        /// The number of ranges in a journal is not bounded.
        TrustRangeCount,
        /// An area may end after the last page of an address space.
        IgnoreAddressEnd,
    }
}
