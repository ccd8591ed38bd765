//! The budget of memory that all partitions of a server share.

use std::sync::atomic::{AtomicU64, Ordering};

/// A limit in bytes, and the bytes that are used of it.
#[derive(Debug)]
pub struct Budget {
    limit: AtomicU64,
    used: AtomicU64,
    /// The part of `used` that is freed as soon as no thread can access it.
    retired: AtomicU64,
}

impl Budget {
    /// A budget of which nothing is used.
    #[must_use]
    pub fn new(limit: u64) -> Self {
        Self { limit: AtomicU64::new(limit), used: AtomicU64::new(0), retired: AtomicU64::new(0) }
    }

    /// Charges bytes if they are free; returns whether they were.
    pub fn charge(&self, bytes: u64) -> bool {
        let used = self.used.fetch_add(bytes, Ordering::Relaxed) + bytes;
        let fits = used <= self.limit();
        if !fits {
            self.used.fetch_sub(bytes, Ordering::Relaxed);
        }
        fits
    }

    /// Charges bytes, even beyond the limit.
    pub fn charge_always(&self, bytes: u64) {
        self.used.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Frees bytes.
    pub fn free(&self, bytes: u64) {
        self.used.fetch_sub(bytes, Ordering::Relaxed);
    }

    /// Announces that used bytes will soon be free.
    pub fn retire(&self, bytes: u64) {
        self.retired.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Frees bytes that were announced.
    pub fn free_retired(&self, bytes: u64) {
        self.retired.fetch_sub(bytes, Ordering::Relaxed);
        self.free(bytes);
    }

    /// Whether announced bytes are not yet free.
    pub fn has_retired(&self) -> bool {
        self.retired.load(Ordering::Relaxed) != 0
    }

    /// Bytes that are free, or will be soon.
    pub fn available(&self) -> u64 {
        let used = self.used.load(Ordering::Relaxed);
        (self.limit() + self.retired.load(Ordering::Relaxed)).saturating_sub(used)
    }

    /// Bytes in use that were not announced to be free soon.
    pub fn kept(&self) -> u64 {
        self.used().saturating_sub(self.retired.load(Ordering::Relaxed))
    }

    /// Bytes in use.
    pub fn used(&self) -> u64 {
        self.used.load(Ordering::Relaxed)
    }

    /// The limit in bytes.
    pub fn limit(&self) -> u64 {
        self.limit.load(Ordering::Relaxed)
    }

    /// Sets another limit. The next writes free bytes that are used beyond it.
    pub fn set_limit(&self, limit: u64) {
        self.limit.store(limit, Ordering::Relaxed);
    }
}
