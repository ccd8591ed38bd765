//! The mutations of these formats: checks that tests omit on purpose.
//!
//! Each is named at its check in `docs/formats/ipc.md`.

aquifer_mutation::mutations! {
    /// A check that is omitted.
    pub enum Mutation {
        /// Any number but 0 is read as true.
        AcceptAnyFlag,
        /// The range of a request may end behind the data area of the ring.
        IgnoreDataEnd,
        /// What follows the 32 digits of a token is ignored.
        AcceptLongToken,
    }
}
