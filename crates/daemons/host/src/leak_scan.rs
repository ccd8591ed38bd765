//! Scans memory nodes for leaked extents of this host: extents that the node records as this host's
//! and that no ledger of the host names.
//!
//! Extents leak if an agent was killed between the CAS that allocated them and its own record, and
//! if a run has dropped a node that did not answer and was still alive.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use aquifer_fabric::Tenant;
use aquifer_pool::op::Recovered;
use aquifer_pool::{NodeId, PoolError, ScanProgress};

use crate::nodes::NodeRegistry;

/// Interval between checks for scans that are due.
const TICK: Duration = Duration::from_millis(100);
/// Number of scans of a suspect node. The second one finds extents whose ledger entries were
/// removed a little later than the first one ran.
const SCANS: u32 = 2;
/// Time from the first scan of a node to the second.
const SECOND_SCAN_DELAY: Duration = Duration::from_secs(10);
/// Time from a failed scan to the next attempt.
const RETRY_DELAY: Duration = Duration::from_secs(5);
/// Maximum number of polls for the end of operations that were in flight when the scan began.
const POLLS_MAX: u32 = 200;
/// Interval between these polls.
const POLL_INTERVAL: Duration = Duration::from_millis(10);

/// A thread that scans suspect nodes. The thread ends when this is dropped.
#[derive(Debug)]
pub struct LeakScanner {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl LeakScanner {
    /// Starts the thread. With `suspects_all` it also scans each node when it is first present,
    /// because an earlier agent of this host may have leaked extents there.
    ///
    /// Extents that this host owns now must be in their ledgers: the scan frees all others.
    ///
    /// # Errors
    /// If the thread cannot be started.
    pub fn start(nodes: Arc<NodeRegistry>, tenant: Tenant, suspects_all: bool) -> std::io::Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let seen = suspects_all.then(BTreeSet::new);
        let mut worker =
            LeakScanWorker { nodes, tenant, stop: Arc::clone(&stop), schedule: BTreeMap::new(), seen };
        let thread = std::thread::Builder::new().name("leak-scan".into()).spawn(move || worker.run())?;
        Ok(Self { stop, thread: Some(thread) })
    }
}

impl Drop for LeakScanner {
    fn drop(&mut self) {
        self.stop.store(true, Relaxed);
        if self.thread.take().is_some_and(|thread| thread.join().is_err()) {
            tracing::error!("the leak scan thread panicked");
        }
    }
}

/// The time of a node's next scan, and the number of scans that are left.
#[derive(Clone, Copy)]
struct ScheduledScan {
    at: Instant,
    scans_left: u32,
}

struct LeakScanWorker {
    nodes: Arc<NodeRegistry>,
    tenant: Tenant,
    stop: Arc<AtomicBool>,
    schedule: BTreeMap<NodeId, ScheduledScan>,
    /// Nodes that were present at some time; `None` if nodes are not scanned when they are first
    /// present.
    seen: Option<BTreeSet<NodeId>>,
}

/// Why a scan has failed.
#[derive(Debug, thiserror::Error)]
enum LeakScanError {
    #[error("the node cannot be reached: {0}")]
    Unreachable(#[from] aquifer_fabric::EndpointError),
    #[error(transparent)]
    Pool(#[from] PoolError),
    #[error("operations that were in flight when the scan began have not ended")]
    OperationsInFlight,
}

impl LeakScanWorker {
    fn run(&mut self) {
        while !self.stop.load(Relaxed) {
            let now = Instant::now();
            let present = self.nodes.list();
            let mut suspects = self.nodes.leak_detector().pop_suspects();
            if let Some(seen) = &mut self.seen {
                suspects.extend(present.iter().copied().filter(|node| seen.insert(*node)));
            }
            for node in suspects {
                self.schedule.insert(node, ScheduledScan { at: now, scans_left: SCANS });
            }
            let is_due = |(node, scan): (&NodeId, &ScheduledScan)| {
                (scan.at <= now && present.contains(node)).then_some(*node)
            };
            let due: Vec<NodeId> = self.schedule.iter().filter_map(is_due).collect();
            for node in due {
                self.scan(node);
            }
            std::thread::park_timeout(TICK);
        }
    }

    fn scan(&mut self, node: NodeId) {
        let Some(scheduled) = self.schedule.get_mut(&node) else { return };
        match scan(&self.nodes, self.tenant, &self.stop, node) {
            Ok(found) => {
                if found != Recovered::default() {
                    let Recovered { extents, chunks, spans, .. } = found;
                    tracing::info!(node = node.0, extents, chunks, spans, "freed leaked extents");
                }
                scheduled.scans_left -= 1;
                scheduled.at = Instant::now() + SECOND_SCAN_DELAY;
                if scheduled.scans_left == 0 {
                    self.schedule.remove(&node);
                }
            }
            Err(error) => {
                if scheduled.scans_left == SCANS {
                    tracing::debug!(node = node.0, %error, "leak scan failed; retrying");
                }
                scheduled.at = Instant::now() + RETRY_DELAY;
            }
        }
    }
}

/// Scans one node and frees the leaked extents. Returns their numbers.
fn scan(
    nodes: &NodeRegistry,
    tenant: Tenant,
    stop: &AtomicBool,
    node: NodeId,
) -> Result<Recovered, LeakScanError> {
    let mut pool = nodes.unconnected_client(tenant);
    pool.add_node(node, nodes.connect_without_waiting(node, tenant)?)?;
    let continues = |progress| {
        let is_within_limit = match progress {
            ScanProgress::NextPart => true,
            ScanProgress::Waiting { attempt } => {
                std::thread::park_timeout(POLL_INTERVAL);
                attempt < POLLS_MAX
            }
        };
        is_within_limit && !stop.load(Relaxed)
    };
    nodes.leak_detector().scan(&mut pool, node, continues)?.ok_or(LeakScanError::OperationsInFlight)
}
