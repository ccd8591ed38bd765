//! The memory nodes of the cluster, and connections to them.

mod fenced;
mod reconnect;
mod shares;
mod view;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{
    Arc, Mutex, MutexGuard, OnceLock, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard, Weak,
};
use std::time::{Duration, Instant};

use aquifer_channel::descriptor_shares::{DescriptorCharge, DescriptorShares};
use aquifer_directory::names::{self, NodeRecord};
use aquifer_directory::{Directory, DirectoryError, FailureLog, Listing, WatchEvent, WatchEventKind};
use aquifer_fabric::ClusterKey;
use aquifer_fabric::reconnecting::{AwayPolicy, ReconnectingEndpoint, TargetDescription};
use aquifer_fabric::tcp::ConnectOptions;
use aquifer_fabric::{Endpoint, EndpointError, Host, Identity, Tenant};
use aquifer_pager::Connector;
use aquifer_pool::{LeakDetector, NodeId, PoolClient};

pub use fenced::AfterFence;
use fenced::FenceTolerant;
use reconnect::Reconnector;
pub use shares::EndpointPurpose;
use shares::{EndpointShares, ShareKey};
use view::{NodeState, NodeView, PresentNode};

/// Interval between attempts to connect to a node that is away.
const RETRY_INTERVAL: Duration = Duration::from_millis(10);
/// Interval between attempts to connect to a node that has fenced this host: it refuses until this
/// process ends.
const FENCED_RETRY_INTERVAL: Duration = Duration::from_secs(1);
/// Descriptors of an endpoint. Its thread, if it has one, is one of many users.
const ENDPOINT_DESCRIPTORS: usize = 3;

/// The memory nodes that the directory has, and how this host connects to them.
///
/// [`Membership::watch_nodes`](crate::membership::Membership::watch_nodes) keeps it up to date.
#[derive(Debug)]
pub struct NodeRegistry {
    me: Weak<Self>,
    directory: Arc<dyn Directory>,
    identity: Identity,
    key: Option<ClusterKey>,
    connect: ConnectOptions,
    after_fence: AfterFence,
    view: RwLock<NodeView>,
    /// Nodes with kept memory to which a tenant of this host has connected.
    contacts: Mutex<BTreeMap<(NodeId, Tenant), Contact>>,
    /// Why each node could not be connected to at the last attempt, if it could not.
    failures: Mutex<BTreeMap<NodeId, String>>,
    /// Whether any node was connected to since this registry exists.
    has_connected: AtomicBool,
    shares: EndpointShares,
    /// The shares to which endpoints are charged, if they are.
    descriptors: OnceLock<Arc<DescriptorShares>>,
    /// Limits the log lines about connections that wait.
    waits: Mutex<FailureLog>,
    leak_detector: Arc<LeakDetector>,
}

/// What a tenant's last connection to a node has shown; enough to queue operations while the node
/// is away.
#[derive(Clone, Debug)]
struct Contact {
    target: TargetDescription,
    epoch: u64,
    grace: Duration,
}

