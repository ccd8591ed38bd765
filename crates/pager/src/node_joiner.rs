//! Adds memory nodes to the sender of a run: nodes that are new, and nodes that have returned.

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use aquifer_fabric::{Endpoint, EndpointError};
use aquifer_pool::{NodeId, PoolClient};

use crate::filler::Filler;
use crate::ports::Connector;
use crate::sender::Sender;

/// The interval at which the list of nodes is examined.
const SEARCH_INTERVAL: Duration = Duration::from_millis(250);
/// After a failed connection to a node it is left alone for this time.
const RETRY_AFTER: Duration = Duration::from_secs(1);

/// A thread that connects to one node. A node that does not answer must not block the sender.
type ConnectThread = JoinHandle<(NodeId, Result<Box<dyn Endpoint>, EndpointError>)>;

/// After a restart, connects once more to the nodes of recovered slabs that did not answer before.
///
/// Waits for a node whose memory is kept. Replicas on nodes that do not answer now are dropped by
/// [`Filler::adopt_recovered`].
pub(crate) fn connect_slab_nodes(filler: &Filler, pool: &mut PoolClient, connector: &dyn Connector) {
    for node in filler.nodes() {
        if pool.nodes().any(|other| other == node) {
            continue;
        }
        let endpoint = connector.connect(node).and_then(|_| connector.connect_without_waiting(node));
        let reached = endpoint.map_err(|error| error.to_string());
        if let Err(error) =
            reached.and_then(|endpoint| pool.add_node(node, endpoint).map_err(|error| error.to_string()))
        {
            tracing::debug!(node = node.0, error, "memory node with slabs of the run does not answer");
        }
    }
}

/// Connects a sender to memory nodes that it does not use yet.
#[derive(Debug)]
pub struct NodeJoiner {
    connector: Arc<dyn Connector>,
    last_search: Instant,
    connecting: Option<ConnectThread>,
    /// Nodes to which the connection failed, and when.
    refused: Vec<(NodeId, Instant)>,
}

impl NodeJoiner {
    /// No connection is in progress. Nodes are reached through `connector`.
    #[must_use]
    pub fn new(connector: Arc<dyn Connector>) -> Self {
        Self { connector, last_search: Instant::now(), connecting: None, refused: Vec::new() }
    }

    /// Adds a node whose connection is complete, or begins to connect to the first of `nodes` that
    /// the sender does not use. May be called at any rate.
    pub fn poll(&mut self, sender: &mut Sender, nodes: impl FnOnce() -> Vec<NodeId>) {
        if let Some(connecting) = self.connecting.take_if(|connecting| connecting.is_finished()) {
            self.finish(connecting, sender);
        }
        if self.connecting.is_some() || self.last_search.elapsed() < SEARCH_INTERVAL {
            return;
        }
        self.last_search = Instant::now();
        self.refused.retain(|(_, since)| since.elapsed() < RETRY_AFTER);
        let is_new = |node: &NodeId| {
            !sender.uses_node(*node) && self.refused.iter().all(|(refused, _)| refused != node)
        };
        let Some(node) = nodes().into_iter().find(is_new) else { return };
        let connector = Arc::clone(&self.connector);
        let connecting = move || (node, connector.connect_without_waiting(node));
        match std::thread::Builder::new().name("newcomer".into()).spawn(connecting) {
            Ok(connecting) => self.connecting = Some(connecting),
            Err(error) => {
                tracing::warn!(%error, "cannot start a thread to connect to a memory node; retrying")
            }
        }
    }

    fn finish(&mut self, connecting: ConnectThread, sender: &mut Sender) {
        let Ok((node, outcome)) = connecting.join() else { return };
        let taken = match outcome {
            Ok(endpoint) => sender.add_node(node, endpoint).map_err(|error| error.to_string()),
            Err(error) => Err(error.to_string()),
        };
        if let Err(error) = taken {
            tracing::debug!(node = node.0, error, "cannot add memory node yet; retrying");
            self.refused.push((node, Instant::now()));
        }
    }
}
