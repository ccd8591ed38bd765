//! Steps of the hand-over that the model breaks, to show that it notices.

aquifer_mutation::mutations! {
    /// A step that can be broken.
    pub enum Mutation {
        /// A host owns a segment that it was not prepared for.
        AcceptUnprepared,
        /// A target that has said that nothing has arrived forgets that it did.
        ForgetRefusal,
        /// A source owns again although the target may own.
        RetakeUnfenced,
        /// A source keeps the segment while its message is on the way.
        KeepSent,
        /// A target never tells the directory that it owns.
        NeverConfirm,
        /// A source that was restarted takes it for granted that its message was lost.
        ForgetSent,
        /// The directory lets another intent replace one.
        ReplaceIntent,
        /// An intent is retracted by its owner alone, whatever its generation.
        RetractAny,
        /// A segment is restored although the target of its last hand-over may have received it.
        RestoreUnfenced,
    }
}
