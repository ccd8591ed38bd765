//! Copies of a segment on memory nodes, in the heaps of its user.
//!
//! A copy is a tree of objects: a root, leaves, and chunks of the segment. A sync writes new
//! objects for the chunks that have changed, and then replaces the directory's record of the
//! copies. So the record always names a complete copy, and a crash leaves either the old one or the
//! new one.
//!
//! - [`store`] has the interface to a heap.
//! - [`tree`] has the objects of a copy. [`writer`] writes the copy on one node, [`reader`] reads
//!   it, and [`cleaning`] frees objects that no copy needs.
//! - [`copies`] keeps the copies on several nodes identical, and maintains the record.
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
