//! The mutations of the header page: checks that tests omit on purpose.
//!
//! `docs/formats/pool.md` names each mutation at its check. The protocol's mutations are in `op`.

aquifer_mutation::mutations! {
    /// A check that is omitted.
    pub enum Mutation {
        /// The fields that follow from the number of sections are not compared.
        TrustOffsets,
    }
}
