//! Which memory nodes there are, and how this host reaches them.

mod back;
mod known;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard, Weak};
use std::time::{Duration, Instant};

use aquifer_directory::names::{self, NodeRecord};
use aquifer_directory::{Directory, DirectoryError, Listing, WatchEvent, WatchEventKind};
use aquifer_fabric::ClusterKey;
use aquifer_fabric::reconnecting::{AwayPolicy, ReconnectingEndpoint, TargetDescription};
use aquifer_fabric::tcp::ConnectOptions;
use aquifer_fabric::{Endpoint, EndpointError, Host, Identity, Tenant};
use aquifer_pager::Connector;
use aquifer_pool::{LeakDetector, NodeId, PoolClient};

use back::Back;
use known::{Known, Place, Standing};

/// How often to see whether a node that is away has come back.
const LOOK_EVERY: Duration = Duration::from_millis(10);

/// The memory nodes as the directory names them.
#[derive(Debug)]
pub struct Nodes {
    me: Weak<Self>,
    directory: Arc<dyn Directory>,
    identity: Identity,
    key: Option<ClusterKey>,
    connect: ConnectOptions,
    known: RwLock<Known>,
    /// Nodes with kept memory that users have been at.
    met: Mutex<BTreeMap<(NodeId, Tenant), Met>>,
    leak_detector: Arc<LeakDetector>,
}

/// What a user knows of a node where it has been.
#[derive(Clone, Debug)]
struct Met {
    seen: TargetDescription,
    epoch: u64,
    kept: Duration,
}

