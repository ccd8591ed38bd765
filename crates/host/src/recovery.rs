//! Gives back what dead hosts held, whichever host notices first.
//!
//! A host is dead when its lease is gone. Whoever recovers it takes its number under a lease of its own: so nobody else does at
//! the same time, memory nodes refuse whatever the dead one still has under way, and if the recoverer dies too, the number is
//! free to be recovered again.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use aquifer_directory::names::{self, AgentRecord, HolderRecord, NodeLife};
use aquifer_directory::{Directory, DirectoryError, Lease};
use aquifer_fabric::{Host, Identity, Tenant};
use aquifer_pool::op::Recovered;
use aquifer_pool::{NodeId, PoolError, recover_node};

use crate::nodes::Nodes;

/// How long a recoverer that says nothing keeps others from recovering.
const LEASE_TTL: Duration = Duration::from_secs(15);
/// How often the directory is asked who is dead.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// After a try that failed: each takes a lease, and is written down.
const RETRY_EVERY: Duration = Duration::from_secs(10);
const TICK: Duration = Duration::from_millis(100);

/// A thread that looks for dead hosts, until this is dropped. The node that it is at then is finished, the rest is left for others.
#[derive(Debug)]
pub struct Recovery {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Recovery {
    /// Look for dead hosts from now on; `tenant` is who this agent works for.
    ///
    /// # Errors
    /// If there is no thread.
    pub fn start(
        directory: Arc<dyn Directory>,
        nodes: Arc<Nodes>,
        by: AgentRecord,
        tenant: Tenant,
    ) -> std::io::Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let recoverer = Recoverer { directory, nodes, by, tenant, stop: Arc::clone(&stop) };
        let thread = std::thread::Builder::new().name("recovery".into()).spawn(move || recoverer.watch())?;
        Ok(Self { stop, thread: Some(thread) })
    }
}

impl Drop for Recovery {
    fn drop(&mut self) {
        self.stop.store(true, Relaxed);
        if self.thread.take().is_some_and(|thread| thread.join().is_err()) {
            tracing::error!("the thread of recovery has panicked");
        }
    }
}

struct Recoverer {
    directory: Arc<dyn Directory>,
    nodes: Arc<Nodes>,
    by: AgentRecord,
    tenant: Tenant,
    stop: Arc<AtomicBool>,
}

/// A dead host, as long as it is not recovered.
struct Seen {
    claim_epoch: u64,
    since: Instant,
    /// When it was tried last, in vain.
    failed: Option<Instant>,
}

