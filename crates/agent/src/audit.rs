//! Gives back what this host has of the pool without anybody here knowing of it: what an agent before this one had taken and could not write down, and what
//! was left on nodes that runs had to give up and that live on.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use aquifer_fabric::Tenant;
use aquifer_pool::op::Recovered;
use aquifer_pool::{NodeId, PoolError};

use crate::nodes::Nodes;

const TICK: Duration = Duration::from_millis(100);
/// A node is audited twice: what was given up was perhaps noted a little longer.
const AGAIN_AFTER: Duration = Duration::from_secs(10);
/// A node that cannot be audited, or is dead, is tried again after so long.
const RETRY_AFTER: Duration = Duration::from_secs(5);
/// What was begun is waited for so long at a time.
const PATIENCE: Duration = Duration::from_secs(2);

/// A thread that audits nodes in doubt, until this is dropped.
#[derive(Debug)]
pub struct Audits {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Audits {
    /// Audit nodes from now on, and all of them once if an agent before this one may have left something. Whoever has extents by now must have entered
    /// what it has.
    ///
    /// # Errors
    /// If there is no thread.
    pub fn start(nodes: Arc<Nodes>, tenant: Tenant, doubts_all: bool) -> std::io::Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let mut auditor = Auditor { nodes, tenant, stop: Arc::clone(&stop), due: BTreeMap::new() };
        if doubts_all {
            auditor.nodes.list().into_iter().for_each(|node| auditor.nodes.custody().doubt(node));
        }
        let thread = std::thread::Builder::new().name("audit".into()).spawn(move || auditor.run())?;
        Ok(Self { stop, thread: Some(thread) })
    }
}

impl Drop for Audits {
    fn drop(&mut self) {
        self.stop.store(true, Relaxed);
        if self.thread.take().is_some_and(|thread| thread.join().is_err()) {
            tracing::error!("the thread of audits has panicked");
        }
    }
}

/// When a node is to be audited, and how often yet.
#[derive(Clone, Copy)]
struct Due {
    at: Instant,
    times: u32,
}

struct Auditor {
    nodes: Arc<Nodes>,
    tenant: Tenant,
    stop: Arc<AtomicBool>,
    due: BTreeMap<NodeId, Due>,
}

/// Why a node is not audited yet.
#[derive(Debug, thiserror::Error)]
enum AuditError {
    #[error("it cannot be reached: {0}")]
    Unreachable(#[from] aquifer_fabric::EndpointError),
    #[error(transparent)]
    Pool(#[from] PoolError),
    #[error("something that was begun there does not end")]
    UnderWay,
}

impl Auditor {
    fn run(&mut self) {
        while !self.stop.load(Relaxed) {
            for node in self.nodes.custody().take_doubtful() {
                self.due.insert(node, Due { at: Instant::now(), times: 2 });
            }
            let now = Instant::now();
            let listed = self.nodes.list();
            let is_due =
                |(node, due): (&NodeId, &Due)| (due.at <= now && listed.contains(node)).then_some(*node);
            let due: Vec<NodeId> = self.due.iter().filter_map(is_due).collect();
            for node in due {
                self.audit(node);
            }
            std::thread::park_timeout(TICK);
        }
    }

    fn audit(&mut self, node: NodeId) {
        let Some(due) = self.due.get_mut(&node) else { return };
        let is_first = due.times == 2;
        match look(&self.nodes, self.tenant, &self.stop, node) {
            Ok(found) => {
                if found != Recovered::default() {
                    let Recovered { extents, chunks, spans, .. } = found;
                    tracing::info!(
                        node = node.0,
                        extents,
                        chunks,
                        spans,
                        "what nobody here knew of was given back"
                    );
                }
                due.times -= 1;
                due.at = Instant::now() + AGAIN_AFTER;
                if due.times == 0 {
                    self.due.remove(&node);
                }
            }
            Err(error) => {
                if is_first {
                    tracing::debug!(node = node.0, %error, "a memory node is not audited yet");
                }
                due.at = Instant::now() + RETRY_AFTER;
            }
        }
    }
}

fn look(nodes: &Nodes, tenant: Tenant, stop: &AtomicBool, node: NodeId) -> Result<Recovered, AuditError> {
    let mut pool = nodes.client(tenant);
    pool.add_node(node, nodes.connect(node, tenant)?)?;
    let began = Instant::now();
    let pause = || {
        std::thread::park_timeout(TICK / 10);
        !stop.load(Relaxed) && began.elapsed() < PATIENCE
    };
    nodes.custody().audit(&mut pool, node, pause)?.ok_or(AuditError::UnderWay)
}
