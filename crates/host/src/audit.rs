//! Gives back what this host has of the pool without anybody here knowing of it: what an agent before this one had taken and could not write down, and what
//! was left on nodes that runs had to give up and that live on.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use aquifer_fabric::Tenant;
use aquifer_pool::op::Recovered;
use aquifer_pool::{NodeId, PoolError, ScanProgress};

use crate::nodes::Nodes;

const TICK: Duration = Duration::from_millis(100);
/// A node is audited twice: what was given up was perhaps noted a little longer.
const AGAIN_AFTER: Duration = Duration::from_secs(10);
/// A node that cannot be audited, or is dead, is tried again after so long.
const RETRY_AFTER: Duration = Duration::from_secs(5);
/// What others have begun is looked at again so often, with a short wait in between.
const LOOKS_MAX: u32 = 200;
const LOOK_EVERY: Duration = Duration::from_millis(10);

/// A thread that audits nodes in doubt, until this is dropped.
#[derive(Debug)]
pub struct Audits {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Audits {
    /// Audit nodes from now on, and each that there is or will be once if an agent before this one may have left something. Whoever has extents by now must have entered
    /// what it has.
    ///
    /// # Errors
    /// If there is no thread.
    pub fn start(nodes: Arc<Nodes>, tenant: Tenant, doubts_all: bool) -> std::io::Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let met = doubts_all.then(BTreeSet::new);
        let mut auditor = Auditor { nodes, tenant, stop: Arc::clone(&stop), due: BTreeMap::new(), met };
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
    /// Nodes that were there at some time, if each is to be audited when it is met first.
    met: Option<BTreeSet<NodeId>>,
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
            let now = Instant::now();
            let listed = self.nodes.list();
            let mut doubtful = self.nodes.leak_detector().pop_suspects();
            if let Some(met) = &mut self.met {
                doubtful.extend(listed.iter().copied().filter(|node| met.insert(*node)));
            }
            for node in doubtful {
                self.due.insert(node, Due { at: now, times: 2 });
            }
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
                        "what nobody here knew of, or what rested, was given back"
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
    pool.add_node(node, nodes.connect_without_waiting(node, tenant)?)?;
    let go_on = |pause| {
        let is_patient = match pause {
            ScanProgress::NextPart => true,
            ScanProgress::Waiting { attempt } => {
                std::thread::park_timeout(LOOK_EVERY);
                attempt < LOOKS_MAX
            }
        };
        is_patient && !stop.load(Relaxed)
    };
    nodes.leak_detector().scan(&mut pool, node, go_on)?.ok_or(AuditError::UnderWay)
}
