//! The atomics of the epochs. The interleaving tests replace this module by the atomics of shuttle.

pub use std::sync::atomic::{AtomicU64, Ordering, fence};
