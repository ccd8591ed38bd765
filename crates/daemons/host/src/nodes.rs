//! The memory nodes of the cluster, and connections to them.

mod away;
mod connect;
mod figures;
mod reconnect;
mod shares;
mod view;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use aquifer_channel::descriptor_shares::DescriptorShares;
use aquifer_directory::names::{self, NodeRecord};
use aquifer_directory::{Directory, DirectoryError, FailureLog, Listing, WatchEvent, WatchEventKind};
use aquifer_fabric::ClusterKey;
use aquifer_fabric::reconnecting::TargetDescription;
use aquifer_fabric::tcp::ConnectOptions;
use aquifer_fabric::{Endpoint, EndpointError, Host, Identity, Tenant};
use aquifer_pager::Connector;
use aquifer_pool::{FigureTable, LeakDetector, NodeId, PoolClient};
use parking_lot::{Mutex, RwLock, RwLockReadGuard, RwLockWriteGuard};

pub use aquifer_fabric::reconnecting::AfterFence;
pub use connect::ConnectFailure;
pub(crate) use figures::FigureReader;
pub use shares::EndpointPurpose;
use shares::EndpointShares;
use view::{NodeState, NodeView};

use crate::environment::{HostEnvironment, SystemEnvironment};

/// The memory nodes of the directory, and this host's connections to them.
///
/// [`Membership::watch_nodes`](crate::membership::Membership::watch_nodes) keeps it up to date.
#[derive(Debug)]
pub struct NodeRegistry {
    me: Weak<Self>,
    directory: Arc<dyn Directory>,
    identity: Identity,
    environment: Arc<dyn HostEnvironment>,
    after_fence: AfterFence,
    view: RwLock<NodeView>,
    /// The start of the latest listing that was made because of nodes that are away.
    listed_at: Mutex<Option<Instant>>,
    /// Nodes with kept memory to which a tenant of this host has connected.
    contacts: Mutex<BTreeMap<(NodeId, Tenant), Contact>>,
    /// The errors of nodes whose last connection attempt failed.
    failures: Mutex<BTreeMap<NodeId, String>>,
    /// Whether any connection has succeeded since this registry exists.
    has_connected: AtomicBool,
    shares: EndpointShares,
    /// The shares to which endpoints are charged, once they are set.
    descriptors: OnceLock<Arc<DescriptorShares>>,
    /// Limits the log lines about waiting connections.
    waits: Mutex<FailureLog>,
    leak_detector: Arc<LeakDetector>,
    figures: Arc<FigureTable>,
}

/// Description of the target of a tenant's last connection to a node, by which operations can be
/// queued while the node is away.
#[derive(Clone, Debug)]
struct Contact {
    target: TargetDescription,
    epoch: u64,
}

impl NodeRegistry {
    /// Creates a registry without nodes. Nodes on other machines require the cluster key.
    #[must_use]
    pub fn new(
        directory: Arc<dyn Directory>,
        identity: Identity,
        key: Option<ClusterKey>,
        connect: ConnectOptions,
        after_fence: AfterFence,
    ) -> Arc<Self> {
        Self::in_environment(
            directory,
            identity,
            Arc::new(SystemEnvironment { key, options: connect }),
            after_fence,
        )
    }

    /// Creates a registry without nodes in a given environment.
    #[must_use]
    pub fn in_environment(
        directory: Arc<dyn Directory>,
        identity: Identity,
        environment: Arc<dyn HostEnvironment>,
        after_fence: AfterFence,
    ) -> Arc<Self> {
        Arc::new_cyclic(|me| Self {
            me: Weak::clone(me),
            directory,
            identity,
            environment,
            after_fence,
            view: RwLock::default(),
            listed_at: Mutex::default(),
            contacts: Mutex::default(),
            failures: Mutex::default(),
            has_connected: AtomicBool::new(false),
            shares: EndpointShares::default(),
            descriptors: OnceLock::new(),
            waits: Mutex::default(),
            leak_detector: Arc::default(),
            figures: Arc::default(),
        })
    }

    /// Lists the nodes in the directory. Returns the listing's revision.
    ///
    /// # Errors
    /// Those of the directory.
    pub(crate) fn refresh(&self) -> Result<u64, DirectoryError> {
        let begun = self.now();
        let listing = self.directory.list(names::NODES)?;
        self.apply_listing(&listing, begun);
        Ok(listing.revision)
    }

