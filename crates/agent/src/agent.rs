//! The agent's life: a place in the directory, sockets for programs.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use aquifer_channel::RestoredItem;
use aquifer_channel::socket::wait_readable;
use aquifer_directory::DirectoryError;
use aquifer_directory::names::AgentRecord;
use aquifer_extents::{InheritedSession, NodeConnector, SessionKeeper, SessionService};
use aquifer_fabric::ClusterKey;
use aquifer_fabric::tcp::ConnectOptions;
use aquifer_fabric::{Endpoint, EndpointError, Host as HostNumber, Identity, Tenant};
use aquifer_faults::serve::{AgentServices, PagingService, RestoredRun};
use aquifer_host::audit::Audits;
use aquifer_host::lent::Lent;
use aquifer_host::membership::{Membership, MembershipError};
use aquifer_host::nodes::Nodes;
use aquifer_host::recovery::Recovery;
use aquifer_ipc::{HeldItem, HeldKind, KeeperShare};
use aquifer_keeper::KeeperPort;
use aquifer_metrics::{MetricsAddress, MetricsError};
use aquifer_pager::{Connector, Mempool};
use aquifer_pool::{LeakDetector, NodeId, PoolClient};

use crate::metrics;
use crate::place::Place;
use crate::talk::{SETTLE, Talks, attend};

/// How often to look whether to stop.
const TICK: Duration = Duration::from_millis(100);

/// How to run an agent.
#[derive(Debug)]
pub struct AgentOptions {
    /// Where programs and `aquifer run` find it.
    pub socket: PathBuf,
    /// Where programs of other users find it, if it serves them.
    pub shared_socket: Option<PathBuf>,
    /// Where the keeper listens.
    pub keeper: PathBuf,
    /// The cluster's directory.
    pub directory: Arc<dyn aquifer_directory::Directory>,
    /// Where that is, for servers of blocks on this host: told to them as it is.
    pub directory_place: String,
    /// Most that the mempool may take, in bytes. It grows as it is used.
    pub mempool_bytes: usize,
    /// Most that one user's sessions may have of the pool, in bytes; half of what nodes lend, if nothing is said.
    pub extents_per_user: Option<u64>,
    /// How long programs wait for another agent, by their keeper: for so long other hosts leave alone what this one holds.
    pub grace: Duration,
    /// The cluster's key, for nodes on other machines.
    pub key: Option<ClusterKey>,
    /// How those are connected to.
    pub connect: ConnectOptions,
    /// A socket that listens at `socket` already.
    pub listener: Option<OwnedFd>,
    /// Where its figures are served, if anywhere.
    pub metrics: Option<MetricsAddress>,
}

