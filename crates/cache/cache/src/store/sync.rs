//! The atomics of the epochs: those of shuttle in its tests, which this file is included in.

pub use std::sync::atomic::{AtomicU64, Ordering, fence};
