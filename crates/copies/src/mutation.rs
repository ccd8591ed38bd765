//! Steps of a sync that the simulator breaks, to show that it notices.

aquifer_mutation::mutations! {
    /// A step that can be broken.
    pub enum Mutation {
        /// What a sync replaces is freed before the record names the new copy.
        FreeEarly,
        /// A sync writes the root that the record names.
        WriteCurrentRoot,
        /// What a sync has left that did not end is never freed.
        SkipCleaning,
        /// A leaf is freed before the chunks that only it names.
        FreeLeafFirst,
        /// A sync that lacks a node forgets what it has written on the others.
        AbandonWritten,
        /// A process goes on with the roots of an earlier one, which may still be writing them.
        ReuseRoots,
        /// The pages that a failed sync was to write are forgotten.
        ForgetChanges,
        /// Bytes that are read are not compared with their checksum.
        TrustBytes,
    }
}
