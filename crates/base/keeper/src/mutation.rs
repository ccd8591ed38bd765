//! The mutations of the keeper: checks that tests omit on purpose.
//!
//! The checks in `docs/formats/ipc.md` name their mutations.

aquifer_mutation::mutations! {
    /// A check that is omitted.
    pub enum Mutation {
        /// A daemon may store items in a share that it does not own.
        SkipOwner,
    }
}
