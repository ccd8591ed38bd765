//! Keeps the figures of all memory nodes up to date: a thread READs them once a second.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use aquifer_pager::{Connector, NodeJoiner};
use aquifer_pool::{AnswerTimeout, Clock, NodeId, PoolClient, PoolError};

use super::{EndpointPurpose, NodeRegistry};

/// Interval between two READs of a node's figures.
const READ_INTERVAL: Duration = Duration::from_secs(1);
/// Interval at which the thread connects to new nodes, and checks whether it must stop.
const TICK: Duration = Duration::from_millis(250);
/// Time without an answer after which a node counts as away, so that the others are not delayed.
const ANSWER_TIMEOUT: Duration = Duration::from_millis(200);

/// The clock by which the answers of nodes are awaited.
#[derive(Debug)]
struct SystemClock(Instant);

impl Clock for SystemClock {
    fn now(&self) -> Duration {
        self.0.elapsed()
    }
}

/// Reads the figures of all nodes, over connections of its own.
pub(crate) struct FigureReader {
    nodes: Arc<NodeRegistry>,
    pool: PoolClient,
    joiner: NodeJoiner,
    read_at: Option<Instant>,
}

impl FigureReader {
    /// Creates a reader of the nodes of a registry.
    pub fn new(nodes: &Arc<NodeRegistry>) -> Self {
        let tenant = nodes.identity.tenant;
        let mut pool = nodes.unconnected_client(tenant);
        let clock = Arc::new(SystemClock(Instant::now()));
        pool.set_answer_timeout(AnswerTimeout { time: ANSWER_TIMEOUT, clock });
        let connector: Arc<dyn Connector> = nodes.connector(tenant.0, EndpointPurpose::Allocate);
        Self { nodes: Arc::clone(nodes), pool, joiner: NodeJoiner::new(connector), read_at: None }
    }

    /// Reads until `stop` is set.
    pub fn run(mut self, stop: &AtomicBool) {
        while !stop.load(Relaxed) {
            self.turn();
            std::thread::sleep(TICK);
        }
    }

    /// Connects to new nodes, and reads all figures if they are due.
    fn turn(&mut self) {
        let nodes = Arc::clone(&self.nodes);
        self.joiner.poll(&mut self.pool, || nodes.list());
        if self.read_at.is_some_and(|at| at.elapsed() < READ_INTERVAL) {
            return;
        }
        self.read_at = Some(Instant::now());
        self.pool.maintain();
        let present = nodes.list();
        for node in self.pool.nodes().collect::<Vec<_>>() {
            if !present.contains(&node) {
                self.leave(node);
                continue;
            }
            match self.pool.read_figures(node) {
                Ok(Some(figures)) => nodes.figures.set(node, figures),
                // The node was writing them. The last ones are good enough for another second.
                Ok(None) => {}
                Err(PoolError::Away { .. }) => nodes.figures.forget(node),
                Err(error) => {
                    tracing::debug!(node = node.0, %error, "reading the figures of a memory node failed");
                    self.leave(node);
                }
            }
        }
    }

    fn leave(&mut self, node: NodeId) {
        self.pool.remove_node(node);
        self.nodes.figures.forget(node);
    }
}
