//! The amount of memory that the node is requested to lend at run time, and that it lends.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use aquifer_directory::names::ResizeBlocker;
use parking_lot::Mutex;

/// The request and its status. The directory's watch writes the request, the maintenance thread
/// writes the status, and the directory record and the metrics show it.
#[derive(Debug)]
pub(crate) struct Lending {
    requested_bytes: AtomicU64,
    status: Mutex<LendingStatus>,
}

/// The progress of a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct LendingStatus {
    /// Lent memory.
    pub lent_bytes: u64,
    /// The last request that was processed.
    pub requested_bytes: u64,
    /// The reason why `lent_bytes` differs from the request, if known.
    pub blocker: Option<ResizeBlocker>,
}

impl Lending {
    /// Creates the state with the initial request.
    pub const fn new(lent_bytes: u64, requested_bytes: u64) -> Self {
        let status = LendingStatus { lent_bytes, requested_bytes, blocker: None };
        Self { requested_bytes: AtomicU64::new(requested_bytes), status: Mutex::new(status) }
    }

    /// Sets the request.
    pub fn request(&self, bytes: u64) {
        self.requested_bytes.store(bytes, Relaxed);
    }

    /// The request.
    pub fn requested_bytes(&self) -> u64 {
        self.requested_bytes.load(Relaxed)
    }

    /// The status.
    pub fn status(&self) -> LendingStatus {
        *self.status.lock()
    }

    /// Sets the status.
    pub fn set_status(&self, status: LendingStatus) {
        *self.status.lock() = status;
    }
}
