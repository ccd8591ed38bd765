//! The mutations of the book: checks that tests omit on purpose.
//!
//! Each is named at its check in `docs/formats/ipc.md`.

aquifer_mutation::mutations! {
    /// A check that is omitted.
    pub enum Mutation {
        /// The number of entries in a book is not bounded.
        TrustEntryCount,
    }
}
