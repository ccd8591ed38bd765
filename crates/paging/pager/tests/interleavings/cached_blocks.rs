//! The duel, which the page cache names by this path.

#[expect(dead_code, reason = "the test does without the order of the blocks")]
#[path = "../../src/cached_blocks/duel.rs"]
pub mod duel;