    fn apply_listing(&self, listing: &Listing, begun: Instant) {
        let (mut view, now) = (self.write_view(), self.now());
        let mut records: Vec<NodeRecord> = Vec::with_capacity(listing.entries.len());
        for entry in &listing.entries {
            match names::decode(entry) {
                Ok(record) => records.push(record),
                Err(error) => view.log_unreadable_record(&entry.key, &error, now),
            }
        }
        view.apply_listing(&records, listing.revision, begun, now);
    }

    /// Applies an event of the watch over the nodes.
    pub(crate) fn apply_event(&self, event: &WatchEvent) {
        let Some(number) = event.key.strip_prefix(names::NODES).and_then(|number| number.parse().ok()) else {
            return;
        };
        let (mut view, now) = (self.write_view(), self.now());
        let record = match &event.kind {
            WatchEventKind::Put { value, .. } => match serde_json::from_slice::<NodeRecord>(value) {
                Ok(record) => Some(record),
                Err(error) => return view.log_unreadable_record(&event.key, &error, now),
            },
            WatchEventKind::Delete => None,
        };
        view.apply_event(NodeId(number), record.as_ref(), event.revision, now);
    }

    /// Reads the lives of nodes from the directory that began before this process. Callers wait for
    /// these nodes if they are away.
    ///
    /// # Errors
    /// Those of the directory.
    pub fn load_lives(&self) -> Result<(), DirectoryError> {
        let lives = names::lives(&*self.directory)?;
        self.write_view().add_lives(&lives, self.now());
        Ok(())
    }

    /// Connects to each of `nodes` whose memory is kept, to wait until it answers or its memory is
    /// lost. Nodes without kept memory are skipped.
    ///
    /// A node that has not returned is logged.
    pub fn wait_for_return_of(&self, nodes: &BTreeSet<NodeId>) {
        for node in nodes {
            let is_kept = match self.state(*node, self.now()) {
                NodeState::Present(present) => !present.grace.is_zero(),
                NodeState::Away(_) => {
                    tracing::info!(node = node.0, "waiting for a memory node that is away");
                    true
                }
                NodeState::Suspect(_) | NodeState::Unknown => false,
            };
            // A node that has just died is in the directory until its lease ends, so only a
            // connection shows whether the node is present.
            if is_kept && let Err(error) = self.connect(*node, self.identity.tenant) {
                tracing::warn!(node = node.0, %error, "memory node did not return within its grace time");
            }
        }
    }

    /// Checks that there are at least `wanted` nodes.
    ///
    /// If too few are known, lists the nodes in the directory: the watch may be late, and a user
    /// may have started a node just before.
    ///
    /// # Errors
    /// The number of nodes, if it is smaller.
    pub fn require(&self, wanted: usize) -> Result<(), usize> {
        if self.count() >= wanted {
            return Ok(());
        }
        if let Err(error) = self.refresh() {
            tracing::warn!(%error, "listing memory nodes in the directory failed; using the last known ones");
        }
        let count = self.count();
        if count >= wanted { Ok(()) } else { Err(count) }
    }

    /// The number of nodes.
    #[must_use]
    pub fn count(&self) -> usize {
        self.read_view().present().len()
    }

    /// The numbers of the nodes.
    #[must_use]
    pub fn list(&self) -> Vec<NodeId> {
        self.read_view().present().collect()
    }

    /// The nodes that have left the directory since this registry exists, with the time since then.
    #[must_use]
    pub fn missing(&self) -> Vec<(NodeId, Duration)> {
        let now = self.now();
        let since = |since| now.saturating_duration_since(since);
        self.read_view().missing().map(|(node, left_at)| (node, since(left_at))).collect()
    }

    /// The host's number in the pool.
    #[must_use]
    pub const fn host(&self) -> Host {
        self.identity.host
    }

    /// A connector for one tenant of this host and one purpose. Connections that do not wait are
    /// for [`EndpointPurpose::Allocate`].
    #[must_use]
    pub fn connector(self: &Arc<Self>, tenant: u32, purpose: EndpointPurpose) -> Arc<dyn Connector> {
        Arc::new(TenantConnector { nodes: Arc::clone(self), tenant: Tenant(tenant), purpose })
    }

