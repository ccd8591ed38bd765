//! Steps of pulling that a test breaks, to show that it notices.

aquifer_mutation::mutations! {
    /// A step that can be broken.
    pub enum Mutation {
        /// A page that is on its way is read once more when a thread waits for it.
        ReadTwice,
        /// A page is read onto an older copy before it is known whether a newer one has it.
        ReadOntoOlder,
        /// A host gets a segment again while READs of its last time are on their way.
        AcceptBusy,
        /// A page that is not present in a copy is taken from it all the same.
        TrustCopy,
    }
}
