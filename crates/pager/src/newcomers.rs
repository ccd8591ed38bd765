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
const LOOK_EVERY: Duration = Duration::from_millis(250);
/// One that did not let us in is left alone for so long.
const RETRY_AFTER: Duration = Duration::from_secs(1);

/// A thread that connects to a node: one that stands still would keep the sender.
type Knock = JoinHandle<(NodeId, Result<Box<dyn Endpoint>, EndpointError>)>;

/// After a restart: nodes that slabs are on, and that did not answer just now, are asked once more, and waited for if their memory is kept. What is on others is given up.
pub(crate) fn reach(filler: &Filler, pool: &mut PoolClient, connector: &dyn Connector) {
    for node in filler.nodes() {
        if pool.nodes().any(|other| other == node) {
            continue;
        }
        let endpoint = connector.connect(node).and_then(|_| connector.connect_promptly(node));
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
pub struct Newcomers {
    connector: Arc<dyn Connector>,
    looked: Instant,
    knock: Option<Knock>,
    /// Who did not let us in, and when.
    closed: Vec<(NodeId, Instant)>,
}

impl Newcomers {
    /// Nodes are reached by `connector`.
    #[must_use]
    pub fn new(connector: Arc<dyn Connector>) -> Self {
        Self { connector, looked: Instant::now(), knock: None, closed: Vec::new() }
    }

    /// Take in who has let us in; else knock at the next of `nodes` that the sender does not know, if it is time. May be called at any rate.
    pub fn take_in(&mut self, sender: &mut Sender, nodes: impl FnOnce() -> Vec<NodeId>) {
        if let Some(knock) = self.knock.take_if(|knock| knock.is_finished()) {
            self.answered(knock, sender);
        }
        if self.knock.is_some() || self.looked.elapsed() < LOOK_EVERY {
            return;
        }
        self.looked = Instant::now();
        self.closed.retain(|(_, since)| since.elapsed() < RETRY_AFTER);
        let is_new =
            |node: &NodeId| !sender.knows(*node) && self.closed.iter().all(|(closed, _)| closed != node);
        let Some(node) = nodes().into_iter().find(is_new) else { return };
        let connector = Arc::clone(&self.connector);
        let knock = move || (node, connector.connect_promptly(node));
        match std::thread::Builder::new().name("newcomer".into()).spawn(knock) {
            Ok(knock) => self.knock = Some(knock),
            Err(error) => tracing::warn!(%error, "no thread to connect to a memory node"),
        }
    }

    fn answered(&mut self, knock: Knock, sender: &mut Sender) {
        let Ok((node, outcome)) = knock.join() else { return };
        let taken = match outcome {
            Ok(endpoint) => sender.take_in(node, endpoint).map_err(|error| error.to_string()),
            Err(error) => Err(error.to_string()),
        };
        if let Err(error) = taken {
            tracing::debug!(node = node.0, error, "a memory node cannot be taken in yet");
            self.closed.push((node, Instant::now()));
        }
    }
}