    /// The leak detector that all pool clients of this host share.
    #[must_use]
    pub const fn leak_detector(&self) -> &Arc<LeakDetector> {
        &self.leak_detector
    }

    /// A pool client of a tenant that is connected to no node.
    #[must_use]
    pub fn unconnected_client(&self, tenant: Tenant) -> PoolClient {
        let leak_detector = Arc::clone(&self.leak_detector);
        let mut pool = PoolClient::with_leak_detector(self.identity.host, tenant, leak_detector);
        pool.set_figures(Arc::clone(&self.figures));
        pool
    }

    /// The figures of the nodes.
    /// [`Membership::watch_nodes`](crate::membership::Membership::watch_nodes) keeps them up to
    /// date.
    #[must_use]
    pub const fn figures(&self) -> &Arc<FigureTable> {
        &self.figures
    }

    /// A pool client of a tenant that is connected to every node that answers.
    #[must_use]
    pub fn pool_client(&self, tenant: u32) -> PoolClient {
        let mut pool = self.unconnected_client(Tenant(tenant));
        for node in self.list() {
            match self.connect_without_waiting(node, Tenant(tenant)) {
                Ok(endpoint) => {
                    if let Err(error) = pool.add_node(node, endpoint) {
                        tracing::warn!(node = node.0, %error, "ignored memory node: unusable pool");
                    }
                }
                Err(error) => {
                    tracing::warn!(node = node.0, %error, "ignored memory node: connection failed");
                }
            }
        }
        pool
    }

    /// The errors of registered nodes whose last connection attempt failed; `None` if none has
    /// failed.
    #[must_use]
    pub fn connection_failure(&self) -> Option<String> {
        let failures = self.failures.lock();
        let failed = self.list().into_iter().find_map(|node| Some((node, failures.get(&node)?)));
        failed.map(|(node, reason)| format!("memory node {}: {reason}", node.0))
    }

    /// The error of a registered node's last connection attempt; `None` if it succeeded, or if
    /// there was no attempt.
    #[must_use]
    pub fn failure_of(&self, node: NodeId) -> Option<String> {
        self.failures.lock().get(&node).cloned()
    }

    /// The reason why no node will ever accept this host, such as another cluster key; `None` if a
    /// node has accepted the host, or may do so later.
    #[must_use]
    pub fn lasting_failure(&self, tenant: u32) -> Option<String> {
        if self.has_connected.load(Relaxed) {
            return None;
        }
        let mut last = None;
        for node in self.list() {
            match self.connect_without_waiting(node, Tenant(tenant)) {
                Err(error) if error.is_lasting() => {
                    last = Some(format!("memory node {}: {error}", node.0));
                }
                Ok(_) | Err(_) => return None,
            }
        }
        last
    }

    /// Charges endpoints from now on to the users of this host.
    pub fn charge_endpoints(&self, descriptors: &Arc<DescriptorShares>) {
        let _set_before = self.descriptors.set(Arc::clone(descriptors));
    }

    fn now(&self) -> Instant {
        self.environment.now()
    }

    fn state(&self, node: NodeId, now: Instant) -> NodeState {
        self.read_view().state(node, now)
    }

    fn read_view(&self) -> RwLockReadGuard<'_, NodeView> {
        self.view.read()
    }

    fn write_view(&self) -> RwLockWriteGuard<'_, NodeView> {
        self.view.write()
    }
}

/// Connects one tenant of this host to memory nodes.
#[derive(Debug)]
struct TenantConnector {
    nodes: Arc<NodeRegistry>,
    tenant: Tenant,
    purpose: EndpointPurpose,
}

impl Connector for TenantConnector {
    fn connect(&self, node: NodeId) -> Result<Box<dyn Endpoint>, EndpointError> {
        self.nodes.connect_for(node, self.tenant, self.purpose)
    }

    fn connect_without_waiting(&self, node: NodeId) -> Result<Box<dyn Endpoint>, EndpointError> {
        self.nodes.connect_without_waiting(node, self.tenant)
    }

    fn connect_lazily(&self, node: NodeId) -> Result<Box<dyn Endpoint>, EndpointError> {
        self.nodes.connect_lazily(node, self.tenant, self.purpose)
    }
}

#[cfg(test)]
mod tests;
