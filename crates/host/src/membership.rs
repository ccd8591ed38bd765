//! A host's place in the cluster: a host number under a lease, and an eye on the memory nodes.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::thread::JoinHandle;
use std::time::Duration;

use aquifer_directory::names::{self, AgentRecord};
use aquifer_directory::{Directory, DirectoryError, Lease};
use aquifer_fabric::Host;

use crate::nodes::Nodes;

/// How long a host that says nothing keeps its memory. Its programs' pages are lost after that, so it is not short.
const LEASE_TTL: Duration = Duration::from_secs(15);
const KEEP_ALIVE: Duration = Duration::from_secs(3);
const TICK: Duration = Duration::from_millis(100);

/// Why this host could not join.
#[derive(Debug, thiserror::Error)]
pub enum MembershipError {
    /// The directory.
    #[error("the agent cannot join the cluster: {0}")]
    Directory(#[from] DirectoryError),
    /// No thread.
    #[error("the agent has no thread to keep its lease: {0}")]
    Thread(std::io::Error),
}

/// What happened between the host and the directory.
#[derive(Debug, Default)]
pub struct LeaseEvents {
    /// Times that the lease was kept.
    pub renewals: AtomicU64,
    /// Times that it could not be.
    pub failures: AtomicU64,
}

/// A host number, kept alive by a thread.
#[derive(Debug)]
pub struct Membership {
    directory: Arc<dyn Directory>,
    lease: Lease,
    record: AgentRecord,
    stop: Arc<AtomicBool>,
    is_lost: Arc<AtomicBool>,
    lease_events: Arc<LeaseEvents>,
    threads: Vec<JoinHandle<()>>,
}

impl Membership {
    /// Take a host number, or that of an agent `before` this one, and announce the agent. For `grace` after the lease ends another agent may go on under the number.
    ///
    /// # Errors
    /// The directory's.
    pub fn join(
        directory: Arc<dyn Directory>,
        socket: &Path,
        before: Option<&AgentRecord>,
        grace: Duration,
    ) -> Result<Self, MembershipError> {
        let grace_ms = u64::try_from(grace.as_millis()).unwrap_or(u64::MAX);
        let lease = directory.lease_grant(LEASE_TTL)?;
        let record = match before {
            Some(before) => names::resume_host(&*directory, lease, before, grace_ms)?,
            None => names::claim_host(&*directory, lease, &socket.display().to_string(), grace_ms)?,
        };
        let stop = Arc::new(AtomicBool::new(false));
        let is_lost = Arc::new(AtomicBool::new(false));
        let lease_events = Arc::new(LeaseEvents::default());
        let keeper = {
            let (directory, stop, is_lost) =
                (Arc::clone(&directory), Arc::clone(&stop), Arc::clone(&is_lost));
            let events = Arc::clone(&lease_events);
            std::thread::Builder::new()
                .name("lease".into())
                .spawn(move || keep_alive(&*directory, lease, &stop, &is_lost, &events))
                .map_err(MembershipError::Thread)?
        };
        Ok(Self { directory, lease, record, stop, is_lost, lease_events, threads: vec![keeper] })
    }

    /// What the directory has of this agent.
    #[must_use]
    pub fn record(&self) -> &AgentRecord {
        &self.record
    }

    /// This host's number.
    #[must_use]
    pub fn host(&self) -> Host {
        Host(self.record.host)
    }

    /// The fencing epoch of its lease.
    #[must_use]
    pub fn epoch(&self) -> u64 {
        self.record.epoch
    }

    /// Whether the lease has ended under us: memory nodes then refuse this host, and its programs cannot go on.
    #[must_use]
    pub fn is_lost(&self) -> bool {
        self.is_lost.load(Relaxed)
    }

    /// How its lease fares.
    #[must_use]
    pub fn lease_events(&self) -> &Arc<LeaseEvents> {
        &self.lease_events
    }

    /// Learn the memory nodes there are, and from now on of those that come and go.
    ///
    /// # Errors
    /// The directory's.
    pub fn watch_nodes(&mut self, nodes: &Arc<Nodes>) -> Result<(), MembershipError> {
        let revision = nodes.list_anew()?;
        let (directory, stop, nodes) =
            (Arc::clone(&self.directory), Arc::clone(&self.stop), Arc::clone(nodes));
        let thread = std::thread::Builder::new()
            .name("node-watch".into())
            .spawn(move || watch(&*directory, &nodes, &stop, revision))
            .map_err(MembershipError::Thread)?;
        self.threads.push(thread);
        Ok(())
    }

    /// Give the number back.
    pub fn leave(mut self) {
        self.stop.store(true, Relaxed);
        for thread in self.threads.drain(..) {
            if thread.join().is_err() {
                tracing::error!("a thread of the membership has panicked");
            }
        }
        if let Err(error) = self.directory.lease_revoke(self.lease.id) {
            tracing::debug!(%error, "the lease ends by itself");
        }
    }
}

fn keep_alive(
    directory: &dyn Directory,
    lease: Lease,
    stop: &AtomicBool,
    is_lost: &AtomicBool,
    events: &LeaseEvents,
) {
    let mut waited = Duration::ZERO;
    while !stop.load(Relaxed) {
        std::thread::sleep(TICK);
        waited += TICK;
        if waited < KEEP_ALIVE {
            continue;
        }
        waited = Duration::ZERO;
        let kept = directory.lease_keep_alive(lease.id);
        let counter = if kept.is_ok() { &events.renewals } else { &events.failures };
        counter.fetch_add(1, Relaxed);
        match kept {
            Ok(()) => {}
            Err(DirectoryError::LeaseGone { .. }) => {
                tracing::error!("this host's lease has ended: memory nodes refuse it from now on");
                is_lost.store(true, Relaxed);
                return;
            }
            Err(error) => tracing::warn!(%error, "the directory does not hear us; trying again"),
        }
    }
}

fn watch(directory: &dyn Directory, nodes: &Nodes, stop: &AtomicBool, mut revision: u64) {
    while !stop.load(Relaxed) {
        if let Err(error) = follow(directory, nodes, stop, &mut revision) {
            tracing::warn!(%error, "the watch over memory nodes broke; listing them again");
            std::thread::sleep(TICK);
            match nodes.list_anew() {
                Ok(at) => revision = at,
                Err(error) => tracing::warn!(%error, "the directory cannot be reached"),
            }
        }
    }
}

fn follow(
    directory: &dyn Directory,
    nodes: &Nodes,
    stop: &AtomicBool,
    revision: &mut u64,
) -> Result<(), DirectoryError> {
    let mut watch = directory.watch(names::NODES, *revision + 1)?;
    while !stop.load(Relaxed) {
        if let Some(event) = watch.next(TICK)? {
            nodes.heed(&event);
            *revision = event.revision;
        }
    }
    Ok(())
}
