//! Steps of a sync that a test breaks on purpose, to prove that it detects each fault.

aquifer_mutation::mutations! {
    /// A step that can be broken.
    pub enum Mutation {
        /// A sync frees the replaced objects before the record names the new copy.
        FreeEarly,
        /// A sync writes to the root that the record names.
        WriteCurrentRoot,
        /// Objects of an interrupted sync are never freed.
        SkipCleaning,
        /// A leaf is freed before the chunks that only it names.
        FreeLeafFirst,
        /// A sync that lacks a node forgets what it has written on the others.
        AbandonWritten,
        /// A process reuses the roots of an earlier process, which may still write to them.
        ReuseRoots,
        /// The next sync does not write the pages that a failed sync was to write.
        ForgetChanges,
        /// A read does not compare the bytes with their checksum.
        TrustBytes,
    }
}
