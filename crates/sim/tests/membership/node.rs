//! A memory node of the simulation: its memory, its lease, and the hosts that it fences.

use std::collections::BTreeMap;
use std::time::Duration;

use aquifer_directory::names::{self, AgentRecord, NodeLife, NodeRecord};
use aquifer_directory::sim::SimDirectory;
use aquifer_directory::{Directory, DirectoryError, KeyOperation, Lease, Transaction};
use aquifer_fabric::sim::{SimFabric, SimTarget};
use aquifer_fabric::{Host, Target};
use aquifer_node::fences::LiveHosts;
use aquifer_pool::size::SECTION_BYTES;
use aquifer_pool::{NodeId, NodeMemory};

/// Sections of a node.
const SECTIONS: u64 = 2;
const LEASE_TTL: Duration = Duration::from_secs(10);

#[derive(Debug)]
pub struct SimNode {
    pub id: NodeId,
    pub target: SimTarget,
    pub directory: SimDirectory,
    _memory: NodeMemory,
    lease: Option<Lease>,
    hosts: LiveHosts,
}

impl SimNode {
    pub fn new(fabric: &SimFabric, id: NodeId, directory: SimDirectory) -> Self {
        let target = fabric.add_node();
        let memory = NodeMemory::create(&target, id, SECTIONS * SECTION_BYTES).expect("a small pool");
        let hosts = LiveHosts::new(BTreeMap::new());
        Self { id, target, directory, _memory: memory, lease: None, hosts }
    }

    /// Keeps the lease alive, and fences hosts whose leases have ended. Returns the fences.
    pub fn act(&mut self) -> Result<u64, DirectoryError> {
        let kept = self.lease.map_or(Ok(false), |lease| match self.directory.lease_keep_alive(lease.id) {
            Ok(()) => Ok(true),
            Err(DirectoryError::LeaseGone(_)) => Ok(false),
            Err(error) => Err(error),
        })?;
        if !kept {
            let lease = self.directory.lease_grant(LEASE_TTL)?;
            self.put_record(lease)?;
            self.lease = Some(lease);
        }
        let listing = self.directory.list(names::AGENTS)?;
        let records = listing.entries.iter().map(names::decode::<AgentRecord>);
        let live = records
            .map(|record| record.map(|record| (Host(record.host), record.epoch)))
            .collect::<Result<BTreeMap<Host, u64>, _>>()?;
        let fences = self.hosts.replace(&live);
        fences.iter().for_each(|fence| self.target.fence(fence.host, fence.epoch));
        Ok(fences.len() as u64)
    }

    /// Writes the record and the life of the memory, which is always the same.
    fn put_record(&self, lease: Lease) -> Result<(), DirectoryError> {
        let (id, epoch) = (self.id.0, 1);
        let record = NodeRecord {
            id,
            fabric: "simulated".into(),
            address: format!("node {id}"),
            memory_bytes: SECTIONS * SECTION_BYTES,
            memory_bytes_max: SECTIONS * SECTION_BYTES,
            requested_memory_bytes: SECTIONS * SECTION_BYTES,
            resize_blocker: None,
            kept_ms: 0,
            epoch,
        };
        let life = NodeLife { node: id, epoch, kept_ms: 0 };
        let operations = vec![
            KeyOperation::put(names::node_key(id), names::encode(&record), Some(lease.id)),
            KeyOperation::put(names::life_key(id), names::encode(&life), None),
        ];
        self.directory.transaction(&Transaction { compares: Vec::new(), operations }).map(drop)
    }
}
