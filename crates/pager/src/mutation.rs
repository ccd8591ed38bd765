//! The steps of the protocol that tests break on purpose.

aquifer_mutation::mutations! {
    /// A step of the protocol done wrong.
    pub enum Mutation {
        /// An acknowledgement of an older write is taken for one of the newest (the update rule is dropped).
        DropUpdateFlag,
        /// A block is reclaimed before its write is acknowledged.
        ReclaimUnacknowledged,
        /// A page that was given up while it was leaving is kept.
        KeepDiscarded,
        /// After `MADV_DONTNEED`'s event a page is taken as if the kernel had already dropped it.
        TrustRemoveEvent,
        /// A fork shares remote pages without counting the new reference.
        ForgetForkReference,
        /// Faults are served before the events that were read with them.
        ServeFaultsBeforeEvents,
        /// Pages are taken although an event is unread: the worker moves them under the event-free descriptor.
        EvictDuringEvents,
        /// A fork is served while a batch is still on its way.
        ForkWithoutFlush,
        /// The sender acknowledges before the memory node has.
        AcknowledgeEarly,
        /// The sender acknowledges when the first copy has.
        AcknowledgeFirst,
        /// A slab is copied while it is filled.
        CopyWhileWriting,
        /// A new copy is recorded before it is whole.
        RecordUnfinished,
        /// A buffer is used again although a READ into it may still be answered.
        ReuseLateBuffer,
        /// What a memory node gives is not held against its checksum.
        SkipChecksum,
        /// A page that has changed since it came back keeps its old place on the memory node, too.
        ForgetRelease,
        /// A page that came back from a memory node is taken to be unchanged when it leaves again.
        TrustCopy,
        /// What is present in a newly registered area is held without a proof that it is registered.
        AdoptUnproved,
        /// After a restart areas are proved registered before the events that were read and not heeded are.
        AdoptBeforeEvents,
        /// The unmapping that a move brings is taken for one of what was moved there since.
        ApplyStaleUnmap,
        /// Who asks to write a page that was protected at a fork is woken, and not allowed to.
        WakeProtected,
        /// Pages change their number while a batch is leaving.
        RemapWhileLeaving,
        /// That a move of pages was begun is not known after a restart.
        ForgetMoving,
        /// After a restart a page that was on its way out is taken for one that is in the program.
        ForgetLeaving,
        /// After a restart no blocks of the mempool are set aside for what is on its way there.
        ReserveNothing,
        /// A page of a device that is written again is written in its place, though its block is the sender's by now.
        AbsorbIntoSealed,
        /// A READ over an endpoint of before its node came back is not tried once more.
        TryOnce,
        /// A node that came back is taken in though something is under way to what it was before.
        AddBusyNode,
        /// A page that is moved is noted in the mempool before its bytes are there.
        StageBeforeCopying,
        /// A page of a device that is moved is not looked at again after it was read.
        MoveUnchecked,
        /// A device's reader does not refer to the place that it fetches from.
        FetchUnreferenced,
    }
}
