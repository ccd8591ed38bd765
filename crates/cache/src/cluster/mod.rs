//! Servers that are one cache: each has some of the partitions, and partitions move between them.
//!
//! - [`copying`]: how the memory of a partition is copied.

pub mod copying;
