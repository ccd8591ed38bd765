//! Which memory nodes there are, and how this host reaches them.

use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError, RwLock};

use aquifer_directory::names::{self, NodeRecord};
use aquifer_directory::{Directory, DirectoryError, Event, EventKind, Listing};
use aquifer_fabric::tcp::{ClusterKey, ConnectOptions};
use aquifer_fabric::{Endpoint, EndpointError, Host, Identity, Reach, Tenant};
use aquifer_pager::Connector;
use aquifer_pool::{Custody, NodeId, PoolClient};

/// The memory nodes as the directory names them.
#[derive(Debug)]
pub struct Nodes {
    directory: Arc<dyn Directory>,
    identity: Identity,
    key: Option<ClusterKey>,
    connect: ConnectOptions,
    known: RwLock<Known>,
    custody: Arc<Custody>,
}

#[derive(Debug, Default)]
struct Known {
    addresses: BTreeMap<NodeId, Reach>,
    /// The revision of the last listing that was taken in: an older change that a watch brings late is not heeded.
    listed_at: u64,
    /// The revision of the last change that was heeded: an older listing that comes late is not taken in.
    heard_at: u64,
}

impl Nodes {
    /// No nodes yet; those that are reached over a network want the cluster's key.
    #[must_use]
    pub fn new(
        directory: Arc<dyn Directory>,
        identity: Identity,
        key: Option<ClusterKey>,
        connect: ConnectOptions,
    ) -> Arc<Self> {
        Arc::new(Self {
            directory,
            identity,
            key,
            connect,
            known: RwLock::default(),
            custody: Arc::default(),
        })
    }

    /// Ask the directory which there are. Returns its revision.
    ///
    /// # Errors
    /// The directory's.
    pub(crate) fn list_anew(&self) -> Result<u64, DirectoryError> {
        let listing = self.directory.list(names::NODES)?;
        self.take_in(&listing);
        Ok(listing.revision)
    }

    fn take_in(&self, listing: &Listing) {
        let mut addresses = BTreeMap::new();
        for entry in &listing.entries {
            match names::decode::<NodeRecord>(entry) {
                Ok(record) => addresses.extend(reach(&record)),
                Err(error) => {
                    tracing::warn!(key = entry.key, %error, "the record of a node cannot be read")
                }
            }
        }
        let mut known = self.known.write().unwrap_or_else(PoisonError::into_inner);
        if known.listed_at.max(known.heard_at) <= listing.revision {
            known.addresses = addresses;
            known.listed_at = listing.revision;
        }
    }

    /// A node is there, has moved, or is gone.
    pub(crate) fn heed(&self, event: &Event) {
        let Some(number) = event.key.strip_prefix(names::NODES).and_then(|number| number.parse().ok()) else {
            return;
        };
        let mut known = self.known.write().unwrap_or_else(PoisonError::into_inner);
        if event.revision <= known.listed_at {
            return;
        }
        known.heard_at = known.heard_at.max(event.revision);
        match &event.kind {
            EventKind::Put { value, .. } => match serde_json::from_slice::<NodeRecord>(value) {
                Ok(record) => known.addresses.extend(reach(&record)),
                Err(error) => {
                    tracing::warn!(key = event.key, %error, "the record of a node cannot be read")
                }
            },
            EventKind::Delete => {
                known.addresses.remove(&NodeId(number));
            }
        }
    }

    /// How many there are, if they are fewer than `wanted` by the directory itself: what is told by a watch comes a
    /// little after what whoever started a node has seen.
    ///
    /// # Errors
    /// How many there are.
    pub fn at_least(&self, wanted: usize) -> Result<(), usize> {
        if self.count() >= wanted {
            return Ok(());
        }
        if let Err(error) = self.list_anew() {
            tracing::warn!(%error, "the directory cannot be asked for memory nodes");
        }
        let count = self.count();
        if count >= wanted { Ok(()) } else { Err(count) }
    }

    /// How many there are.
    #[must_use]
    pub fn count(&self) -> usize {
        self.known.read().unwrap_or_else(PoisonError::into_inner).addresses.len()
    }

    /// Their numbers.
    #[must_use]
    pub fn list(&self) -> Vec<NodeId> {
        self.known.read().unwrap_or_else(PoisonError::into_inner).addresses.keys().copied().collect()
    }

    /// This host, on behalf of one of its users.
    #[must_use]
    pub fn of(self: &Arc<Self>, tenant: u32) -> Arc<dyn Connector> {
        Arc::new(OfTenant { nodes: Arc::clone(self), tenant: Tenant(tenant) })
    }

    /// What this host has of the pool, and who knows of it.
    #[must_use]
    pub const fn custody(&self) -> &Arc<Custody> {
        &self.custody
    }

    /// A pool client of that user, as yet without nodes.
    #[must_use]
    pub fn client(&self, tenant: Tenant) -> PoolClient {
        PoolClient::in_custody(self.identity.host, tenant, Arc::clone(&self.custody))
    }