/// A node cannot be reached.
struct Absence {
    error: EndpointError,
    may_end: bool,
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
        Arc::new_cyclic(|me| Self {
            me: Weak::clone(me),
            directory,
            identity,
            key,
            connect,
            known: RwLock::default(),
            met: Mutex::default(),
            leak_detector: Arc::default(),
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
        let mut records: Vec<NodeRecord> = Vec::with_capacity(listing.entries.len());
        for entry in &listing.entries {
            match names::decode(entry) {
                Ok(record) => records.push(record),
                Err(error) => {
                    tracing::warn!(key = entry.key, %error, "the record of a node cannot be read")
                }
            }
        }
        self.write().list(&records, listing.revision, Instant::now());
    }

    /// A node is there, has moved, or is gone.
    pub(crate) fn heed(&self, event: &WatchEvent) {
        let Some(number) = event.key.strip_prefix(names::NODES).and_then(|number| number.parse().ok()) else {
            return;
        };
        let record = match &event.kind {
            WatchEventKind::Put { value, .. } => match serde_json::from_slice::<NodeRecord>(value) {
                Ok(record) => Some(record),
                Err(error) => {
                    tracing::warn!(key = event.key, %error, "the record of a node cannot be read");
                    return;
                }
            },
            WatchEventKind::Delete => None,
        };
        self.write().change(NodeId(number), record.as_ref(), event.revision, Instant::now());
    }

    /// Learn of memory that there was before this agent, and that may come back with its node.
    ///
    /// # Errors
    /// The directory's.
    pub fn remember_lives(&self) -> Result<(), DirectoryError> {
        let lives = names::lives(&*self.directory)?;
        self.write().remember(&lives, Instant::now());
        Ok(())
    }

    /// Wait for those of these nodes that do not answer, and may come back with their memory: until they are there, or may not come back any more.
    pub fn await_these(&self, nodes: &BTreeSet<NodeId>) {
        for node in nodes {
            let may_come_back = match self.standing(*node, Instant::now()) {
                Standing::Here(place) => !place.kept.is_zero(),
                Standing::Away => {
                    tracing::info!(
                        node = node.0,
                        "a memory node is away, and its memory is kept; waiting for it"
                    );
                    true
                }
                Standing::Unknown => false,
            };
            // One that has just died is in the directory until its lease is over: whether it is there only it can tell.
            if may_come_back && let Err(error) = self.connect(*node, self.identity.tenant) {
                tracing::warn!(node = node.0, %error, "a memory node has not come back");
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
        self.read().here().len()
    }

    /// Their numbers.
    #[must_use]
    pub fn list(&self) -> Vec<NodeId> {
        self.read().here().collect()
    }

    /// This host, in the pool.
    #[must_use]
    pub const fn host(&self) -> Host {
        self.identity.host
    }

    /// This host, on behalf of one of its users.
    #[must_use]
    pub fn of(self: &Arc<Self>, tenant: u32) -> Arc<dyn Connector> {
        Arc::new(OfTenant { nodes: Arc::clone(self), tenant: Tenant(tenant) })
    }

    /// What this host has of the pool, and who knows of it.
    #[must_use]
    pub const fn leak_detector(&self) -> &Arc<LeakDetector> {
        &self.leak_detector
    }

    /// A pool client of that user, as yet without nodes.
    #[must_use]
    pub fn client(&self, tenant: Tenant) -> PoolClient {
        PoolClient::with_leak_detector(self.identity.host, tenant, Arc::clone(&self.leak_detector))
    }

    /// A pool client of that user connected to every node that answers.
    #[must_use]
    pub fn pool(&self, tenant: u32) -> PoolClient {
        let mut pool = self.client(Tenant(tenant));
        for node in self.list() {
            match self.connect_without_waiting(node, Tenant(tenant)) {
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

    /// An endpoint on behalf of a user. If the node's memory is kept when it goes away, READs and WRITEs wait for it then. So does this, if it is away now.
    ///
    /// # Errors
    /// If it does not answer.
    pub fn connect(&self, node: NodeId, tenant: Tenant) -> Result<Box<dyn Endpoint>, EndpointError> {
        self.connect_in(node, tenant, AwayPolicy::Wait)
    }

    /// The same for who has other nodes to turn to: it is told at once that the node is away.
    pub(crate) fn connect_without_waiting(
        &self,
        node: NodeId,
        tenant: Tenant,
    ) -> Result<Box<dyn Endpoint>, EndpointError> {
        self.connect_in(node, tenant, AwayPolicy::Fail)
    }

    /// The same for who has others to attend to meanwhile: if the node is away, and this user has been there before, here is an endpoint that waits for it.
    pub(crate) fn connect_lazily(
        &self,
        node: NodeId,
        tenant: Tenant,
    ) -> Result<Box<dyn Endpoint>, EndpointError> {
        match self.attempt(node, tenant, AwayPolicy::Wait, &mut None) {
            Ok(endpoint) => return Ok(endpoint),
            Err(Absence { error, may_end: false }) => return Err(error),
            Err(_) => {}
        }
        let met = lock(&self.met).get(&(node, tenant)).cloned();
        match (met, self.me.upgrade()) {
            (Some(Met { seen, epoch, kept }), Some(nodes)) => {
                let back = Back { nodes, node, tenant, epoch, kept };
                Ok(Box::new(ReconnectingEndpoint::to_away_target(seen, Arc::new(back), AwayPolicy::Wait)))
            }
            _ => self.connect(node, tenant),
        }
    }

    fn connect_in(
        &self,
        node: NodeId,
        tenant: Tenant,
        policy: AwayPolicy,
    ) -> Result<Box<dyn Endpoint>, EndpointError> {
        let mut failing_since = None;
        loop {
            match self.attempt(node, tenant, policy, &mut failing_since) {
                Ok(endpoint) => return Ok(endpoint),
                Err(absence) if policy == AwayPolicy::Fail || !absence.may_end => return Err(absence.error),
                Err(_) => std::thread::sleep(LOOK_EVERY),
            }
        }
    }

    fn attempt(
        &self,
        node: NodeId,
        tenant: Tenant,
        policy: AwayPolicy,
        failing_since: &mut Option<Instant>,
    ) -> Result<Box<dyn Endpoint>, Absence> {
        let (place, error) = match self.standing(node, Instant::now()) {
            Standing::Here(place) => match self.reach(&place, tenant) {
                Ok(endpoint) => return Ok(self.reconnecting(node, tenant, endpoint, &place, policy)),
                Err(error) => (Some(place), error),
            },
            Standing::Away => (None, unknown(node)),
            Standing::Unknown => return Err(Absence { error: unknown(node), may_end: false }),
        };
        // One that has just died is in the directory until its lease is over.
        let since = *failing_since.get_or_insert_with(Instant::now);
        let may_be_away = place.is_none_or(|place| since.elapsed() < place.kept) && error.is_target_away();
        Err(Absence { error, may_end: may_be_away })
    }

    /// Who has connected may say so after another that has met a later life of the node.
    fn meet(&self, whom: (NodeId, Tenant), met: Met) {
        let mut known = lock(&self.met);
        if known.get(&whom).is_none_or(|before| before.epoch <= met.epoch) {
            known.insert(whom, met);
        }
    }

    fn reconnecting(
        &self,
        node: NodeId,
        tenant: Tenant,
        endpoint: Box<dyn Endpoint>,
        place: &Place,
        policy: AwayPolicy,
    ) -> Box<dyn Endpoint> {
        let Place { epoch, kept, .. } = *place;
        match self.me.upgrade() {
            Some(nodes) if !kept.is_zero() => {
                self.meet((node, tenant), Met { seen: TargetDescription::of(&*endpoint), epoch, kept });
                let back = Back { nodes, node, tenant, epoch, kept };
                Box::new(ReconnectingEndpoint::new(endpoint, Arc::new(back), policy))
            }
            _ => endpoint,
        }
    }

    fn standing(&self, node: NodeId, now: Instant) -> Standing {
        self.read().standing(node, now)
    }

    fn reach(&self, place: &Place, tenant: Tenant) -> Result<Box<dyn Endpoint>, EndpointError> {
        let endpoint =
            place.reach.connect(Identity { tenant, ..self.identity }, self.key.as_ref(), &self.connect)?;
        if endpoint.regions().is_empty() {
            // It has just been started anew, and its record is of before.
            return Err(EndpointError::Unreachable {
                address: place.reach.address(),
                source: std::io::Error::new(std::io::ErrorKind::NotConnected, "its memory is not open yet"),
            });
        }
        Ok(endpoint)
    }

    /// As another host than this one, to a node that is there.
    pub(crate) fn connect_as(&self, node: NodeId, who: Identity) -> Result<Box<dyn Endpoint>, EndpointError> {
        match self.standing(node, Instant::now()) {
            Standing::Here(place) => place.reach.connect(who, self.key.as_ref(), &self.connect),
            Standing::Away | Standing::Unknown => Err(unknown(node)),
        }
    }

    fn read(&self) -> RwLockReadGuard<'_, Known> {
        self.known.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, Known> {
        self.known.write().unwrap_or_else(PoisonError::into_inner)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn unknown(node: NodeId) -> EndpointError {
    EndpointError::Unreachable {
        address: format!("memory node {}", node.0),
        source: std::io::Error::new(
            std::io::ErrorKind::NotFound,
            "the directory knows no such node any more",
        ),
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

    fn connect_without_waiting(&self, node: NodeId) -> Result<Box<dyn Endpoint>, EndpointError> {
        self.nodes.connect_without_waiting(node, self.tenant)
    }

    fn connect_lazily(&self, node: NodeId) -> Result<Box<dyn Endpoint>, EndpointError> {
        self.nodes.connect_lazily(node, self.tenant)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use aquifer_directory::sim::DirectoryWorld;
    use aquifer_fabric::reconnecting::{Reconnect, ReconnectOutcome};
    use aquifer_fabric::shm::{self, ShmTarget};
    use aquifer_fabric::{Access, Memory, Scope, Target};

    fn nodes(directory: &Arc<dyn Directory>) -> Arc<Nodes> {
        let identity = Identity { host: Host(1), epoch: 1, tenant: Tenant(0) };
        Nodes::new(Arc::clone(directory), identity, None, ConnectOptions::default())
    }

    fn register(directory: &dyn Directory, id: u16) {
        register_at(directory, id, format!("/node-{id}"), 0);
    }

    fn register_at(directory: &dyn Directory, id: u16, address: String, kept_ms: u64) {
        let fabric = "shm".into();
        let record = NodeRecord {
            id,
            fabric,
            address,
            memory_bytes: 1 << 20,
            memory_bytes_max: 1 << 20,
            requested_memory_bytes: 1 << 20,
            resize_blocker: None,
            kept_ms,
            epoch: 1,
        };
        directory.put(&names::node_key(id), &names::encode(&record), None).expect("put");
    }

    #[test]
    fn who_wants_nodes_is_not_told_of_a_view_that_is_late() {
        let directory: Arc<dyn Directory> = Arc::new(DirectoryWorld::new(1).host(1));
        let nodes = nodes(&directory);
        assert_eq!(nodes.at_least(1), Err(0));
        // No watch has told of it.
        register(&*directory, 1);
        assert_eq!(nodes.at_least(1), Ok(()));
        assert_eq!(nodes.at_least(2), Err(1));
    }

    #[test]
    fn what_a_watch_brings_late_undoes_no_listing() {
        let directory: Arc<dyn Directory> = Arc::new(DirectoryWorld::new(1).host(1));
        let nodes = nodes(&directory);
        let mut watch = directory.watch(names::NODES, 1).expect("watch");
        register(&*directory, 1);
        directory.delete(&names::node_key(1)).expect("delete");
        register(&*directory, 1);
        nodes.list_anew().expect("list");
        while let Some(event) = watch.next(Duration::ZERO).expect("an event") {
            nodes.heed(&event);
            assert_eq!(nodes.list(), [NodeId(1)], "a node was forgotten by {event:?}");
        }
        directory.delete(&names::node_key(1)).expect("delete");
        nodes.heed(&watch.next(Duration::ZERO).expect("an event").expect("of the deletion"));
        assert_eq!(nodes.count(), 0);
    }

    #[test]
    fn a_listing_that_comes_late_undoes_nothing_that_a_watch_brought() {
        let directory: Arc<dyn Directory> = Arc::new(DirectoryWorld::new(1).host(1));
        let nodes = nodes(&directory);
        let mut watch = directory.watch(names::NODES, 1).expect("watch");
        register(&*directory, 1);
        let listing = directory.list(names::NODES).expect("list");
        register(&*directory, 2);
        directory.delete(&names::node_key(1)).expect("delete");
        while let Some(event) = watch.next(Duration::ZERO).expect("an event") {
            nodes.heed(&event);
        }
        nodes.take_in(&listing);
        assert_eq!(nodes.list(), [NodeId(2)]);
    }

    #[test]
    fn a_node_that_went_unseen_is_forgotten_by_the_next_listing() {
        let directory: Arc<dyn Directory> = Arc::new(DirectoryWorld::new(1).host(1));
        let nodes = nodes(&directory);
        register(&*directory, 1);
        register(&*directory, 2);
        nodes.list_anew().expect("list");
        directory.delete(&names::node_key(1)).expect("delete");
        nodes.list_anew().expect("list");
        assert_eq!(nodes.list(), [NodeId(2)]);
    }

    #[test]
    fn who_has_others_to_attend_to_is_not_kept_by_a_node_that_is_away() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("node");
        let listen = || {
            let target = ShmTarget::listen(&path, shm::Options::default()).expect("a target");
            let memory = Arc::new(Memory::create("lent", 4096).expect("memory"));
            target.register(memory, Access::ALL, Scope::Anyone).expect("room");
            target
        };
        let target = listen();
        let directory: Arc<dyn Directory> = Arc::new(DirectoryWorld::new(1).host(1));
        let nodes = nodes(&directory);
        register_at(&*directory, 1, path.display().to_string(), 3_600_000);
        nodes.list_anew().expect("list");
        let before = nodes.connect(NodeId(1), Tenant(5)).expect("it is there");
        drop(target);
        let ahead = nodes.connect_lazily(NodeId(1), Tenant(5)).expect("it was seen before");
        assert!(ahead.is_away());
        assert_eq!(ahead.regions(), before.regions());
        directory.delete(&names::node_key(1)).expect("delete");
        nodes.list_anew().expect("list");
        assert!(nodes.connect_lazily(NodeId(1), Tenant(5)).expect("it may come back").is_away());
        let back = |epoch| {
            let (nodes, kept) = (Arc::clone(&nodes), Duration::from_secs(3600));
            Back { nodes, node: NodeId(1), tenant: Tenant(5), epoch, kept }
        };
        assert!(matches!(back(1).attempt(), ReconnectOutcome::Retry));
        let again = listen();
        register_at(&*directory, 1, path.display().to_string(), 3_600_000);
        nodes.list_anew().expect("list");
        assert!(matches!(back(1).attempt(), ReconnectOutcome::Connected(_)));
        assert!(matches!(back(2).attempt(), ReconnectOutcome::Gone), "another life");
        again.fence(Host(1), 1);
        assert!(matches!(back(1).attempt(), ReconnectOutcome::Gone), "it has shut us out");
    }
}
