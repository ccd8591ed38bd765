//! The parts of the store that are used without a lock, in random interleavings of threads.

// The epochs with the atomics of shuttle.
#[expect(dead_code, reason = "no thread of the tests has a time in which it may serve")]
#[path = "../../src/store/epochs.rs"]
mod epochs;
mod index;
mod reuse;

mod sync {
    pub use shuttle::sync::atomic::{AtomicU64, Ordering, fence};
}
