//! The mutations of the messages: checks that tests omit on purpose.
//!
//! Each is named at its check in `docs/formats/fabric-verbs.md`.

aquifer_mutation::mutations! {
    /// A check that is omitted.
    pub enum Mutation {
        /// A key that gives no right is read as open.
        OpenWithoutRights,
    }
}
