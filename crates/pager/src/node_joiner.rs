//! Memory nodes that come while a run goes on, or come back, are taken in by its sender.

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use aquifer_fabric::{Endpoint, EndpointError};
use aquifer_pool::{NodeId, PoolClient};

use crate::filler::Filler;
use crate::ports::Connector;
use crate::sender::Sender;

/// How often to look for nodes.
const SEARCH_INTERVAL: Duration = Duration::from_millis(250);
/// One that did not let us in is left alone for so long.
const RETRY_AFTER: Duration = Duration::from_secs(1);

/// A thread that connects to a node: one that stands still would keep the sender.
type ConnectThread = JoinHandle<(NodeId, Result<Box<dyn Endpoint>, EndpointError>)>;

/// After a restart: nodes that slabs are on, and that did not answer just now, are asked once more, and waited for if their memory is kept. What is on others is given up.
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
            tracing::debug!(node = node.0, error, "a memory node that slabs are on does not answer");
        }
    }
}

/// Who looks for nodes that a sender does not know.
#[derive(Debug)]
pub struct NodeJoiner {
    connector: Arc<dyn Connector>,
    last_search: Instant,
    connecting: Option<ConnectThread>,
    /// Who did not let us in, and when.
    refused: Vec<(NodeId, Instant)>,
}

impl NodeJoiner {
    /// Nodes are reached by `connector`.
    #[must_use]
    pub fn new(connector: Arc<dyn Connector>) -> Self {
        Self { connector, last_search: Instant::now(), connecting: None, refused: Vec::new() }
    }

    /// Take in who has let us in; else connecting at the next of `nodes` that the sender does not know, if it is time. May be called at any rate.
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
            Err(error) => tracing::warn!(%error, "no thread to connect to a memory node"),
        }
    }

    fn finish(&mut self, connecting: ConnectThread, sender: &mut Sender) {
        let Ok((node, outcome)) = connecting.join() else { return };
        let taken = match outcome {
            Ok(endpoint) => sender.add_node(node, endpoint).map_err(|error| error.to_string()),
            Err(error) => Err(error.to_string()),
        };
        if let Err(error) = taken {
            tracing::debug!(node = node.0, error, "a memory node cannot be taken in yet");
            self.refused.push((node, Instant::now()));
        }
    }
}
