//! The mutations of the paging protocol: steps that tests break on purpose.
//!
//! Each is named at its step in `docs/formats/paging.md`.

aquifer_mutation::mutations! {
    /// A step of the paging protocol that is omitted or done wrong.
    pub enum Mutation {
        /// The update rule is not applied: the acknowledgement of an old write counts for the
        /// newest bytes.
        DropUpdateFlag,
        /// A block is reclaimed before its write is acknowledged.
        ReclaimUnacknowledged,
        /// A page that the program discarded while it was leaving is kept.
        KeepDiscarded,
        /// After the event of `MADV_DONTNEED` the monitor assumes that the kernel has dropped the
        /// page.
        TrustRemoveEvent,
        /// A fork shares remote pages without counting the new references.
        ForgetForkReference,
        /// A forked child keeps the pages of memory that it has not inherited from its parent.
        InheritAll,
        /// Memory that a forked child has not inherited is discarded only in areas that are adopted
        /// already.
        DiscardInAreas,
        /// Faults are served before the events that were read together with them.
        ServeFaultsBeforeEvents,
        /// Messages are read while the worker moves pages, so that the kernel does not refuse moves
        /// because of unread events.
        ReadWhileMoving,
        /// Pages are evicted without a check of the pages that were pinned since.
        IgnorePins,
        /// A staging buffer is used again before its batch is in the mempool.
        ReuseStaging,
        /// A fault on a lost page is answered with zeros.
        FillLost,
        /// A page whose bytes could not be copied from the staging buffer is staged nevertheless.
        StageUnreadable,
        /// A fork is served while a batch is in flight.
        ForkWithoutFlush,
        /// The sender reports a batch as written before a memory node has acknowledged it.
        AcknowledgeEarly,
        /// The sender reports a batch as written when the first replica has acknowledged it.
        AcknowledgeFirst,
        /// Pages count as written although a replica lacks them, because its node was away.
        KeepIncomplete,
        /// A slab is copied to a new replica while it is being filled.
        CopyWhileWriting,
        /// A new replica is recorded before it has all pages.
        RecordUnfinished,
        /// The old replica of a slab is freed before the new one is complete.
        FreeBeforeSwitch,
        /// The old replica of a slab is freed before the pages of the slab are copied.
        DropBeforeCopied,
        /// A WRITE that a node has refused, as it does once the host is fenced, counts as copied.
        MoveFenced,
        /// The backup of a slab is freed before the replica in memory that replaces it is complete.
        ReturnEarly,
        /// A WRITE that the disk of a node has failed counts as written.
        AcknowledgeDiskError,
        /// A chunk that the disk of a node could not return is copied as if it had been read.
        CopyUnreadable,
        /// A replica that was moved while it was read counts as a failure of its node.
        BlameMovedReplica,
        /// A buffer is reused although a READ into it may still complete.
        ReuseLateBuffer,
        /// The checksum of a page that was read from a memory node is not checked.
        SkipChecksum,
        /// A clean copy is not released when its page is written again.
        ForgetRelease,
        /// A page with a clean copy counts as unchanged when it leaves, whatever its bytes.
        TrustCopy,
        /// An adoption continues with its list of present pages although an event was applied
        /// since.
        AdoptFromOldList,
        /// After a restart, areas are adopted before the events that the previous agent had read
        /// are applied.
        AdoptBeforeEvents,
        /// A Remap that is read before the event that vacates its new range is applied at once.
        TrustOrder,
        /// A move to a range of which parts were registered is applied before it is known which.
        TrustRegistration,
        /// The Unmap event of a move's old place is applied to pages that were moved there since.
        ApplyStaleUnmap,
        /// A thread that writes a page that was write-protected at a fork is woken without
        /// permission to write.
        WakeProtected,
        /// Pages change their numbers (mremap) while a batch is leaving.
        RemapWhileLeaving,
        /// After a restart the agent does not know that a move of page words had begun.
        ForgetMoving,
        /// After a restart, a leaving page in a staging buffer is treated as resident in the
        /// program.
        ForgetLeaving,
        /// A write to a page of a block volume reuses the page's slot in a block that is already
        /// sealed.
        AbsorbIntoSealed,
        /// A READ is not retried over a new endpoint when the endpoint dates from before the node's
        /// return.
        TryOnce,
        /// A node that returned is added while operations to its predecessor are in flight.
        AddBusyNode,
        /// A page that is moved to another slab is recorded as staged before its bytes are in the
        /// slot.
        StageBeforeCopying,
        /// A page of a block volume is moved without a check that it was not written since it was
        /// read.
        MoveUnchecked,
        /// A reader of a block volume does not retain the location that it fetches from.
        FetchUnreferenced,
        /// A location that is free keeps its entry in the page cache.
        KeepStale,
        /// A cached block is given away although a reader has pinned it.
        PunchPinned,
        /// A run that returns memory may grow by as much as is evicted.
        LetGrow,
        /// A page table is recovered although a tree node is linked twice.
        AcceptLinkedTwice,
    }
}
