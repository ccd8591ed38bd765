//! The mutations of the handshake: checks that tests omit on purpose.

aquifer_mutation::mutations! {
    /// A check that is omitted.
    pub enum Mutation {
        /// A handshake message of any length is read.
        TrustHandshakeLength,
    }
}
