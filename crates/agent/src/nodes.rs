//! Which memory nodes there are, and how this host reaches them.

use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError, RwLock};

use aquifer_fabric::tcp::{ClusterKey, ConnectOptions};
use aquifer_fabric::{Endpoint, EndpointError, Identity, Reach, Tenant};
use aquifer_pager::Connector;
use aquifer_pool::{NodeId, PoolClient};

/// The memory nodes as the directory names them.
#[derive(Debug)]
pub struct Nodes {
    identity: Identity,
    key: Option<ClusterKey>,
    connect: ConnectOptions,
    addresses: RwLock<BTreeMap<NodeId, Reach>>,
}

impl Nodes {
    /// No nodes yet; those that are reached over a network want the cluster's key.
    #[must_use]
    pub fn new(identity: Identity, key: Option<ClusterKey>, connect: ConnectOptions) -> Arc<Self> {
        Arc::new(Self { identity, key, connect, addresses: RwLock::new(BTreeMap::new()) })
    }

    /// A node is there, or has moved.
    pub fn put(&self, node: NodeId, address: Reach) {
        self.addresses.write().unwrap_or_else(PoisonError::into_inner).insert(node, address);
    }

    /// A node is gone.
    pub fn remove(&self, node: NodeId) {
        self.addresses.write().unwrap_or_else(PoisonError::into_inner).remove(&node);
    }

    /// How many there are.
    #[must_use]
    pub fn count(&self) -> usize {
        self.addresses.read().unwrap_or_else(PoisonError::into_inner).len()
    }

    /// Their numbers.
    #[must_use]
    pub fn list(&self) -> Vec<NodeId> {
        self.addresses.read().unwrap_or_else(PoisonError::into_inner).keys().copied().collect()
    }

    /// This host, on behalf of one of its users.
    #[must_use]
    pub fn of(self: &Arc<Self>, tenant: u32) -> Arc<dyn Connector> {
        Arc::new(OfTenant { nodes: Arc::clone(self), tenant: Tenant(tenant) })
    }

    /// A pool client of that user connected to every node that answers.
    #[must_use]
    pub fn pool(&self, tenant: u32) -> PoolClient {
        let mut pool = PoolClient::new(self.identity.host);
        for node in self.list() {
            match self.connect(node, Tenant(tenant)) {
                Ok(endpoint) => {
                    if let Err(error) = pool.add_node(node, endpoint) {
                        tracing::warn!(node = node.0, %error, "a memory node cannot be used");
                    }
                }
                Err(error) => {
                    tracing::warn!(node = node.0, %error, "a memory node cannot be reached")
                }
            }
        }
        pool
    }

    fn connect(&self, node: NodeId, tenant: Tenant) -> Result<Box<dyn Endpoint>, EndpointError> {
        let addresses = self.addresses.read().unwrap_or_else(PoisonError::into_inner);
        let Some(address) = addresses.get(&node).cloned() else {
            return Err(EndpointError::Unreachable {
                address: format!("memory node {}", node.0),
                source: std::io::Error::new(
                    std::io::ErrorKind::NotFound,
                    "the directory knows no such node any more",
                ),
            });
        };
        drop(addresses);
        address.connect(Identity { tenant, ..self.identity }, self.key.as_ref(), &self.connect)
    }
}

/// The nodes as one tenant reaches them.
#[derive(Debug)]
struct OfTenant {
    nodes: Arc<Nodes>,
    tenant: Tenant,
}

impl Connector for OfTenant {
    fn connect(&self, node: NodeId) -> Result<Box<dyn Endpoint>, EndpointError> {
        self.nodes.connect(node, self.tenant)
    }
}
