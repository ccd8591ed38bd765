//! The mutations of the memory governor: rules that tests break on purpose.

aquifer_mutation::mutations! {
    /// A rule of the governor that is omitted.
    pub enum Mutation {
        /// Elastic runs may have all idle memory, and not a part of it.
        LendAll,
        /// The limit of a run falls at once to what it is allowed, so that its threads wait.
        ShrinkAtOnce,
        /// The mempool may have the memory that should stay free.
        FillAll,
        /// The mempool does not shrink when the kernel reports pressure.
        IgnorePressure,
    }
}
