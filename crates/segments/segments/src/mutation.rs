//! Steps of pulling that a test breaks on purpose, to prove that it detects the fault.

aquifer_mutation::mutations! {
    /// A step that can be broken.
    pub enum Mutation {
        /// A page of which a READ is in flight is read once more when a thread waits for it.
        ReadTwice,
        /// A page is read onto an older copy before it is known whether a newer one has it.
        ReadOntoOlder,
        /// A host receives a segment again while READs of its earlier ownership are in flight.
        AcceptBusy,
        /// A page is read from a copy in which it is not present.
        TrustCopy,
    }
}
