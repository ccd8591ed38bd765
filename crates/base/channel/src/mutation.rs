//! The mutation of the deadline of a process whose agent does not answer.

aquifer_mutation::mutations! {
    /// A step that is done wrong.
    pub enum Mutation {
        /// A process waits twice its grace time for an answer.
        WaitPastDeadline,
    }
}
