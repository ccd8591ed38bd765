//! The mutations of a host's protocol steps in the cluster, which a test breaks on purpose.

aquifer_mutation::mutations! {
    /// A step that is omitted or done wrong.
    pub enum Mutation {
        /// A recovery frees memory before the node has fenced the dead host.
        FreeBeforeFence,
        /// A recovery forgets the memory on nodes that are away.
        ForgetNodesAway,
        /// A recovery that stops early forgets the memory on nodes that it has not recovered.
        ForgetNodesLeft,
        /// A host that has resumed and died again is recovered when the grace time of its first
        /// death has passed.
        KeepGraceTimes,
        /// A host ends as soon as the directory does not answer.
        GiveUpWhenCutOff,
        /// Kept memory is lost when its time has passed since the end of the node's lease, although
        /// no attempt to connect has failed.
        LoseByTimer,
        /// A host does not connect to a node whose lease has ended and whose memory is kept.
        ForgetAddress,
        /// The next process of a host ends when its first attempt to take over fails.
        TryOnce,
        /// A recovery leaves no record for the nodes that start later.
        ForgetRecovered,
    }
}
