//! The mutations of the messages: checks that tests omit on purpose.
//!
//! `docs/formats/fabric-verbs.md` names each mutation at its check.

aquifer_mutation::mutations! {
    /// A check that is omitted.
    pub enum Mutation {
        /// A key that gives no right is read as open.
        OpenWithoutRights,
    }
}
