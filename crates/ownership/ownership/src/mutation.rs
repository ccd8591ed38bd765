//! Steps of the hand-over that the model test breaks, to show that it notices.

aquifer_mutation::mutations! {
    /// A step that can be broken.
    pub enum Mutation {
        /// A target becomes the owner although it is not prepared.
        AcceptUnprepared,
        /// A target forgets that it has refused a hand-over.
        ForgetRefusal,
        /// A source retracts its intent although the target may own the segment.
        RetakeUnfenced,
        /// A source has access after it has sent the transfer.
        KeepSent,
        /// A target never confirms in the directory that it owns the segment.
        NeverConfirm,
        /// A restarted source assumes that its transfer was lost.
        ForgetSent,
        /// An intent can replace another intent.
        ReplaceIntent,
        /// An intent can be retracted whatever its generation.
        RetractAny,
        /// A segment is restored although the target of its last hand-over may have received it.
        RestoreUnfenced,
    }
}
