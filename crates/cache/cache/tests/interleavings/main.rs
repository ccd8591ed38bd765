//! Tests of the lock-free parts of the store, in random interleavings of threads.

// The epochs with the atomics of shuttle.
#[expect(dead_code, reason = "no thread of the tests limits the time until which it may serve")]
#[path = "../../src/store/epochs.rs"]
mod epochs;
mod index;
mod reuse;

mod sync {
    pub use shuttle::sync::atomic::{AtomicU64, Ordering, fence};
}
