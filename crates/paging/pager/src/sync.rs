//! The words and locks of the page cache. Its interleaving test replaces this module by those of
//! shuttle.

pub use std::sync::atomic::{AtomicU32, Ordering};

pub use aquifer_fabric::Memory;
pub use parking_lot::Mutex;
