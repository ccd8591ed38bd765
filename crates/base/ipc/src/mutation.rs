//! The mutations of these formats: checks that tests omit on purpose.
//!
//! The checks in `docs/formats/ipc.md` name their mutations.

aquifer_mutation::mutations! {
    /// A check that is omitted.
    pub enum Mutation {
        /// Any number but 0 is read as true.
        AcceptAnyFlag,
        /// The range of a request may end behind the data area of the ring.
        IgnoreDataEnd,
        /// Bytes after the 32 digits of a token are ignored.
        AcceptLongToken,
    }
}
