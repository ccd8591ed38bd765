//! The mutations of these formats: checks that tests omit on purpose.
//!
//! `docs/formats/directory.md` names each mutation at its check.

aquifer_mutation::mutations! {
    /// A check that is omitted.
    pub enum Mutation {
        /// A lease with an unknown tag is read as no lease.
        AcceptAnyLeaseTag,
        /// A host number in a key may have a sign and leading zeros.
        AcceptOtherDigits,
    }
}
