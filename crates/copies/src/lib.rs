//! Copies of a segment on memory nodes, in the heaps of its user.
//!
//! A copy is a tree of objects: a root, leaves, and chunks of the segment. A sync writes new
//! objects for what has changed, and then the directory's record of the copies is replaced. So a
//! copy is whole at any time, and a crash leaves either the old one or the new one.
//!
//! - [`store`] is what a copy needs of a heap.
//! - [`tree`] is its form. [`writer`] writes the copy on one node, [`reader`] reads it, and
//!   [`cleaning`] frees objects that no copy needs.
//! - [`copies`] keeps several copies the same, with the record.
//!
//! Format: `docs/formats/segments.md`.

#![forbid(unsafe_code)]

pub mod cleaning;
pub mod copies;
pub mod mutation;
pub mod reader;
pub mod store;
pub mod tree;
pub mod writer;

pub use copies::{Change, Copies, CopyError, CopyNodes, Environment, Synced};
pub use mutation::Mutation;
pub use reader::restore;
pub use store::Store;
