//! A process that is a host of the simulation.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use aquifer_directory::names::{self, AgentRecord};
use aquifer_directory::sim::SimDirectory;
use aquifer_directory::{Directory, DirectoryError, Lease};
use aquifer_fabric::{Host, Identity};
use aquifer_host::node_updates::NodeUpdates;
use aquifer_host::nodes::{AfterFence, NodeRegistry};
use aquifer_host::recovery::RecoveryWorker;
use aquifer_pool::NodeId;

use super::link::{NodeLink, OrphanedExtents, TENANT};
use super::machine::SimMachine;

pub const LEASE_TTL: Duration = Duration::from_secs(15);
/// Events of nodes that a host applies at a time.
const EVENTS: u32 = 32;

/// A process of a host of the pool, from its start to its end.
#[derive(Debug)]
pub struct SimHost {
    pub directory: SimDirectory,
    pub lease: Lease,
    pub record: AgentRecord,
    pub nodes: Arc<NodeRegistry>,
    pub worker: RecoveryWorker,
    pub links: Vec<NodeLink>,
    /// Extents of the previous process, on nodes to which this process has not connected yet.
    pub left: Vec<OrphanedExtents>,
    pub renewed_ms: u64,
    /// Time at which the last successful keep-alive was sent.
    pub acknowledged_ms: u64,
    pub started_ms: u64,
    /// Nodes that the process has seen in the directory, with the lives in their latest records.
    pub known: BTreeMap<NodeId, u64>,
    updates: NodeUpdates,
}

impl SimHost {
    /// Joins the cluster, or resumes the host number of the previous process, which has ended.
    pub fn start(
        directory: SimDirectory,
        machine: &Arc<SimMachine>,
        before: Option<&AgentRecord>,
        grace_ms: u64,
        now_ms: u64,
    ) -> Result<Self, DirectoryError> {
        let lease = directory.lease_grant(LEASE_TTL)?;
        let record = match before {
            Some(before) => names::resume_host(&directory, lease, before, grace_ms)?,
            None => names::claim_host(&directory, lease, "a host", grace_ms)?,
        };
        let shared: Arc<dyn Directory> = Arc::new(directory.clone());
        let identity = Identity { host: Host(record.host), epoch: record.epoch, tenant: TENANT };
        let nodes = NodeRegistry::in_environment(
            Arc::clone(&shared),
            identity,
            Arc::clone(machine) as _,
            AfterFence::Wait,
        );
        let updates = NodeUpdates::start(Arc::clone(&shared), Arc::clone(&nodes))?;
        nodes.load_lives()?;
        let known = records_of(&directory, &nodes);
        let worker = RecoveryWorker::new(shared, Arc::clone(&nodes), record.clone(), TENANT);
        Ok(Self {
            directory,
            lease,
            record,
            nodes,
            worker,
            links: Vec::new(),
            left: Vec::new(),
            renewed_ms: now_ms,
            acknowledged_ms: now_ms,
            started_ms: now_ms,
            known,
            updates,
        })
    }

    pub fn identity(&self) -> Identity {
        Identity { host: Host(self.record.host), epoch: self.record.epoch, tenant: TENANT }
    }

    /// Applies changes of the nodes' records in the directory.
    pub fn update_nodes(&mut self) {
        for _ in 0..EVENTS {
            self.updates.step(Duration::ZERO);
        }
        self.known.extend(records_of(&self.directory, &self.nodes));
    }

    /// Ends the process. Returns its record and its extents.
    pub fn leave(self) -> (AgentRecord, Vec<OrphanedExtents>) {
        let left = self.links.into_iter().map(NodeLink::leave).chain(self.left).collect();
        (self.record, left)
    }
}

/// The lives of the nodes of a registry; none if the directory does not answer.
fn records_of(directory: &SimDirectory, nodes: &NodeRegistry) -> BTreeMap<NodeId, u64> {
    let present = nodes.list();
    let records = names::nodes(directory).unwrap_or_default();
    let lives = records.into_iter().map(|record| (NodeId(record.id), record.epoch));
    lives.filter(|(node, _)| present.contains(node)).collect()
}
