//! The steps of recoveries, without a thread and without a clock.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use aquifer_directory::names::{self, AgentRecord, DeadHost};
use aquifer_directory::{Directory, DirectoryError, FailureLog, Lease};
use aquifer_fabric::{Identity, Tenant};
use aquifer_pool::op::Recovered;
use aquifer_pool::{NodeId, PoolError, recover_node};

use super::{GraceTimes, LEASE_TTL, RecoveryClaim};
use crate::nodes::NodeRegistry;

/// The recoveries of one host: lists dead hosts, and recovers one after the other.
///
/// The caller lists, claims, recovers node after node and finishes. Meanwhile it keeps the lease of
/// the claim alive. Times count from the start of the worker.
#[derive(Debug)]
pub struct RecoveryWorker {
    directory: Arc<dyn Directory>,
    nodes: Arc<NodeRegistry>,
    own_record: AgentRecord,
    tenant: Tenant,
    grace_times: GraceTimes,
    /// The dead hosts of the latest listing that are not claimed yet.
    listed: VecDeque<DeadHost>,
    current: Option<CurrentRecovery>,
    failure_log: FailureLog,
}

/// A recovery from its claim to its end.
#[derive(Debug)]
struct CurrentRecovery {
    dead: DeadHost,
    claim: RecoveryClaim,
    /// Nodes on which the host is not recovered yet.
    unvisited: VecDeque<NodeId>,
    found: Recovered,
    /// The first failure.
    failed: Option<RecoveryError>,
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
    /// Creates a worker of the host with the record `own_record`, which connects to nodes for
    /// `tenant`.
    #[must_use]
    pub fn new(
        directory: Arc<dyn Directory>,
        nodes: Arc<NodeRegistry>,
        own_record: AgentRecord,
        tenant: Tenant,
    ) -> Self {
        Self {
            directory,
            nodes,
            own_record,
            tenant,
            grace_times: GraceTimes::default(),
            listed: VecDeque::new(),
            current: None,
            failure_log: FailureLog::default(),
        }
    }

    /// Lists the dead hosts. A host's grace time begins when its death is first listed.
    pub fn list(&mut self, now: Duration) {
        match names::dead_hosts(&*self.directory) {
            Ok(dead) => {
                self.grace_times.list(&dead, now);
                self.listed = dead.into();
            }
            Err(error) => {
                self.listed.clear();
                if let Some(failures) = self.failure_log.record(Instant::now()) {
                    tracing::warn!(%error, failures, "listing dead hosts failed; retrying every second");
                }
            }
        }
    }

    /// Claims the next listed host whose grace time has passed and that can be recovered now.
    /// Returns the lease of the claim; `None` if there is no such host.
    pub fn claim_next(&mut self, now: Duration) -> Option<Lease> {
        let address = format!("recovered by host {}", self.own_record.host);
        while let Some(dead) = self.listed.pop_front() {
            if !self.grace_times.is_due(&dead, now) {
                continue;
            }
            match RecoveryClaim::claim(&*self.directory, LEASE_TTL, &dead, &address) {
                // The host has memory only on nodes that are away.
                Ok(None) => {}
                Ok(Some(claim)) => {
                    let lease = claim.lease();
                    self.current = Some(self.begin(dead, claim));
                    return Some(lease);
                }
                Err(error) => self.log_failure(&dead, &error.into(), now),
            }
        }
        None
    }

    fn begin(&self, dead: DeadHost, claim: RecoveryClaim) -> CurrentRecovery {
        let failed = self.nodes.refresh().err().map(RecoveryError::from);
        let unvisited = if failed.is_none() { claim.present().collect() } else { VecDeque::new() };
        CurrentRecovery { dead, claim, unvisited, found: Recovered::default(), failed }
    }

    /// The dead host that is being recovered, and its claim.
    #[must_use]
    pub fn current(&self) -> Option<(&DeadHost, &RecoveryClaim)> {
        self.current.as_ref().map(|current| (&current.dead, &current.claim))
    }

    /// Recovers the claimed host on the next node. Returns the node, and whether all memory of the
    /// host there is freed; `None` after the last present node.
    pub fn recover_next(&mut self) -> Option<(NodeId, bool)> {
        let current = self.current.as_mut()?;
        let node = current.unvisited.pop_front()?;
        let recovered = recover_on_node(&self.nodes, node, current.claim.identity(self.tenant));
        let is_recovered = recovered.is_ok();
        match recovered {
            Ok(found) => {
                current.found.add(found);
                current.claim.recovered(node);
            }
            // Recover the other nodes first.
            Err(error) => current.failed = current.failed.take().or(Some(error)),
        }
        Some((node, is_recovered))
    }

    /// Ends the recovery. Nodes that are left are recovered by later recoveries. Returns whether
    /// the directory has recorded the end.
    pub fn finish(&mut self, now: Duration) -> bool {
        let Some(current) = self.current.take() else { return false };
        let CurrentRecovery { dead, claim, unvisited, found, failed } = current;
        let failed = failed.or_else(|| (!unvisited.is_empty()).then_some(RecoveryError::Stopped));
        let away: Vec<u16> = claim.away().map(|node| node.0).collect();
        let finished = claim.finish(&*self.directory);
        let is_finished = finished.is_ok();
        match failed.map_or_else(|| finished.map_err(RecoveryError::from), Err) {
            Ok(()) => log_success(dead.record.host, &found, &away),
            Err(error) => self.log_failure(&dead, &error, now),
        }
        is_finished
    }

    /// Records and logs that an attempt to recover a host has failed.
    fn log_failure(&mut self, dead: &DeadHost, error: &RecoveryError, now: Duration) {
        let host = dead.record.host;
        // Another host has recovered the dead host, or its next agent has claimed the number.
        if matches!(error, RecoveryError::Directory(DirectoryError::Taken { .. })) {
            return;
        }
        if self.grace_times.fail(dead, now) {
            tracing::warn!(host, %error, "recovery of a dead host failed; retrying every 10 s");
        } else {
            tracing::debug!(host, %error, "recovery of a dead host failed; retrying");
        }
    }
}

/// Frees the memory that the dead host owns on one node.
fn recover_on_node(
    nodes: &NodeRegistry,
    node: NodeId,
    identity: Identity,
) -> Result<Recovered, RecoveryError> {
    recover_node(node, identity.host, identity.tenant, &|| {
        nodes.connect_as(node, identity).map_err(|error| RecoveryError::Unreachable(node.0, error))
    })
}

fn log_success(host: u16, found: &Recovered, away: &[u16]) {
    let Recovered { extents, chunks, spans, unowned } = *found;
    if !away.is_empty() {
        tracing::warn!(
            host,
            nodes = ?away,
            "memory of a dead host on nodes that are away is not freed yet; it is freed if they return"
        );
    }
    if *found == Recovered::default() {
        tracing::debug!(host, "recovered a dead host that owned nothing");
        return;
    }
    tracing::info!(host, extents, chunks, spans, "recovered a dead host: freed its extents");
    if unowned > 0 {
        tracing::error!(
            host,
            unowned,
            "recovery found allocated memory without an owner: the logs of a node are damaged"
        );
    }
}
