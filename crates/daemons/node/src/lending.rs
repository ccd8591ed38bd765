//! The amount of memory that the node is requested to lend at run time, and that it lends.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

use aquifer_directory::names::{MemoryHolder, ResizeBlocker};
use parking_lot::Mutex;

/// The request and its status. The directory's watch writes the request, the maintenance thread
/// writes the status, and the directory record and the metrics show it.
#[derive(Debug)]
pub(crate) struct Lending {
    requested_bytes: AtomicU64,
    /// Memory in use that the node recalls, and the users with the most of it.
    recalled: Mutex<(u64, Vec<MemoryHolder>)>,
    status: Mutex<LendingStatus>,
    /// Whether the node is to lend nothing, whatever is requested.
    is_stopping: AtomicBool,
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
        Self {
            requested_bytes: AtomicU64::new(requested_bytes),
            recalled: Mutex::new((0, Vec::new())),
            status: Mutex::new(status),
            is_stopping: AtomicBool::new(false),
        }
    }

    /// Sets the request.
    pub fn request(&self, bytes: u64) {
        self.requested_bytes.store(bytes, Relaxed);
    }

    /// The request.
    pub fn requested_bytes(&self) -> u64 {
        if self.is_stopping.load(Relaxed) { 0 } else { self.requested_bytes.load(Relaxed) }
    }

    /// Requests that the node lends nothing until it stops, whatever the directory requests.
    pub fn stop(&self) {
        self.is_stopping.store(true, Relaxed);
    }

    /// Sets the memory in use that the node recalls, and the users with the most of it.
    pub fn set_recalled(&self, bytes: u64, holders: Vec<MemoryHolder>) {
        *self.recalled.lock() = (bytes, holders);
    }

    /// The memory in use that the node recalls, and the users with the most of it.
    pub fn recalled(&self) -> (u64, Vec<MemoryHolder>) {
        self.recalled.lock().clone()
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
