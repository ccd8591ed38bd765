//! Epochs: they determine when unlinked memory can be reused.
//!
//! A thread pins the current epoch for as long as it may use items: for a turn of its loop, not for
//! each item. Unlinked memory is retired in the current epoch, and the epoch advances. No thread
//! can access the memory any more when all pinned threads have pinned a later epoch.

use std::cell::Cell;

use super::sync::{AtomicU64, Ordering, fence};

/// The epoch of a thread that has pinned none.
const UNPINNED: u64 = u64::MAX;
/// The time until which a thread may serve, if there is no limit.
pub const NO_END_US: u64 = u64::MAX;

/// A thread's epoch, on a cache line of its own.
#[derive(Debug)]
#[repr(align(128))]
struct Pinned(AtomicU64);

/// The epochs of the threads that use a store.
#[derive(Debug)]
pub struct Epochs {
    current: AtomicU64,
    pinned: Box<[Pinned]>,
}

/// A thread's pinned epoch: no item that the thread finds is freed while the pin lives.
#[derive(Debug)]
pub struct Pin<'a> {
    pinned: &'a AtomicU64,
    /// The time until which the thread may serve, in microseconds since the start of the machine;
    /// 0 if it may serve nothing.
    serves_until_us: Cell<u64>,
}

impl Epochs {
    /// Epochs for this many threads.
    #[must_use]
    pub fn new(threads: usize) -> Self {
        let pinned = (0..threads).map(|_| Pinned(AtomicU64::new(UNPINNED))).collect();
        Self { current: AtomicU64::new(1), pinned }
    }

    /// Pins the current epoch for a thread, which must not have pinned another.
    ///
    /// # Panics
    /// If there is no such thread, or if it has pinned an epoch.
    #[must_use]
    pub fn pin(&self, thread: usize) -> Pin<'_> {
        let pinned = &self.pinned[thread].0;
        assert_eq!(pinned.load(Ordering::Relaxed), UNPINNED, "thread {thread} has pinned an epoch");
        pinned.store(self.current.load(Ordering::Acquire), Ordering::Relaxed);
        // The pin must be visible before this thread reads the index. With the fence in `retire`,
        // either the other thread sees the pin, or this thread sees the changes of the other.
        fence(Ordering::SeqCst);
        Pin { pinned, serves_until_us: Cell::new(NO_END_US) }
    }

    /// Begins a new epoch; returns the one in which the caller's unlinked memory is retired.
    pub fn retire(&self) -> u64 {
        fence(Ordering::SeqCst);
        self.current.fetch_add(1, Ordering::AcqRel)
    }

    /// The oldest epoch that a thread has pinned. Memory that was retired before it can be reused.
    #[must_use]
    pub fn oldest(&self) -> u64 {
        fence(Ordering::SeqCst);
        let oldest = self.pinned.iter().map(|thread| thread.0.load(Ordering::Acquire)).min();
        oldest.unwrap_or(UNPINNED)
    }
}

impl Pin<'_> {
    /// Sets the time until which the thread may serve, in microseconds since the start of the
    /// machine; returns the previous one.
    pub fn serve_until(&self, end_us: u64) -> u64 {
        self.serves_until_us.replace(end_us)
    }

    /// The time until which the thread may serve: [`NO_END_US`] for no limit, or 0 for nothing.
    pub fn serves_until_us(&self) -> u64 {
        self.serves_until_us.get()
    }
}

impl Drop for Pin<'_> {
    fn drop(&mut self) {
        self.pinned.store(UNPINNED, Ordering::Release);
    }
}