/// Why an agent cannot run.
#[derive(Debug, thiserror::Error)]
pub enum AgentError {
    /// No keeper.
    #[error("the keeper at {path} cannot be reached: {source}. Start it first (aquifer keeper), or use aquifer up", path = path.display())]
    Keeper {
        /// Where it should be.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// No socket.
    #[error("cannot listen at {path}: {source}", path = path.display())]
    Listen {
        /// Where.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// No threads.
    #[error("the agent has no threads or descriptors to serve programs: {0}")]
    Threads(io::Error),
    /// No memory.
    #[error("no memory for the mempool: {0}")]
    Mempool(io::Error),
    /// The directory could not be reached for too long.
    #[error("this host's lease has ended: start the agent again")]
    LeaseLost,
    /// Its figures cannot be served.
    #[error(transparent)]
    Metrics(#[from] MetricsError),
    /// The directory.
    #[error(transparent)]
    Membership(#[from] MembershipError),
}

#[derive(Debug)]
struct Host {
    nodes: Arc<Nodes>,
    keeper: KeeperPort,
}

impl AgentServices for Host {
    fn connector(&self, tenant: u32) -> Arc<dyn Connector> {
        self.nodes.of(tenant)
    }

    fn pool(&self, tenant: u32) -> PoolClient {
        self.nodes.pool(tenant)
    }

    fn leak_detector(&self) -> &LeakDetector {
        self.nodes.leak_detector()
    }

    fn nodes(&self) -> Vec<NodeId> {
        self.nodes.list()
    }

    fn put_in_keeper(&self, put: &HeldItem, fds: &[BorrowedFd<'_>]) {
        self.keeper.keep(put, fds);
    }

    fn remove_from_keeper(&self, kind: HeldKind, id: u64) {
        self.keeper.unkeep(kind, id);
    }
}

impl SessionKeeper for Host {
    fn hold(&self, item: &HeldItem, fds: &[BorrowedFd<'_>]) {
        self.keeper.keep(item, fds);
    }

    fn release(&self, kind: HeldKind, id: u64) {
        self.keeper.unkeep(kind, id);
    }
}

impl NodeConnector for Host {
    fn nodes(&self) -> Vec<NodeId> {
        self.nodes.list()
    }

    fn host(&self) -> HostNumber {
        self.nodes.host()
    }

    fn leak_detector(&self) -> &Arc<LeakDetector> {
        self.nodes.leak_detector()
    }

    fn connect(&self, node: NodeId, tenant: Tenant) -> Result<Box<dyn Endpoint>, EndpointError> {
        self.nodes.connect(node, tenant)
    }
}

/// Serve programs until `stop`; then end them, with a message, and give all memory back. If an agent before this one was killed, go on
/// with its programs.
///
/// # Errors
/// If something it needs is missing at the start.
pub fn serve(options: &AgentOptions, stop: &AtomicBool, ready: impl FnOnce()) -> Result<(), AgentError> {
    let (keeper, kept) = KeeperPort::connect(&options.keeper, KeeperShare::Agent)
        .map_err(|source| AgentError::Keeper { path: options.keeper.clone(), source })?;
    let mut place = Place::find(options, &kept)?;
    let metrics = metrics::listen(options.metrics.as_ref(), place.before.is_some())?;
    let mut membership = join(options, &mut place)?;
    let tenant = Tenant(rustix::process::geteuid().as_raw());
    let identity = Identity { host: membership.host(), epoch: membership.epoch(), tenant };
    let nodes =
        Nodes::new(Arc::clone(&options.directory), identity, options.key.clone(), options.connect.clone());
    membership.watch_nodes(&nodes)?;
    if place.before.is_some() {
        nodes.remember_lives().map_err(MembershipError::Directory)?;
    }
    let Place { before, mempool, listener, shared } = place;
    let record = serde_json::to_string(membership.record()).expect("plain structs are JSON");
    let fds: Vec<_> = [mempool.memory().fd(), listener.as_fd()]
        .into_iter()
        .chain(shared.as_ref().map(AsFd::as_fd))
        .collect();
    keeper.keep(&HeldItem { kind: HeldKind::Host, id: 0, pid: 0, record }, &fds);
    let mempool = Arc::new(mempool);
    let host = Arc::new(Host { nodes: Arc::clone(&nodes), keeper });
    let service = PagingService::new(Arc::clone(&host) as Arc<dyn AgentServices>, mempool)
        .map_err(AgentError::Threads)?;
    let (kept_sessions, kept): (Vec<_>, Vec<_>) =
        kept.into_iter().partition(|kept| kept.item.kind == HeldKind::Session);
    let left = left_sessions(kept_sessions, before.is_some(), &host.keeper);
    let sessions = SessionService::new(
        Arc::clone(&host) as Arc<dyn NodeConnector>,
        Arc::clone(&host) as Arc<dyn SessionKeeper>,
        options.extents_per_user,
    );
    nodes.await_these(&left.iter().flat_map(InheritedSession::nodes).collect());
    sessions.restore(left);
    let restored = if before.is_some() {
        service.restore(kept)
    } else {
        service.end_kept(kept);
        Vec::new()
    };
    for RestoredRun { run, owner } in restored {
        let service = Arc::clone(&service);
        let spawned = std::thread::Builder::new()
            .name("talk-again".into())
            .spawn(move || attend(&owner, &service, &run));
        spawned.map_err(AgentError::Threads)?;
    }
    let figures = |listener| metrics::serve(listener, &service, &sessions, &nodes, membership.lease_events());
    let _metrics = metrics.map(figures).transpose()?;
    let recovery = Recovery::start(
        Arc::clone(&options.directory),
        Arc::clone(&nodes),
        membership.record().clone(),
        tenant,
    )
    .map_err(AgentError::Threads)?;
    let audits = Audits::start(Arc::clone(&nodes), tenant, before.is_some()).map_err(AgentError::Threads)?;
    let lent = Lent::new(&options.directory_place, options.connect.encrypt, options.key.as_ref());
    let talks = Talks::new(&service, &sessions, &nodes, lent);
    ready();
    let mut ticks = 0u32;
    while !stop.load(Relaxed) {
        let listeners: Vec<&OwnedFd> = [&listener].into_iter().chain(&shared).collect();
        if wait_readable(&listeners, TICK).unwrap_or(false) {
            for (at, listener) in listeners.into_iter().enumerate() {
                if wait_readable(&[listener], Duration::ZERO).unwrap_or(false) {
                    talks.accept(listener, at > 0);
                }
            }
        }
        if membership.is_lost() {
            let reason = "this host's lease has ended, and the memory nodes refuse it";
            end_runs(&service, reason);
            sessions.end(reason);
            talks.borrowers.end(reason);
            return Err(AgentError::LeaseLost);
        }
        ticks = ticks.wrapping_add(1);
        if ticks.is_multiple_of(10) {
            host.keeper.refresh();
        }
    }
    end_runs(&service, "the agent is stopping");
    sessions.end("the agent is stopping");
    talks.borrowers.end("the agent is stopping");
    if options.listener.is_none() {
        let _ = std::fs::remove_file(&options.socket);
    }
    if let Some(path) = &options.shared_socket {
        let _ = std::fs::remove_file(path);
    }
    host.keeper.unkeep(HeldKind::Host, 0);
    drop((recovery, audits));
    membership.leave();
    Ok(())
}

/// Sessions that the agent before this one had. Those that cannot be gone on with end; none can if what this host held was given to others.
fn left_sessions(kept: Vec<RestoredItem>, has_memory: bool, keeper: &KeeperPort) -> Vec<InheritedSession> {
    let mut all = Vec::new();
    for RestoredItem { item, fds } in kept {
        match InheritedSession::open(&item, fds) {
            Ok(left) if has_memory => all.push(left),
            Ok(_) => keeper.unkeep(item.kind, item.id),
            Err(error) => {
                tracing::error!(%error, "a session cannot be gone on with");
                keeper.unkeep(item.kind, item.id);
            }
        }
    }
    all
}

/// As the agent before this one; if others have given back meanwhile what it held, as a new one.
fn join(options: &AgentOptions, place: &mut Place) -> Result<Membership, AgentError> {
    let join = |before: Option<&AgentRecord>| {
        Membership::join(Arc::clone(&options.directory), &options.socket, before, options.grace)
    };
    match join(place.before.as_ref()) {
        Err(MembershipError::Directory(DirectoryError::Taken { .. })) if place.before.is_some() => {
            tracing::error!(
                "this host was away for too long, and its memory was given to others: its programs are ended"
            );
            place.before = None;
            place.mempool = Mempool::new(options.mempool_bytes).map_err(AgentError::Mempool)?;
            Ok(join(None)?)
        }
        joined => Ok(joined?),
    }
}

fn end_runs(service: &PagingService, reason: &str) {
    for run in service.runs() {
        run.end(reason);
        if !run.wait_empty(SETTLE) {
            tracing::error!("some programs would not end");
        }
        service.close_run(&run);
    }
}
