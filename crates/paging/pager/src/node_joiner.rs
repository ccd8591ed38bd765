//! Adds memory nodes to a user of nodes, such as the sender of a run: nodes that are new, and nodes
//! that have returned.

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use aquifer_fabric::{Endpoint, EndpointError};
use aquifer_pool::{NodeId, PoolClient, PoolError};

use crate::filler::Filler;
use crate::ports::Connector;
use crate::sender::Sender;

/// The interval at which the list of nodes is examined.
const SEARCH_INTERVAL: Duration = Duration::from_millis(250);
/// Pause before the next attempt to connect to a node after a failure.
const RETRY_PAUSE: Duration = Duration::from_secs(1);

/// Why a node could not be added.
#[derive(Debug, thiserror::Error)]
enum JoinError {
    #[error("cannot connect: {0}")]
    Connect(#[from] EndpointError),
    #[error("cannot use its memory: {0}")]
    Add(#[from] PoolError),
}

/// A thread that connects to one node. A node that does not answer must not block the sender.
type ConnectThread = JoinHandle<(NodeId, Result<Box<dyn Endpoint>, EndpointError>)>;

/// After a restart, reconnects to the nodes of recovered slabs that did not answer before.
///
/// Waits for a node whose memory is kept. Replicas on nodes that do not answer now are dropped by
/// [`Filler::adopt_recovered`].
pub(crate) fn connect_slab_nodes(filler: &Filler, pool: &mut PoolClient, connector: &dyn Connector) {
    for node in filler.nodes() {
        if pool.nodes().any(|other| other == node) {
            continue;
        }
        if let Err(error) = connect_slab_node(node, pool, connector) {
            tracing::debug!(node = node.0, %error, "memory node with slabs of the run does not answer");
        }
    }
}

fn connect_slab_node(
    node: NodeId,
    pool: &mut PoolClient,
    connector: &dyn Connector,
) -> Result<(), JoinError> {
    // The first connection only waits for the node, so that the pool need not wait later.
    let _waited = connector.connect(node)?;
    let endpoint = connector.connect_without_waiting(node)?;
    pool.add_node(node, endpoint)?;
    Ok(())
}

/// A user of memory nodes, which a [`NodeJoiner`] connects to nodes.
pub trait NodeUser {
    /// Whether the user has a connection to this node.
    fn uses_node(&self, node: NodeId) -> bool;

    /// Adds a node, to which `endpoint` is connected.
    ///
    /// # Errors
    /// If `node` is not a memory node, or there are too many.
    fn add_node(&mut self, node: NodeId, endpoint: Box<dyn Endpoint>) -> Result<(), PoolError>;
}

impl NodeUser for PoolClient {
    fn uses_node(&self, node: NodeId) -> bool {
        self.nodes().any(|other| other == node)
    }

    fn add_node(&mut self, node: NodeId, endpoint: Box<dyn Endpoint>) -> Result<(), PoolError> {
        Self::add_node(self, node, endpoint)
    }
}

impl NodeUser for Sender {
    fn uses_node(&self, node: NodeId) -> bool {
        Self::uses_node(self, node)
    }

    fn add_node(&mut self, node: NodeId, endpoint: Box<dyn Endpoint>) -> Result<(), PoolError> {
        Self::add_node(self, node, endpoint)
    }
}

/// Connects a user of nodes to memory nodes that it does not use yet.
#[derive(Debug)]
pub struct NodeJoiner {
    connector: Arc<dyn Connector>,
    last_search: Instant,
    connecting: Option<ConnectThread>,
    /// Nodes to which the connection failed, with the time of the failure.
    failed: Vec<(NodeId, Instant)>,
}

impl NodeJoiner {
    /// Creates a joiner that reaches nodes through `connector`.
    #[must_use]
    pub fn new(connector: Arc<dyn Connector>) -> Self {
        Self { connector, last_search: Instant::now(), connecting: None, failed: Vec::new() }
    }

    /// Adds a node whose connection is complete, or begins to connect to the first of `nodes` that
    /// `user` does not use. May be called at any frequency.
    pub fn poll(&mut self, user: &mut impl NodeUser, nodes: impl FnOnce() -> Vec<NodeId>) {
        if let Some(thread) = self.connecting.take_if(|thread| thread.is_finished()) {
            self.finish(thread, user);
        }
        if self.connecting.is_some() || self.last_search.elapsed() < SEARCH_INTERVAL {
            return;
        }
        self.last_search = Instant::now();
        self.failed.retain(|(_, since)| since.elapsed() < RETRY_PAUSE);
        let is_new =
            |node: &NodeId| !user.uses_node(*node) && self.failed.iter().all(|(failed, _)| failed != node);
        let Some(node) = nodes().into_iter().find(is_new) else { return };
        let connector = Arc::clone(&self.connector);
        let connect = move || (node, connector.connect_without_waiting(node));
        match std::thread::Builder::new().name("node-joiner".into()).spawn(connect) {
            Ok(thread) => self.connecting = Some(thread),
            Err(error) => {
                tracing::warn!(%error, "cannot start a thread to connect to a memory node; retrying")
            }
        }
    }

    fn finish(&mut self, thread: ConnectThread, user: &mut impl NodeUser) {
        let Ok((node, outcome)) = thread.join() else { return };
        let added: Result<(), JoinError> =
            outcome.map_err(JoinError::from).and_then(|endpoint| Ok(user.add_node(node, endpoint)?));
        if let Err(error) = added {
            tracing::debug!(node = node.0, %error, "cannot add memory node yet; retrying");
            self.failed.push((node, Instant::now()));
        }
    }
}
