//! The mutations of the header page: checks that tests omit on purpose.
//!
//! Each is named at its check in `docs/formats/pool.md`. The protocol's mutations are in `op`.

aquifer_mutation::mutations! {
    /// A check that is omitted.
    pub enum Mutation {
        /// What follows from the number of sections is not compared.
        TrustOffsets,
    }
}
