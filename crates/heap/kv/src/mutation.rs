//! Steps of a store that tests break on purpose, to show that they detect each.

aquifer_mutation::mutations! {
    /// A step that can be broken.
    pub enum Mutation {
        /// A client replaces an item without marking it as moved.
        ReplaceUnmarked,
        /// A client removes an item from its bucket without marking it as dead.
        DeleteUnmarked,
        /// A client replaces a bucket by a larger one without marking it as moved.
        GrowUnmarked,
    }
}
