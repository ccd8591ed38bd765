//! The mutations of the heap: steps that a test breaks, to show that the simulator detects it.

aquifer_mutation::mutations! {
    /// A step that can be broken.
    pub enum Mutation {
        /// An object is written without a lock.
        WriteUnlocked,
        /// A moved object keeps its version.
        KeepVersion,
        /// A freed slot keeps its header.
        KeepFreed,
        /// A reader does not compare the number in the header with that of the pointer.
        TrustAddress,
        /// A reader does not read the header a second time.
        TrustFirstHeader,
        /// The memory of a merged block is freed before its addresses name the destination.
        FreeEarly,
        /// Objects are not locked while they are moved.
        MoveUnlocked,
        /// The address of a merged block is reused although objects have it as their home.
        ReuseAddress,
        /// Numbers of objects are used before they are reserved.
        ReserveNoNumbers,
        /// A write is not recorded before it begins.
        WriteUnrecorded,
        /// A merge is not recorded before it begins.
        MergeUnrecorded,
        /// The home of a moved object is not recorded.
        ForgetHome,
        /// The address of a block is reused by a block of another class.
        MixClasses,
        /// The record of a block is cleared before its memory.
        ForgetBlockEarly,
        /// A merge is completed although not all objects were copied.
        TrustCopies,
        /// A replacement is not recorded before it begins.
        ReplaceUnrecorded,
        /// A replacement is completed although the object was not yet in its new place.
        TrustReplacement,
        /// A message to write an object may have any number of bytes.
        AcceptAnyLength,
        /// An object is not searched in the second block that an address names.
        ForgetSecond,
    }
}
