//! The mutations of the book: checks that tests omit on purpose.
//!
//! `docs/formats/ipc.md` names each mutation at its check.

aquifer_mutation::mutations! {
    /// A check that is omitted.
    pub enum Mutation {
        /// The number of entries in a book is not bounded.
        TrustEntryCount,
    }
}
