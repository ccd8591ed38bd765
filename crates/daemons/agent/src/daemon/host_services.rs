//! Parts of the host that the services of an agent use: connections to memory nodes, the keeper,
//! sockets, and the shares of users.

use std::sync::Arc;

use aquifer_channel::descriptor_shares::DescriptorShares;
use aquifer_extents::NodeConnector;
use aquifer_fabric::{Endpoint, EndpointError, Host as HostNumber, Tenant};
use aquifer_faults::serve::{AgentServices, ConnectBackName, ConnectBackSocket, PoolShares};
use aquifer_host::membership::LeaseEvents;
use aquifer_host::nodes::{EndpointPurpose, NodeRegistry};
use aquifer_keeper::{KeeperClient, KeeperStore};
use aquifer_pager::Connector;
use aquifer_pool::{FigureTable, LeakDetector, NodeId, PoolClient};
use aquifer_segments::host::HostLease;

use crate::listeners::Listeners;

/// The parts of this host that the services use: the memory nodes and the keeper.
#[derive(Debug)]
pub(super) struct HostServices {
    pub nodes: Arc<NodeRegistry>,
    pub keeper: Arc<KeeperClient>,
    pub lease: Arc<LeaseEvents>,
    pub listeners: Listeners,
    pub descriptors: Arc<DescriptorShares>,
    pub pool_shares: Arc<PoolShares>,
}

impl AgentServices for HostServices {
    fn connector(&self, tenant: u32, replicas: usize) -> Arc<dyn Connector> {
        let purpose = if replicas > 1 { EndpointPurpose::WriteReplicas } else { EndpointPurpose::Write };
        self.nodes.connector(tenant, purpose)
    }

    fn fetch_connector(&self, tenant: u32) -> Arc<dyn Connector> {
        self.nodes.connector(tenant, EndpointPurpose::Fetch)
    }

    fn pool(&self, tenant: u32) -> PoolClient {
        self.nodes.pool_client(tenant)
    }

    fn leak_detector(&self) -> &LeakDetector {
        self.nodes.leak_detector()
    }

    fn nodes(&self) -> Vec<NodeId> {
        self.nodes.list()
    }

    fn connection_failure(&self) -> Option<String> {
        self.nodes.connection_failure()
    }

    fn descriptors(&self) -> &Arc<DescriptorShares> {
        &self.descriptors
    }

    fn serve_connect_back_socket(&self, socket: ConnectBackSocket) {
        self.listeners.add_connect_back(socket);
    }

    fn end_connect_back(&self, name: &ConnectBackName) {
        self.listeners.end_connect_back(name);
    }

    fn keeper(&self) -> &dyn KeeperStore {
        &*self.keeper
    }
}

impl HostLease for HostServices {
    fn lasts(&self) -> bool {
        self.lease.lasts()
    }
}

impl NodeConnector for HostServices {
    fn nodes(&self) -> Vec<NodeId> {
        self.nodes.list()
    }

    fn host(&self) -> HostNumber {
        self.nodes.host()
    }

    fn leak_detector(&self) -> &Arc<LeakDetector> {
        self.nodes.leak_detector()
    }

    fn figures(&self) -> &Arc<FigureTable> {
        self.nodes.figures()
    }

    fn spend_room(&self, owner: u32, bytes: u64) -> Option<bool> {
        self.pool_shares.spend_room(owner, bytes)
    }

    fn set_room(&self, owner: u32, free_bytes: u64, lent_bytes: u64) {
        self.pool_shares.set_room(owner, free_bytes, lent_bytes);
    }

    fn may_read_nodes(&self, owner: u32) -> bool {
        self.pool_shares.may_read_nodes(owner)
    }

    fn connect(&self, node: NodeId, tenant: Tenant) -> Result<Box<dyn Endpoint>, EndpointError> {
        self.nodes.connect(node, tenant)
    }
}
