//! A host's membership in the cluster: a host number under a lease, and the watch over the memory
//! nodes.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use aquifer_channel::boot_time::BootInstant;
use aquifer_directory::names::{self, AgentRecord};
use aquifer_directory::{Directory, DirectoryError, DirectoryRetries, FailureLog, Lease};
use aquifer_fabric::Host;
use parking_lot::{Mutex, MutexGuard};

use crate::mutation::Mutation;
use crate::node_updates::NodeUpdates;
use crate::nodes::{FigureReader, NodeRegistry};

/// Lifetime of a host's lease without a keep-alive. Long, because at its end nodes fence the host,
/// and the host's programs wait for the next agent.
const LEASE_TTL: Duration = Duration::from_secs(15);
/// Interval between keep-alives.
const KEEP_ALIVE_INTERVAL: Duration = Duration::from_secs(3);
/// Interval between keep-alives while they fail, so that a short interruption of the network does
/// not end the lease.
const KEEP_ALIVE_RETRY_INTERVAL: Duration = Duration::from_millis(500);
/// Longest time for which a request to stop goes unnoticed.
const TICK: Duration = Duration::from_millis(100);

/// Why a host could not join the cluster.
#[derive(Debug, thiserror::Error)]
pub enum MembershipError {
    /// A request to the directory failed.
    #[error("this host cannot join the cluster: {0}")]
    Directory(#[from] DirectoryError),
    /// A thread could not be started.
    #[error("cannot start a thread that keeps this host's lease alive: {0}")]
    Thread(std::io::Error),
}

/// Lease keep-alives.
#[derive(Debug)]
pub struct LeaseEvents {
    /// The time when the last successful keep-alive was sent.
    renewed: Mutex<BootInstant>,
    /// Keep-alives that succeeded.
    pub renewals: AtomicU64,
    /// Keep-alives that failed.
    pub failures: AtomicU64,
}

impl LeaseEvents {
    fn new(granted: BootInstant) -> Self {
        Self { renewed: Mutex::new(granted), renewals: AtomicU64::new(0), failures: AtomicU64::new(0) }
    }

    fn renewed(&self) -> MutexGuard<'_, BootInstant> {
        self.renewed.lock()
    }

    /// Whether the lease is known to be valid: it was renewed within its lifetime.
    #[must_use]
    pub fn lasts(&self) -> bool {
        self.renewed().elapsed() < LEASE_TTL
    }
}

/// A host number under a lease that a thread keeps alive.
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
    /// Claims a host number, or that of `predecessor`, and puts the host's record into the
    /// directory.
    ///
    /// For `grace` after the end of the lease, other hosts do not recover this host, so that its
    /// next agent can claim the number again. `on_lease_end` is called when the directory says that
    /// the lease has ended.
    ///
    /// # Errors
    /// Those of the directory. [`DirectoryError::Taken`] if another host has claimed the number
    /// of `predecessor`.
    pub fn join(
        directory: Arc<dyn Directory>,
        socket: &Path,
        predecessor: Option<&AgentRecord>,
        grace: Duration,
        on_lease_end: impl FnOnce() + Send + 'static,
    ) -> Result<Self, MembershipError> {
        let grace_ms = u64::try_from(grace.as_millis()).unwrap_or(u64::MAX);
        let granted = BootInstant::now();
        let lease = directory.lease_grant(LEASE_TTL)?;
        let record = match predecessor {
            Some(predecessor) => names::resume_host(&*directory, lease, predecessor, grace_ms)?,
            None => names::claim_host(&*directory, lease, &socket.display().to_string(), grace_ms)?,
        };
        let stop = Arc::new(AtomicBool::new(false));
        let is_lost = Arc::new(AtomicBool::new(false));
        let lease_events = Arc::new(LeaseEvents::new(granted));
        let thread = {
            let (directory, stop, is_lost) =
                (Arc::clone(&directory), Arc::clone(&stop), Arc::clone(&is_lost));
            let events = Arc::clone(&lease_events);
            std::thread::Builder::new()
                .name("lease".into())
                .spawn(move || {
                    if keep_alive(&*directory, lease, &stop, &events).is_err() {
                        is_lost.store(true, Relaxed);
                        on_lease_end();
                    }
                })
                .map_err(MembershipError::Thread)?
        };
        Ok(Self { directory, lease, record, stop, is_lost, lease_events, threads: vec![thread] })
    }

    /// The directory of the cluster.
    #[must_use]
    pub fn directory(&self) -> &Arc<dyn Directory> {
        &self.directory
    }

    /// The host's record in the directory.
    #[must_use]
    pub fn record(&self) -> &AgentRecord {
        &self.record
    }

    /// The host's number.
    #[must_use]
    pub fn host(&self) -> Host {
        Host(self.record.host)
    }

    /// The host's lease.
    #[must_use]
    pub fn lease(&self) -> Lease {
        self.lease
    }

    /// The fencing epoch of this host's lease.
    #[must_use]
    pub fn epoch(&self) -> u64 {
        self.record.epoch
    }

    /// True once the lease has ended: memory nodes then refuse this host.
    #[must_use]
    pub fn is_lost(&self) -> bool {
        self.is_lost.load(Relaxed)
    }

    /// Counts of this host's lease keep-alives.
    #[must_use]
    pub fn lease_events(&self) -> &Arc<LeaseEvents> {
        &self.lease_events
    }

    /// Lists the memory nodes into `nodes`, and keeps it and the figures of the nodes up to date
    /// from two threads.
    ///
    /// # Errors
    /// Those of the directory.
    pub fn watch_nodes(&mut self, nodes: &Arc<NodeRegistry>) -> Result<(), MembershipError> {
        let mut updates = NodeUpdates::start(Arc::clone(&self.directory), Arc::clone(nodes))?;
        let stop = Arc::clone(&self.stop);
        let thread = std::thread::Builder::new()
            .name("node-watch".into())
            .spawn(move || {
                while !stop.load(Relaxed) {
                    if !updates.step(TICK) {
                        std::thread::sleep(TICK);
                    }
                }
            })
            .map_err(MembershipError::Thread)?;
        self.threads.push(thread);
        let (reader, stop) = (FigureReader::new(nodes), Arc::clone(&self.stop));
        let thread = std::thread::Builder::new()
            .name("node-figures".into())
            .spawn(move || reader.run(&stop))
            .map_err(MembershipError::Thread)?;
        self.threads.push(thread);
        Ok(())
    }

    /// Stops the threads and ends the lease, which frees the host number.
    pub fn leave(mut self) {
        self.stop.store(true, Relaxed);
        for thread in self.threads.drain(..) {
            if thread.join().is_err() {
                tracing::error!("a thread of the cluster membership panicked");
            }
        }
        if let Err(error) = self.directory.lease_revoke(self.lease.id) {
            tracing::debug!(%error, "revoking the lease failed; it expires by itself");
        }
    }
}

