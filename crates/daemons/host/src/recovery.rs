//! Recovery: frees what dead hosts owned.
//!
//! A host is dead when its lease has ended. A host that recovers it claims its number under a lease
//! of its own. So no two hosts recover it at the same time, and memory nodes fence the dead host's
//! operations in flight. If the recovering host dies, too, the number can be claimed again.

mod claim;
mod grace;
mod worker;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use aquifer_directory::names::AgentRecord;
use aquifer_directory::{Directory, Lease};
use aquifer_fabric::Tenant;

use crate::nodes::NodeRegistry;
pub use claim::RecoveryClaim;
use grace::GraceTimes;
pub use worker::RecoveryWorker;

/// Lifetime of a recovering host's lease without a keep-alive. If that host dies, other hosts wait
/// for this time.
const LEASE_TTL: Duration = Duration::from_secs(15);
/// Interval between queries for dead hosts.
const POLL_INTERVAL: Duration = Duration::from_secs(1);
/// Longest time for which a request to stop goes unnoticed.
const TICK: Duration = Duration::from_millis(100);

/// A thread that recovers dead hosts. When this is dropped, the thread finishes its present node,
/// and leaves the other nodes to other hosts.
#[derive(Debug)]
pub struct Recovery {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Recovery {
    /// Starts the thread. `own_record` is this host's record in the directory, and `tenant` the
    /// tenant for which it connects to nodes.
    ///
    /// # Errors
    /// If the thread cannot be started.
    pub fn start(
        directory: Arc<dyn Directory>,
        nodes: Arc<NodeRegistry>,
        own_record: AgentRecord,
        tenant: Tenant,
    ) -> std::io::Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let worker = RecoveryWorker::new(Arc::clone(&directory), nodes, own_record, tenant);
        let stopping = Arc::clone(&stop);
        let thread = std::thread::Builder::new()
            .name("recovery".into())
            .spawn(move || run(worker, &*directory, &stopping))?;
        Ok(Self { stop, thread: Some(thread) })
    }
}

impl Drop for Recovery {
    fn drop(&mut self) {
        self.stop.store(true, Relaxed);
        if self.thread.take().is_some_and(|thread| thread.join().is_err()) {
            tracing::error!("the recovery thread panicked");
        }
    }
}

/// Lists and recovers dead hosts, until `stop`.
fn run(mut worker: RecoveryWorker, directory: &dyn Directory, stop: &AtomicBool) {
    let started = Instant::now();
    while !stop.load(Relaxed) {
        worker.list(started.elapsed());
        while !stop.load(Relaxed)
            && let Some(lease) = worker.claim_next(started.elapsed())
        {
            with_lease_kept_alive(directory, lease, || {
                while !stop.load(Relaxed) && worker.recover_next().is_some() {}
            });
            worker.finish(started.elapsed());
        }
        let mut waited = Duration::ZERO;
        while waited < POLL_INTERVAL && !stop.load(Relaxed) {
            std::thread::sleep(TICK);
            waited += TICK;
        }
    }
}

/// Runs `work` while another thread keeps the lease alive.
fn with_lease_kept_alive(directory: &dyn Directory, lease: Lease, work: impl FnOnce()) {
    let is_done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut kept_at = Instant::now();
            while !is_done.load(Relaxed) {
                std::thread::sleep(TICK);
                if kept_at.elapsed() >= LEASE_TTL / 5 {
                    kept_at = Instant::now();
                    if let Err(error) = directory.lease_keep_alive(lease.id) {
                        tracing::debug!(%error, "lease keep-alive of a recovery failed");
                    }
                }
            }
        });
        work();
        is_done.store(true, Relaxed);
    });
}
