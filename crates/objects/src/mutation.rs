//! Steps of the heap that the simulator breaks, to show that it notices.

aquifer_mutation::mutations! {
    /// A step that can be broken.
    pub enum Mutation {
        /// An object is written without a lock.
        WriteUnlocked,
        /// A moved object keeps its version.
        KeepVersion,
        /// A freed slot keeps its header.
        KeepFreed,
        /// A reader does not compare the number of what it has found.
        TrustAddress,
        /// A reader does not look at the header again.
        TrustFirstHeader,
        /// The memory of a merged block is freed before its addresses name the destination.
        FreeEarly,
        /// Objects are not locked while they are moved.
        MoveUnlocked,
        /// The address of a merged block is used again although objects have it as their home.
        ReuseAddress,
        /// A message to write an object may have any number of bytes.
        AcceptAnyLength,
        /// An object is not looked for in the second block that an address names.
        ForgetSecond,
    }
}