/// Why a host is not recovered yet.
#[derive(Debug, thiserror::Error)]
enum RecoverError {
    #[error(transparent)]
    Directory(#[from] DirectoryError),
    #[error("memory node {0} cannot be reached: {1}")]
    Unreachable(u16, aquifer_fabric::EndpointError),
    #[error(transparent)]
    Pool(#[from] PoolError),
    #[error("this agent is stopping")]
    Stopped,
}

/// Memory that a dead host may hold.
#[derive(Default)]
struct Whereabouts {
    present: Vec<NodeLife>,
    /// Of nodes that are not there.
    absent: Vec<NodeLife>,
    /// In how many lives it may be, if others have given back what was elsewhere.
    was_known: Option<usize>,
}

impl Whereabouts {
    /// Whether there is something to be done.
    fn is_hopeful(&self) -> bool {
        !self.present.is_empty() || self.was_known.is_none_or(|count| count > self.absent.len())
    }
}

impl Recoverer {
    fn watch(&self) {
        let mut is_silent = false;
        let mut seen = BTreeMap::new();
        while !self.stop.load(Relaxed) {
            match names::dead_hosts(&*self.directory) {
                Ok(dead) => {
                    is_silent = false;
                    seen.retain(|host, _| dead.iter().any(|dead| dead.host == *host));
                    for dead in &dead {
                        let new =
                            || Seen { claim_epoch: dead.claim_epoch, since: Instant::now(), failed: None };
                        self.try_recover(dead, seen.entry(dead.host).or_insert_with(new));
                    }
                }
                Err(error) if !is_silent => {
                    tracing::warn!(%error, "the directory does not say which hosts are dead; trying again");
                    is_silent = true;
                }
                Err(_) => {}
            }
            let mut waited = Duration::ZERO;
            while waited < LOOK_EVERY && !self.stop.load(Relaxed) {
                std::thread::sleep(TICK);
                waited += TICK;
            }
        }
    }

    fn try_recover(&self, dead: &HolderRecord, seen: &mut Seen) {
        if seen.claim_epoch != dead.claim_epoch {
            // It is another's death.
            (seen.claim_epoch, seen.since) = (dead.claim_epoch, Instant::now());
        }
        // Another agent may still come for what it holds.
        let is_awaited = seen.since.elapsed() < Duration::from_millis(dead.grace_ms);
        let is_hopeless = seen.failed.is_some_and(|failed| failed.elapsed() < RETRY_EVERY);
        if is_awaited || is_hopeless || self.stop.load(Relaxed) {
            return;
        }
        match self.recover(dead) {
            Ok(found) if found == Recovered::default() => {
                tracing::debug!(host = dead.host, "a host has ended, and held nothing");
            }
            Ok(Recovered { extents, chunks, spans, unowned }) => {
                tracing::info!(
                    host = dead.host,
                    extents,
                    chunks,
                    spans,
                    "what a dead host held was given back"
                );
                if unowned > 0 {
                    tracing::error!(
                        host = dead.host,
                        unowned,
                        "nothing tells whose some memory is: the nodes' logs are damaged"
                    );
                }
            }
            // Another was faster, or it has come back.
            Err(RecoverError::Directory(DirectoryError::Taken { .. })) => {}
            Err(error) if seen.failed.replace(Instant::now()).is_none() => {
                tracing::warn!(host = dead.host, %error, "a dead host is not recovered yet; trying again");
            }
            Err(error) => tracing::debug!(host = dead.host, %error, "a dead host is not recovered yet"),
        }
    }

    fn recover(&self, dead: &HolderRecord) -> Result<Recovered, RecoverError> {
        if !self.whereabouts(dead)?.is_hopeful() {
            return Err(DirectoryError::Taken { key: names::holder_key(dead.host) }.into());
        }
        let lease = self.directory.lease_grant(LEASE_TTL)?;
        let outcome = self.recover_under(lease, dead);
        // If it went well there is nothing under the lease any more; if not, the next may try at once.
        if let Err(error) = self.directory.lease_revoke(lease.id) {
            tracing::debug!(%error, "a lease ends by itself");
        }
        outcome
    }

    fn recover_under(&self, lease: Lease, dead: &HolderRecord) -> Result<Recovered, RecoverError> {
        let address = format!("recovered by host {}", self.by.host);
        let record = names::claim_dead_host(&*self.directory, lease, dead, &address)?;
        let who = Identity { host: Host(record.host), epoch: record.epoch, tenant: self.tenant };
        let Whereabouts { present, absent, .. } = self.whereabouts(dead)?;
        self.nodes.list_anew()?;
        let mut found = Recovered::default();
        let mut failed = None;
        self.while_alive(lease, || {
            for life in present {
                match self.recover_at(NodeId(life.node), who) {
                    Ok(there) => found.add(there),
                    // The others' first.
                    Err(error) => failed = failed.take().or(Some(error)),
                }
                if self.stop.load(Relaxed) {
                    failed = failed.take().or(Some(RecoverError::Stopped));
                    return;
                }
            }
        });
        if let Some(error) = failed {
            return Err(error);
        }
        if !absent.is_empty() {
            let nodes: Vec<u16> = absent.iter().map(|life| life.node).collect();
            tracing::warn!(
                host = dead.host,
                ?nodes,
                "what a dead host held of nodes that are not there is given back if they return"
            );
        }
        names::finish_recovery(&*self.directory, &record, absent)?;
        Ok(found)
    }

    /// Do something, however long it takes, while the lease is kept.
    fn while_alive(&self, lease: Lease, work: impl FnOnce()) {
        let is_over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut kept = Instant::now();
                while !is_over.load(Relaxed) {
                    std::thread::sleep(TICK);
                    if kept.elapsed() >= LEASE_TTL / 5 {
                        kept = Instant::now();
                        if let Err(error) = self.directory.lease_keep_alive(lease.id) {
                            tracing::debug!(%error, "the lease of a recovery is not kept");
                        }
                    }
                }
            });
            work();
            is_over.store(true, Relaxed);
        });
    }

    /// Where something of a dead host may be left.
    fn whereabouts(&self, dead: &HolderRecord) -> Result<Whereabouts, DirectoryError> {
        let lives = names::lives(&*self.directory)?;
        // In this order: a node that is there has written down its memory before.
        let there = names::nodes(&*self.directory)?;
        let mut places =
            Whereabouts { was_known: dead.remaining_lives.as_ref().map(Vec::len), ..Whereabouts::default() };
        for life in lives {
            if dead
                .remaining_lives
                .as_ref()
                .is_some_and(|remaining| !remaining.iter().any(|other| other.is_same(&life)))
            {
                continue;
            }
            match there.iter().find(|node| node.id == life.node) {
                Some(node) if node.epoch == life.epoch => places.present.push(life),
                // Its memory of then is gone.
                Some(_) => {}
                None => places.absent.push(life),
            }
        }
        Ok(places)
    }

    /// The new epoch fences the dead host as soon as the node hears of it, which is before the node answers.
    fn recover_at(&self, node: NodeId, who: Identity) -> Result<Recovered, RecoverError> {
        recover_node(node, who.host, who.tenant, &|| {
            self.nodes.connect_as(node, who).map_err(|error| RecoverError::Unreachable(node.0, error))
        })
    }
}