    /// A pool client of that user connected to every node that answers.
    #[must_use]
    pub fn pool(&self, tenant: u32) -> PoolClient {
        let mut pool = self.client(Tenant(tenant));
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

    pub(crate) fn connect(&self, node: NodeId, tenant: Tenant) -> Result<Box<dyn Endpoint>, EndpointError> {
        self.connect_as(node, Identity { tenant, ..self.identity })
    }

    /// As another host than this one.
    pub(crate) fn connect_as(&self, node: NodeId, who: Identity) -> Result<Box<dyn Endpoint>, EndpointError> {
        let known = self.known.read().unwrap_or_else(PoisonError::into_inner);
        let Some(address) = known.addresses.get(&node).cloned() else {
            return Err(EndpointError::Unreachable {
                address: format!("memory node {}", node.0),
                source: std::io::Error::new(
                    std::io::ErrorKind::NotFound,
                    "the directory knows no such node any more",
                ),
            });
        };
        drop(known);
        address.connect(who, self.key.as_ref(), &self.connect)
    }
}

impl aquifer_extents::Reach for Nodes {
    fn nodes(&self) -> Vec<NodeId> {
        self.list()
    }

    fn host(&self) -> Host {
        self.identity.host
    }

    fn custody(&self) -> &Arc<Custody> {
        &self.custody
    }

    fn connect(&self, node: NodeId, tenant: Tenant) -> Result<Box<dyn Endpoint>, EndpointError> {
        Self::connect(self, node, tenant)
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

fn reach(record: &NodeRecord) -> Option<(NodeId, Reach)> {
    match Reach::parse(&record.fabric, &record.address) {
        Ok(reach) => Some((NodeId(record.id), reach)),
        Err(reason) => {
            tracing::warn!(node = record.id, reason, "a memory node cannot be used");
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use aquifer_directory::sim::World;

    fn nodes(directory: &Arc<dyn Directory>) -> Arc<Nodes> {
        let identity = Identity { host: Host(1), epoch: 1, tenant: Tenant(0) };
        Nodes::new(Arc::clone(directory), identity, None, ConnectOptions::default())
    }

    fn register(directory: &dyn Directory, id: u16) {
        let fabric = "shm".into();
        let record = NodeRecord {
            id,
            fabric,
            address: format!("/node-{id}"),
            memory_bytes: 1 << 20,
            memory_bytes_max: 1 << 20,
            memory_bytes_wanted: 1 << 20,
            held_up: None,
            epoch: 1,
        };
        directory.put(&names::node(id), &names::encode(&record), None).expect("put");
    }

    #[test]
    fn who_wants_nodes_is_not_told_of_a_view_that_is_late() {
        let directory: Arc<dyn Directory> = Arc::new(World::new(1).host(1));
        let nodes = nodes(&directory);
        assert_eq!(nodes.at_least(1), Err(0));
        // No watch has told of it.
        register(&*directory, 1);
        assert_eq!(nodes.at_least(1), Ok(()));
        assert_eq!(nodes.at_least(2), Err(1));
    }

    #[test]
    fn what_a_watch_brings_late_undoes_no_listing() {
        let directory: Arc<dyn Directory> = Arc::new(World::new(1).host(1));
        let nodes = nodes(&directory);
        let mut watch = directory.watch(names::NODES, 1).expect("watch");
        register(&*directory, 1);
        directory.delete(&names::node(1)).expect("delete");
        register(&*directory, 1);
        nodes.list_anew().expect("list");
        while let Some(event) = watch.next(Duration::ZERO).expect("an event") {
            nodes.heed(&event);
            assert_eq!(nodes.list(), [NodeId(1)], "a node was forgotten by {event:?}");
        }
        directory.delete(&names::node(1)).expect("delete");
        nodes.heed(&watch.next(Duration::ZERO).expect("an event").expect("of the deletion"));
        assert_eq!(nodes.count(), 0);
    }

    #[test]
    fn a_listing_that_comes_late_undoes_nothing_that_a_watch_brought() {
        let directory: Arc<dyn Directory> = Arc::new(World::new(1).host(1));
        let nodes = nodes(&directory);
        let mut watch = directory.watch(names::NODES, 1).expect("watch");
        register(&*directory, 1);
        let listing = directory.list(names::NODES).expect("list");
        register(&*directory, 2);
        directory.delete(&names::node(1)).expect("delete");
        while let Some(event) = watch.next(Duration::ZERO).expect("an event") {
            nodes.heed(&event);
        }
        nodes.take_in(&listing);
        assert_eq!(nodes.list(), [NodeId(2)]);
    }

    #[test]
    fn a_node_that_went_unseen_is_forgotten_by_the_next_listing() {
        let directory: Arc<dyn Directory> = Arc::new(World::new(1).host(1));
        let nodes = nodes(&directory);
        register(&*directory, 1);
        register(&*directory, 2);
        nodes.list_anew().expect("list");
        directory.delete(&names::node(1)).expect("delete");
        nodes.list_anew().expect("list");
        assert_eq!(nodes.list(), [NodeId(2)]);
    }
}
