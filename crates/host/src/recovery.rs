//! Recovery: frees what dead hosts owned.
//!
//! A host is dead when its lease has ended. A host that recovers it claims its number under a lease
//! of its own. So no two hosts recover it at the same time, memory nodes fence what the dead host
//! still has in flight, and if the recovering host dies, too, the number can be claimed again.

mod claim;
mod grace;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use aquifer_directory::names::{self, AgentRecord, DeadHost};
use aquifer_directory::{Directory, DirectoryError, FailureLog, Lease};
use aquifer_fabric::{Identity, Tenant};
use aquifer_pool::op::Recovered;
use aquifer_pool::{NodeId, PoolError, recover_node};

use crate::nodes::NodeRegistry;
pub use claim::RecoveryClaim;
pub use grace::GraceTimes;

/// Lifetime of a recovering host's lease without a keep-alive; other hosts wait for as long.
const LEASE_TTL: Duration = Duration::from_secs(15);
/// Interval between queries for dead hosts.
const POLL_INTERVAL: Duration = Duration::from_secs(1);
/// Longest time for which a request to stop goes unnoticed.
const TICK: Duration = Duration::from_millis(100);

/// A thread that recovers dead hosts, until it is dropped. It then finishes the node at which it
/// is, and leaves the rest to other hosts.
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
        let worker = RecoveryWorker { directory, nodes, own_record, tenant, stop: Arc::clone(&stop) };
        let thread = std::thread::Builder::new().name("recovery".into()).spawn(move || worker.run())?;
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

struct RecoveryWorker {
    directory: Arc<dyn Directory>,
    nodes: Arc<NodeRegistry>,
    own_record: AgentRecord,
    tenant: Tenant,
    stop: Arc<AtomicBool>,
}

/// Why a host is not recovered yet.
#[derive(Debug, thiserror::Error)]
enum RecoveryError {
    #[error(transparent)]
    Directory(#[from] DirectoryError),
    #[error("memory node {0} cannot be reached: {1}")]
    Unreachable(u16, aquifer_fabric::EndpointError),
    #[error(transparent)]
    Pool(#[from] PoolError),
    #[error("this agent is stopping")]
    Stopped,
}

impl RecoveryWorker {
    fn run(&self) {
        let mut failure_log = FailureLog::default();
        let mut grace_times = GraceTimes::default();
        let started = Instant::now();
        while !self.stop.load(Relaxed) {
            match names::dead_hosts(&*self.directory) {
                Ok(dead) => {
                    grace_times.list(&dead, started.elapsed());
                    for dead in &dead {
                        if grace_times.is_due(dead, started.elapsed()) && !self.stop.load(Relaxed) {
                            self.try_recover(dead, |dead| grace_times.fail(dead, started.elapsed()));
                        }
                    }
                }
                Err(error) => {
                    if let Some(failures) = failure_log.record(Instant::now()) {
                        tracing::warn!(%error, failures, "listing dead hosts failed; retrying every second");
                    }
                }
            }
            let mut waited = Duration::ZERO;
            while waited < POLL_INTERVAL && !self.stop.load(Relaxed) {
                std::thread::sleep(TICK);
                waited += TICK;
            }
        }
    }

    /// Recovers a host whose grace time has passed. `fail` notes a failure, and returns whether it
    /// is the first one.
    fn try_recover(&self, dead: &DeadHost, fail: impl FnOnce(&DeadHost) -> bool) {
        let host = dead.record.host;
        match self.recover(dead) {
            // It has memory on nodes that are away only.
            Ok(None) => {}
            Ok(Some(found)) if found == Recovered::default() => {
                tracing::debug!(host, "recovered a dead host that owned nothing");
            }
            Ok(Some(Recovered { extents, chunks, spans, unowned })) => {
                tracing::info!(host, extents, chunks, spans, "recovered a dead host: freed its extents");
                if unowned > 0 {
                    tracing::error!(
                        host,
                        unowned,
                        "recovery found allocated memory without an owner: the logs of a node are damaged"
                    );
                }
            }
            // Another host has recovered it, or its next agent has claimed the number.
            Err(RecoveryError::Directory(DirectoryError::Taken { .. })) => {}
            Err(error) if fail(dead) => {
                tracing::warn!(host, %error, "recovery of a dead host failed; retrying every 10 s");
            }
            Err(error) => tracing::debug!(host, %error, "recovery of a dead host failed; retrying"),
        }
    }

    /// Recovers a dead host; `None` if there is nothing to free now.
    fn recover(&self, dead: &DeadHost) -> Result<Option<Recovered>, RecoveryError> {
        let address = format!("recovered by host {}", self.own_record.host);
        let Some(mut claim) = RecoveryClaim::claim(&*self.directory, LEASE_TTL, dead, &address)? else {
            return Ok(None);
        };
        let recovered = self.recover_under(&mut claim);
        let finished = claim.finish(&*self.directory);
        let found = recovered?;
        finished?;
        Ok(Some(found))
    }

    /// Recovers a dead host on all nodes that are present.
    fn recover_under(&self, claim: &mut RecoveryClaim) -> Result<Recovered, RecoveryError> {
        let identity = claim.identity(self.tenant);
        self.nodes.refresh()?;
        let mut found = Recovered::default();
        let mut failed = None;
        let present: Vec<NodeId> = claim.present().collect();
        self.with_lease_kept_alive(claim.lease(), || {
            for node in present {
                if self.stop.load(Relaxed) {
                    failed = failed.take().or(Some(RecoveryError::Stopped));
                    return;
                }
                match self.recover_on_node(node, identity) {
                    Ok(on_node) => {
                        found.add(on_node);
                        claim.recovered(node);
                    }
                    // Recover the other nodes first.
                    Err(error) => failed = failed.take().or(Some(error)),
                }
            }
        });
        if let Some(error) = failed {
            return Err(error);
        }
        let nodes: Vec<u16> = claim.away().map(|node| node.0).collect();
        if !nodes.is_empty() {
            tracing::warn!(
                host = identity.host.0,
                ?nodes,
                "memory of a dead host on nodes that are away is not freed yet; it is freed if they return"
            );
        }
        Ok(found)
    }

    /// Runs `work` while another thread keeps the lease alive.
    fn with_lease_kept_alive(&self, lease: Lease, work: impl FnOnce()) {
        let is_done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut kept_at = Instant::now();
                while !is_done.load(Relaxed) {
                    std::thread::sleep(TICK);
                    if kept_at.elapsed() >= LEASE_TTL / 5 {
                        kept_at = Instant::now();
                        if let Err(error) = self.directory.lease_keep_alive(lease.id) {
                            tracing::debug!(%error, "lease keep-alive of a recovery failed");
                        }
                    }
                }
            });
            work();
            is_done.store(true, Relaxed);
        });
    }

    /// Frees what the dead host owns on one node.
    fn recover_on_node(&self, node: NodeId, identity: Identity) -> Result<Recovered, RecoveryError> {
        recover_node(node, identity.host, identity.tenant, &|| {
            self.nodes.connect_as(node, identity).map_err(|error| RecoveryError::Unreachable(node.0, error))
        })
    }
}
