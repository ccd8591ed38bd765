//! Lent and free memory of each memory node, by its last answer.
//!
//! One thread queries the nodes. A request for the status waits for new answers for at most a
//! second, and otherwise returns the last ones.

use std::collections::HashMap;
use std::io;
use std::sync::{Arc, Weak};
use std::time::{Duration, UNIX_EPOCH};

use aquifer_host::nodes::NodeRegistry;
use aquifer_pool::NodeId;
use aquifer_report::{MissingNode, NodeStatus};
use parking_lot::{Condvar, Mutex};

/// Timeout of a request's wait for new answers of the nodes.
const ANSWERS_TIMEOUT: Duration = Duration::from_secs(1);
/// Interval at which the thread checks whether the registry still exists.
const TICK: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub(crate) struct NodeWatch {
    shared: Arc<Shared>,
    nodes: Weak<NodeRegistry>,
}

#[derive(Debug, Default)]
struct Shared {
    answers: Mutex<Answers>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Answers {
    /// The last answers, by the number of the node.
    last: HashMap<u16, NodeStatus>,
    /// Number of rounds that have begun. A round that runs when a request arrives may have read old
    /// words, so the request waits for the next one.
    begun: u64,
    /// Number of the last round that has finished.
    finished: u64,
    is_wanted: bool,
}

impl NodeWatch {
    /// Starts the thread, which ends with the registry.
    pub(crate) fn start(nodes: &Arc<NodeRegistry>) -> io::Result<Self> {
        let shared = Arc::new(Shared::default());
        let (for_thread, weak) = (Arc::clone(&shared), Arc::downgrade(nodes));
        let run = move || {
            while let Some(nodes) = weak.upgrade() {
                if for_thread.begin_round() {
                    for_thread.query(&nodes);
                }
            }
        };
        std::thread::Builder::new().name("node-watch".into()).spawn(run)?;
        Ok(Self { shared, nodes: Arc::downgrade(nodes) })
    }

    /// The registered nodes with their last answers, which are new if the nodes answer in time.
    pub(crate) fn nodes(&self) -> Vec<NodeStatus> {
        let Some(nodes) = self.nodes.upgrade() else { return Vec::new() };
        let mut answers = self.shared.answers.lock();
        answers.is_wanted = true;
        let wanted = answers.begun + 1;
        self.shared.changed.notify_all();
        let must_wait = |answers: &mut Answers| answers.finished < wanted;
        let _late = self.shared.changed.wait_while_for(&mut answers, must_wait, ANSWERS_TIMEOUT);
        let unknown = |id| NodeStatus { id, memory_bytes: 0, free_bytes: 0, is_disk: false, failure: None };
        let status = |node: NodeId| {
            let last = answers.last.get(&node.0).cloned().unwrap_or_else(|| unknown(node.0));
            NodeStatus { failure: nodes.failure_of(node), ..last }
        };
        nodes.list().into_iter().map(status).collect()
    }
}

impl NodeWatch {
    /// The nodes that have left the directory since the agent's start.
    pub(crate) fn missing_nodes(&self) -> Vec<MissingNode> {
        let missing = self.nodes.upgrade().map(|nodes| nodes.missing()).unwrap_or_default();
        let now_s = UNIX_EPOCH.elapsed().map_or(0, |now| now.as_secs());
        let node = |(node, elapsed): (NodeId, Duration)| MissingNode {
            id: node.0,
            since_s: now_s.saturating_sub(elapsed.as_secs()),
        };
        missing.into_iter().map(node).collect()
    }
}

impl Shared {
    /// Waits until a round is wanted; false after [`TICK`].
    fn begin_round(&self) -> bool {
        let mut answers = self.answers.lock();
        let _timeout = self.changed.wait_while_for(&mut answers, |answers| !answers.is_wanted, TICK);
        let begins = std::mem::take(&mut answers.is_wanted);
        answers.begun += u64::from(begins);
        begins
    }

    /// Queries all nodes, one after the other.
    fn query(&self, nodes: &NodeRegistry) {
        let mut pool = nodes.pool_client(rustix::process::geteuid().as_raw());
        let numbers: Vec<_> = pool.nodes().collect();
        for node in numbers {
            if let Err(error) = pool.refresh(node) {
                tracing::debug!(node = node.0, %error, "reading the free memory of a memory node failed");
                continue;
            }
            let status = NodeStatus {
                id: node.0,
                memory_bytes: pool.total_bytes(node),
                free_bytes: pool.free_bytes(node),
                is_disk: pool.is_disk(node),
                failure: None,
            };
            self.answers.lock().last.insert(node.0, status);
        }
        let mut answers = self.answers.lock();
        answers.finished = answers.begun;
        self.changed.notify_all();
    }
}