/// Why an attempt to connect has failed.
struct ConnectFailure {
    error: EndpointError,
    /// True if the node may return with its memory.
    is_temporary: bool,
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
        Arc::new_cyclic(|me| Self {
            me: Weak::clone(me),
            directory,
            identity,
            key,
            connect,
            after_fence,
            view: RwLock::default(),
            contacts: Mutex::default(),
            failures: Mutex::default(),
            has_connected: AtomicBool::new(false),
            shares: EndpointShares::default(),
            descriptors: OnceLock::new(),
            waits: Mutex::default(),
            leak_detector: Arc::default(),
        })
    }

    /// Lists the nodes in the directory. Returns the listing's revision.
    ///
    /// # Errors
    /// Those of the directory.
    pub(crate) fn refresh(&self) -> Result<u64, DirectoryError> {
        let listing = self.directory.list(names::NODES)?;
        self.apply_listing(&listing);
        Ok(listing.revision)
    }

    fn apply_listing(&self, listing: &Listing) {
        let (mut view, now) = (self.write_view(), Instant::now());
        let mut records: Vec<NodeRecord> = Vec::with_capacity(listing.entries.len());
        for entry in &listing.entries {
            match names::decode(entry) {
                Ok(record) => records.push(record),
                Err(error) => view.log_unreadable_record(&entry.key, &error, now),
            }
        }
        view.apply_listing(&records, listing.revision, now);
    }

    /// Applies an event of the watch over the nodes.
    pub(crate) fn apply_event(&self, event: &WatchEvent) {
        let Some(number) = event.key.strip_prefix(names::NODES).and_then(|number| number.parse().ok()) else {
            return;
        };
        let (mut view, now) = (self.write_view(), Instant::now());
        let record = match &event.kind {
            WatchEventKind::Put { value, .. } => match serde_json::from_slice::<NodeRecord>(value) {
                Ok(record) => Some(record),
                Err(error) => return view.log_unreadable_record(&event.key, &error, now),
            },
            WatchEventKind::Delete => None,
        };
        view.apply_event(NodeId(number), record.as_ref(), event.revision, now);
    }

    /// Reads from the directory which memory existed before this process. Its nodes are waited for
    /// if they are away.
    ///
    /// # Errors
    /// Those of the directory.
    pub fn load_lives(&self) -> Result<(), DirectoryError> {
        let lives = names::lives(&*self.directory)?;
        self.write_view().add_lives(&lives, Instant::now());
        Ok(())
    }

    /// Connects to each of `nodes` whose memory is kept, to wait until it answers or its grace time
    /// has passed. Nodes without kept memory are skipped.
    ///
    /// Returns nothing: a node that has not returned is logged.
    pub fn wait_for_return_of(&self, nodes: &BTreeSet<NodeId>) {
        for node in nodes {
            let is_kept = match self.state(*node, Instant::now()) {
                NodeState::Present(present) => !present.grace.is_zero(),
                NodeState::Away => {
                    tracing::info!(node = node.0, "waiting for a memory node that is away");
                    true
                }
                NodeState::Suspect(_) | NodeState::Unknown => false,
            };
            // A node that has just died is in the directory until its lease ends, so only a
            // connection shows whether it is present.
            if is_kept && let Err(error) = self.connect(*node, self.identity.tenant) {
                tracing::warn!(node = node.0, %error, "memory node did not return within its grace time");
            }
        }
    }

    /// Checks that there are at least `wanted` nodes.
    ///
    /// If too few are known, it lists them in the directory: a watch may be a little behind what
    /// the user who started a node has seen.
    ///
    /// # Errors
    /// The number of nodes, if it is less.
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

    /// The nodes that have left the directory since this registry exists, and for how long.
    #[must_use]
    pub fn missing(&self) -> Vec<(NodeId, Duration)> {
        self.read_view().missing().map(|(node, since)| (node, since.elapsed())).collect()
    }

    /// This host's number in the pool.
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
        PoolClient::with_leak_detector(self.identity.host, tenant, Arc::clone(&self.leak_detector))
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

    /// Connects to a node on behalf of a tenant. Waits for a node that is away and whose memory
    /// is kept; READs and WRITEs on the endpoint wait for it, too.
    ///
    /// # Errors
    /// If the node cannot be reached or refuses the connection.
    pub fn connect(&self, node: NodeId, tenant: Tenant) -> Result<Box<dyn Endpoint>, EndpointError> {
        self.connect_for(node, tenant, EndpointPurpose::Write)
    }

    fn connect_for(
        &self,
        node: NodeId,
        tenant: Tenant,
        purpose: EndpointPurpose,
    ) -> Result<Box<dyn Endpoint>, EndpointError> {
        self.connect_in(node, tenant, purpose, AwayPolicy::Wait)
    }

    /// Connects to a node as [`Connector::connect_without_waiting`] does.
    pub(crate) fn connect_without_waiting(
        &self,
        node: NodeId,
        tenant: Tenant,
    ) -> Result<Box<dyn Endpoint>, EndpointError> {
        self.connect_in(node, tenant, EndpointPurpose::Allocate, AwayPolicy::Fail)
    }

    /// Connects to a node as [`Connector::connect_lazily`] does.
    pub(crate) fn connect_lazily(
        &self,
        node: NodeId,
        tenant: Tenant,
        purpose: EndpointPurpose,
    ) -> Result<Box<dyn Endpoint>, EndpointError> {
        match self.try_connect(node, tenant, purpose, AwayPolicy::Wait, &mut None) {
            Ok(endpoint) => return Ok(endpoint),
            Err(ConnectFailure { error, is_temporary: false }) => return Err(error),
            // It is not away.
            Err(ConnectFailure { error, .. }) if error.is_lack_of_room() => {
                return self.connect_for(node, tenant, purpose);
            }
            Err(_) => {}
        }
        let contact = lock(&self.contacts).get(&(node, tenant)).cloned();
        match (contact, self.me.upgrade()) {
            (Some(Contact { target, epoch, grace }), Some(nodes)) => {
                let reconnector = Arc::new(Reconnector { nodes, node, tenant, epoch, grace });
                let policy = AwayPolicy::Wait;
                let endpoint = ReconnectingEndpoint::to_away_target(target, reconnector, policy);
                Ok(self.tolerating_fences(node, Box::new(endpoint), policy))
            }
            _ => self.connect_for(node, tenant, purpose),
        }
    }

    /// Why registered nodes could not be connected to at the last attempt; `None` if all could.
    #[must_use]
    pub fn connection_failure(&self) -> Option<String> {
        let failures = lock(&self.failures);
        let failed = self.list().into_iter().find_map(|node| Some((node, failures.get(&node)?)));
        failed.map(|(node, reason)| format!("memory node {}: {reason}", node.0))
    }

    /// Why a registered node could not be connected to at the last attempt; `None` if it could, or
    /// if there was no attempt.
    #[must_use]
    pub fn failure_of(&self, node: NodeId) -> Option<String> {
        lock(&self.failures).get(&node).cloned()
    }

    /// Why no node will ever accept this host, such as another cluster key; `None` if one has
    /// accepted it, or may do so later.
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

    fn connect_in(
        &self,
        node: NodeId,
        tenant: Tenant,
        purpose: EndpointPurpose,
        policy: AwayPolicy,
    ) -> Result<Box<dyn Endpoint>, EndpointError> {
        let mut failing_since = None;
        loop {
            match self.try_connect(node, tenant, purpose, policy, &mut failing_since) {
                Ok(endpoint) => {
                    lock(&self.failures).remove(&node);
                    self.has_connected.store(true, Relaxed);
                    return Ok(endpoint);
                }
                Err(failure) if policy == AwayPolicy::Fail || !failure.is_temporary => {
                    lock(&self.failures).insert(node, failure.error.to_string());
                    return Err(failure.error);
                }
                Err(failure) => {
                    self.log_wait(node, &failure.error);
                    let is_fence = failure.error.is_fence();
                    std::thread::sleep(if is_fence { FENCED_RETRY_INTERVAL } else { RETRY_INTERVAL });
                }
            }
        }
    }

    /// One attempt to connect. `failing_since` is the time of the caller's first failed attempt.
    fn try_connect(
        &self,
        node: NodeId,
        tenant: Tenant,
        purpose: EndpointPurpose,
        policy: AwayPolicy,
        failing_since: &mut Option<Instant>,
    ) -> Result<Box<dyn Endpoint>, ConnectFailure> {
        let (present, error) = match self.state(node, Instant::now()) {
            NodeState::Present(present) => {
                match self.share_endpoint(node, tenant, purpose, &present, policy) {
                    Ok(endpoint) => return Ok(endpoint),
                    Err(error) => (Some(present), error),
                }
            }
            NodeState::Suspect(last) => {
                return self.share_endpoint(node, tenant, purpose, &last, policy).map_err(|error| {
                    // One that does not answer either has ended, for all that can be known.
                    let is_temporary =
                        error.is_lack_of_room() && !error.is_timeout() || self.awaits_end_after(&error);
                    ConnectFailure { error, is_temporary }
                });
            }
            NodeState::Away => (None, unknown_node(node)),
            NodeState::Unknown => {
                return Err(ConnectFailure { error: unknown_node(node), is_temporary: false });
            }
        };
        // A node that has just died is in the directory until its lease ends.
        let since = *failing_since.get_or_insert_with(Instant::now);
        let is_away = present.is_none_or(|present| since.elapsed() < present.grace) && error.is_target_away();
        let is_temporary = is_away || self.awaits_end_after(&error) || error.is_lack_of_room();
        Err(ConnectFailure { error, is_temporary })
    }

    /// Whether to wait for the end of this process: its lease has ended.
    fn awaits_end_after(&self, error: &EndpointError) -> bool {
        error.is_fence() && self.after_fence == AfterFence::Wait
    }

    /// An endpoint to a node, of its own or shared.
    fn share_endpoint(
        &self,
        node: NodeId,
        tenant: Tenant,
        purpose: EndpointPurpose,
        present: &PresentNode,
        policy: AwayPolicy,
    ) -> Result<Box<dyn Endpoint>, EndpointError> {
        let key = ShareKey { node, life: present.epoch, tenant, purpose };
        self.shares.endpoint(key, || {
            let endpoint = self.open_endpoint(present, tenant)?;
            self.shares.forget_earlier_lives(node, present.epoch);
            Ok((self.wrap(node, tenant, endpoint, present, policy), self.charge_endpoint(tenant)))
        })
    }

    /// Charges an endpoint to the user of a tenant. The user has at most a few of its own, and one
    /// for several programs, runs or sessions, which could not use the node without it.
    fn charge_endpoint(&self, tenant: Tenant) -> Option<DescriptorCharge> {
        let shares = self.descriptors.get()?;
        Some(shares.charge_always(tenant.0, ENDPOINT_DESCRIPTORS))
    }

    /// Charges endpoints from now on to the users of this host.
    pub fn charge_endpoints(&self, descriptors: &Arc<DescriptorShares>) {
        let _set_before = self.descriptors.set(Arc::clone(descriptors));
    }

    /// Says at intervals what connections wait for.
    fn log_wait(&self, node: NodeId, error: &EndpointError) {
        if error.is_lack_of_room()
            && let Some(attempts) = lock(&self.waits).record(Instant::now())
        {
            tracing::warn!(
                node = node.0, %error, attempts, "waiting for an endpoint; pages stay where they are"
            );
        }
    }

    /// Records a connection, unless another thread has recorded one to a later life of the node.
    fn record_contact(&self, node: NodeId, tenant: Tenant, contact: Contact) {
        let mut contacts = lock(&self.contacts);
        if contacts.get(&(node, tenant)).is_none_or(|before| before.epoch <= contact.epoch) {
            contacts.insert((node, tenant), contact);
        }
    }

    /// If the node's memory is kept, wraps an endpoint so that it survives a restart of the node.
    fn wrap(
        &self,
        node: NodeId,
        tenant: Tenant,
        endpoint: Box<dyn Endpoint>,
        present: &PresentNode,
        policy: AwayPolicy,
    ) -> Box<dyn Endpoint> {
        let PresentNode { epoch, grace, .. } = *present;
        let endpoint = match self.me.upgrade() {
            Some(nodes) if !grace.is_zero() => {
                self.record_contact(
                    node,
                    tenant,
                    Contact { target: TargetDescription::of(&*endpoint), epoch, grace },
                );
                let reconnector = Reconnector { nodes, node, tenant, epoch, grace };
                Box::new(ReconnectingEndpoint::new(endpoint, Arc::new(reconnector), policy))
            }
            _ => endpoint,
        };
        self.tolerating_fences(node, endpoint, policy)
    }

    fn tolerating_fences(
        &self,
        node: NodeId,
        endpoint: Box<dyn Endpoint>,
        policy: AwayPolicy,
    ) -> Box<dyn Endpoint> {
        match self.after_fence {
            AfterFence::Wait => Box::new(FenceTolerant::new(endpoint, node, policy)),
            AfterFence::Fail => endpoint,
        }
    }

    fn state(&self, node: NodeId, now: Instant) -> NodeState {
        self.read_view().state(node, now)
    }

    /// Opens an endpoint, and checks that the node has opened its memory.
    fn open_endpoint(
        &self,
        present: &PresentNode,
        tenant: Tenant,
    ) -> Result<Box<dyn Endpoint>, EndpointError> {
        let identity = Identity { tenant, ..self.identity };
        let endpoint = present.address.connect(identity, self.key.as_ref(), &self.connect)?;
        if endpoint.regions().is_empty() {
            // The node has just been restarted; the directory has the record of its last process.
            return Err(EndpointError::Unreachable {
                address: present.address.address(),
                source: std::io::Error::new(std::io::ErrorKind::NotConnected, "its memory is not open yet"),
            });
        }
        Ok(endpoint)
    }

    /// Connects to a present node under another identity than this host's.
    pub(crate) fn connect_as(
        &self,
        node: NodeId,
        identity: Identity,
    ) -> Result<Box<dyn Endpoint>, EndpointError> {
        match self.state(node, Instant::now()) {
            NodeState::Present(present) | NodeState::Suspect(present) => {
                present.address.connect(identity, self.key.as_ref(), &self.connect)
            }
            NodeState::Away | NodeState::Unknown => Err(unknown_node(node)),
        }
    }

    fn read_view(&self) -> RwLockReadGuard<'_, NodeView> {
        self.view.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write_view(&self) -> RwLockWriteGuard<'_, NodeView> {
        self.view.write().unwrap_or_else(PoisonError::into_inner)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn unknown_node(node: NodeId) -> EndpointError {
    EndpointError::Unreachable {
        address: format!("memory node {}", node.0),
        source: std::io::Error::new(std::io::ErrorKind::NotFound, "the directory has no such node"),
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
