//! A block volume over the nodes of a cluster, in this process, with slabs of a chosen size.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use aquifer_block::{BlockVolume, Mover, Pump, PumpThread, VolumeReader};
use aquifer_fabric::tcp::ConnectOptions;
use aquifer_fabric::{Identity, Tenant};
use aquifer_host::cluster_access::request_cluster_access;
use aquifer_host::membership::Membership;
use aquifer_host::nodes::{AfterFence, EndpointPurpose, NodeRegistry};
use aquifer_pager::{Budget, Connector, Mempool, PAGE_BYTES, SlabSizing};

use crate::bench::BenchError;
use aquifer::DirectoryLocation;
use aquifer::settings::DirectorySettings;
use aquifer::state::StateDir;

/// Limit of the volume's budget; a part of it is its share of the mempool.
const LIMIT_BYTES: u64 = 64 << 20;
/// Time that a write waits for free memory.
const WRITE_TIMEOUT: Duration = Duration::from_secs(10);
const SEED: u64 = 7;

/// A host of a cluster.
pub struct Host {
    membership: Membership,
    nodes: Arc<NodeRegistry>,
    tenant: Tenant,
}

impl Host {
    /// Joins the cluster in a state folder as another host.
    ///
    /// # Errors
    /// If the agent or the directory refuses.
    pub fn join(state: &Path) -> Result<Self, BenchError> {
        let state = StateDir::locate(Some(state)).map_err(|error| failed(&error))?;
        let (_socket, access) =
            request_cluster_access(&state.agent_socket()).map_err(|error| failed(&error))?;
        let place: DirectorySettings =
            serde_json::from_str(&access.directory).map_err(|error| failed(&error))?;
        let source = DirectoryLocation::new(&place).map_err(|error| failed(&error))?;
        let directory = source.connect(&state).map_err(|error| failed(&error))?;
        let joined =
            Membership::join(Arc::clone(&directory), Path::new("bench dilemma"), None, Duration::ZERO, || {});
        let mut membership = joined.map_err(|error| failed(&error))?;
        let tenant = Tenant(rustix::process::geteuid().as_raw());
        let identity = Identity { host: membership.host(), epoch: membership.epoch(), tenant };
        let key = access.key().map_err(|error| failed(&error))?;
        let nodes = NodeRegistry::new(directory, identity, key, ConnectOptions::default(), AfterFence::Fail);
        membership.watch_nodes(&nodes).map_err(|error| failed(&error))?;
        if nodes.require(1).is_err() {
            return Err(failed(&"no node can be reached"));
        }
        Ok(Self { membership, nodes, tenant })
    }

    /// Opens a volume with this number of pages.
    ///
    /// # Errors
    /// If there is too little memory, or a thread cannot be started.
    pub fn volume(&self, pages: usize, sizing: SlabSizing) -> Result<Store, BenchError> {
        let budget = Arc::new(Budget::new(LIMIT_BYTES));
        let share_bytes = LIMIT_BYTES - budget.resident_max() * PAGE_BYTES as u64;
        let share_bytes = usize::try_from(share_bytes).map_err(|error| failed(&error))?;
        let mempool = Arc::new(Mempool::new(share_bytes).map_err(|error| failed(&error))?);
        let connector: Arc<dyn Connector> = self.nodes.connector(self.tenant.0, EndpointPurpose::Write);
        let volume = BlockVolume::new((pages * PAGE_BYTES) as u64, mempool, budget, WRITE_TIMEOUT)
            .map_err(|error| failed(&error))?;
        let pool = self.nodes.pool_client(self.tenant.0);
        let mut pump = Pump::new(Arc::clone(&volume), Arc::clone(&connector), pool, SEED);
        pump.set_slab_sizing(sizing);
        let mover =
            Mover::new(Arc::clone(&volume), Arc::clone(&connector)).map_err(|error| failed(&error))?;
        let pump = PumpThread::start(pump, mover).map_err(|error| failed(&error))?;
        Ok(Store { volume, connector, pump })
    }

    /// Leaves the cluster.
    pub fn leave(self) {
        self.membership.leave();
    }
}

/// An open volume.
pub struct Store {
    volume: Arc<BlockVolume>,
    connector: Arc<dyn Connector>,
    pump: PumpThread,
}

impl Store {
    /// The volume.
    pub fn volume(&self) -> &BlockVolume {
        &self.volume
    }

    /// The buffers that a thread needs to use it.
    ///
    /// # Errors
    /// If there is too little memory.
    pub fn reader(&self) -> Result<VolumeReader, BenchError> {
        self.volume.reader(Arc::clone(&self.connector)).map_err(|error| failed(&error))
    }

    /// Frees all memory of the volume.
    pub fn close(self) {
        self.pump.stop();
    }
}

fn failed(error: &dyn std::fmt::Display) -> BenchError {
    BenchError::Allocator { reason: error.to_string() }
}
