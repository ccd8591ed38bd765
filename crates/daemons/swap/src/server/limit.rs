//! The limit of a run with a swap device.
//!
//! A thread changes the limit, because the writer of a lower limit waits until the kernel has
//! swapped enough out.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use aquifer_ipc::size::ByteSize;
use aquifer_pager::LIMIT_BYTES_MIN;
use parking_lot::{Condvar, Mutex};

use crate::protect::permit_swapping;
use crate::setup::cgroup::{Cgroup, LimitChange};

/// Pause after an attempt that has changed nothing.
const RETRY_INTERVAL: Duration = Duration::from_millis(50);
/// Time after which a limit that is not reached causes a notice.
const NOTICE_TIMEOUT: Duration = Duration::from_secs(10);

/// The limit of a run, which includes its programs and the device's share of the mempool.
#[derive(Debug)]
pub(super) struct DeviceLimit {
    bytes: u64,
    /// The device's share of the mempool, which does not change.
    share_bytes: u64,
    changes: Arc<Changes>,
    /// The time of the change; `None` once the limit is reached, or a notice was sent.
    changed_at: Option<Instant>,
}

/// Requests to the thread, and its failures.
#[derive(Debug, Default)]
struct Changes {
    state: Mutex<ChangeState>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct ChangeState {
    /// The limit that the cgroup must get.
    wanted: Option<u64>,
    failure: Option<String>,
    is_stopped: bool,
}

impl DeviceLimit {
    /// The limit of a run whose cgroup has been created with `resident_bytes` and `swap_bytes`.
    ///
    /// # Errors
    /// If the thread cannot be started.
    pub(super) fn new(
        bytes: u64,
        resident_bytes: u64,
        swap_bytes: u64,
        cgroup: &Arc<Cgroup>,
    ) -> io::Result<Self> {
        let changes = Arc::new(Changes::default());
        let (thread_changes, cgroup) = (Arc::clone(&changes), Arc::clone(cgroup));
        // The thread is never joined: the kernel can keep it in a write as long as a node is away.
        std::thread::Builder::new()
            .name("limit".into())
            .spawn(move || thread_changes.apply_until_stopped(&cgroup, swap_bytes))?;
        Ok(Self { bytes, share_bytes: bytes - resident_bytes, changes, changed_at: None })
    }

    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The smallest limit that [`Self::set`] accepts.
    pub(super) fn least_bytes(&self) -> u64 {
        self.share_bytes + LIMIT_BYTES_MIN
    }

    /// Changes the limit. A limit that is too small, which no agent sends, is ignored.
    pub(super) fn set(&mut self, bytes: u64) {
        if bytes < self.least_bytes() {
            tracing::warn!(bytes, "ignored a limit that is too small");
            return;
        }
        tracing::info!(bytes, "limit changed");
        self.bytes = bytes;
        self.changed_at = Some(Instant::now());
        let mut state = self.changes.state.lock();
        (state.wanted, state.failure) = (Some(bytes - self.share_bytes), None);
        drop(state);
        self.changes.changed.notify_all();
    }

    /// A notice to the user that the limit cannot be reached, if there is one.
    pub(super) fn drain_notice(&mut self) -> Option<String> {
        let changed_at = self.changed_at?;
        let mut state = self.changes.state.lock();
        if let Some(failure) = state.failure.take() {
            self.changed_at = None;
            return Some(format!("the limit could not be changed: {failure}"));
        }
        if state.wanted.is_none() {
            self.changed_at = None;
            return None;
        }
        if changed_at.elapsed() < NOTICE_TIMEOUT {
            return None;
        }
        self.changed_at = None;
        Some(format!(
            "its limit of {} is not reached yet: memory that is locked or in use cannot be swapped out, or \
             memory nodes are slow. It does not grow meanwhile",
            ByteSize(self.bytes)
        ))
    }
}

impl Drop for DeviceLimit {
    fn drop(&mut self) {
        self.changes.state.lock().is_stopped = true;
        self.changes.changed.notify_all();
    }
}

impl Changes {
    fn apply_until_stopped(&self, cgroup: &Cgroup, swap_bytes: u64) {
        permit_swapping();
        let mut state = self.state.lock();
        while !state.is_stopped {
            let Some(wanted) = state.wanted else {
                self.changed.wait(&mut state);
                continue;
            };
            drop(state);
            let change = cgroup.change_limits(wanted, swap_bytes);
            state = self.state.lock();
            match change {
                Ok(LimitChange::Reached) if state.wanted == Some(wanted) => state.wanted = None,
                Ok(LimitChange::Reached | LimitChange::Nearer) => {}
                Ok(LimitChange::Stuck) => {
                    self.changed.wait_for(&mut state, RETRY_INTERVAL);
                }
                Err(error) if state.wanted == Some(wanted) => {
                    tracing::error!(%error, "changing the limit failed");
                    (state.wanted, state.failure) = (None, Some(error.to_string()));
                }
                // A newer limit replaces this one.
                Err(error) => tracing::warn!(%error, "changing the limit failed"),
            }
        }
    }
}
