//! The mutations of what an agent reads from programs, the kernel and earlier agents: checks that
//! tests omit on purpose.
//!
//! Each is named at its check in `docs/formats/paging.md`.

aquifer_mutation::mutations! {
    /// A check that is omitted.
    pub enum Mutation {
        /// The number of pages in a command to the worker is not bounded.
        TrustBatchCount,
        /// The number of ranges in a journal is not bounded.
        TrustRangeCount,
        /// An area may end behind the last page of an address space.
        IgnoreAddressEnd,
    }
}