/// The lease of this host has ended.
struct LeaseEnded;

/// Keeps a lease alive until `stop`.
fn keep_alive(
    directory: &dyn Directory,
    lease: Lease,
    stop: &AtomicBool,
    events: &LeaseEvents,
) -> Result<(), LeaseEnded> {
    let mut failure_log = FailureLog::default();
    let (mut waited, mut interval) = (Duration::ZERO, KEEP_ALIVE_INTERVAL);
    while !stop.load(Relaxed) {
        std::thread::sleep(TICK);
        waited += TICK;
        if waited < interval {
            continue;
        }
        waited = Duration::ZERO;
        let sent = BootInstant::now();
        let renewal = renew(directory, lease);
        let is_renewed = matches!(renewal, Renewal::Renewed);
        let counter = if is_renewed { &events.renewals } else { &events.failures };
        counter.fetch_add(1, Relaxed);
        interval = if is_renewed { KEEP_ALIVE_INTERVAL } else { KEEP_ALIVE_RETRY_INTERVAL };
        match renewal {
            Renewal::Renewed => *events.renewed() = sent,
            Renewal::Ended => {
                tracing::error!(epoch = lease.epoch, "lease of this host ended; memory nodes refuse it");
                return Err(LeaseEnded);
            }
            Renewal::Unknown(error) => {
                if let Some(failures) = failure_log.record(Instant::now()) {
                    tracing::warn!(%error, failures, "lease keep-alive failed; retrying every 500 ms");
                }
            }
        }
    }
    Ok(())
}

/// The outcome of a keep-alive.
#[derive(Debug)]
pub enum Renewal {
    /// The lease is renewed.
    Renewed,
    /// The lease has ended: nodes refuse the host.
    Ended,
    /// The directory does not answer. The host continues: as long as no node has fenced it, none of
    /// its memory is freed.
    Unknown(DirectoryError),
}

/// Sends one keep-alive for a host's lease.
pub fn renew(directory: &dyn Directory, lease: Lease) -> Renewal {
    match directory.lease_keep_alive(lease.id) {
        Ok(()) => Renewal::Renewed,
        Err(DirectoryError::LeaseGone { .. }) => Renewal::Ended,
        Err(_) if Mutation::GiveUpWhenCutOff.is_active() => Renewal::Ended,
        Err(error) => Renewal::Unknown(error),
    }
}

/// Whether the next process of a host repeats a failed request by which it takes over from the
/// previous process. Pauses before it returns true.
#[must_use]
pub fn wait_to_resume(retries: &DirectoryRetries, error: &DirectoryError) -> bool {
    let is_repeated = repeats_resume(retries, error, Instant::now());
    is_repeated && retries.wait_to_repeat(error)
}

/// Returns whether the next process of a host repeats a request that failed at `now`. No memory of
/// the host is freed in its grace time, so the process must not fail before.
#[must_use]
pub fn repeats_resume(retries: &DirectoryRetries, error: &DirectoryError, now: Instant) -> bool {
    retries.repeats(error, now) && !Mutation::TryOnce.is_active()
}
