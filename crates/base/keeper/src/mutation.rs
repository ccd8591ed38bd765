//! The mutations of the keeper: checks that tests omit on purpose.
//!
//! Each is named at its check in `docs/formats/ipc.md`.

aquifer_mutation::mutations! {
    /// A check that is omitted.
    pub enum Mutation {
        /// A daemon may store items in a share that it does not own.
        SkipOwner,
    }
}
