//! The mutations of the HTTP server: checks that tests omit on purpose.
//!
//! The checks in `docs/formats/ipc.md` name their mutations.

aquifer_mutation::mutations! {
    /// A check that is omitted.
    pub enum Mutation {
        /// A request of any method is answered with the metrics.
        AnswerAnyMethod,
    }
}
