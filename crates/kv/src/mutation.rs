//! Steps of a store that tests break, to show that they notice.

aquifer_mutation::mutations! {
    /// A step that can be broken.
    pub enum Mutation {
        /// An item is replaced by another one without a word in it that says so.
        ReplaceUnmarked,
        /// An item is removed from its bucket without a word in it that says so.
        DeleteUnmarked,
        /// A bucket is replaced by a larger one without a word in it that says so.
        GrowUnmarked,
    }
}
