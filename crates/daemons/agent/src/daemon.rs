//! The daemon: joins the cluster, starts the services, and listens for programs.

mod host_services;
mod segments;

use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use aquifer_channel::RestoredItem;
use aquifer_channel::descriptor_shares::DescriptorShares;
use aquifer_directory::names::AgentRecord;
use aquifer_directory::{ConnectDirectory, Directory, DirectoryError, DirectoryRetries};
use aquifer_extents::{InheritedSession, NodeConnector, SessionService};
use aquifer_fabric::ClusterKey;
use aquifer_fabric::tcp::ConnectOptions;
use aquifer_fabric::{Identity, Tenant};
use aquifer_faults::serve::{AgentServices, PagingService, PoolLimits, PoolShares, RestoredRun};
use aquifer_gateway::ListenerKind;
use aquifer_host::cluster_access::ClusterAccess;
use aquifer_host::leak_scan::LeakScanner;
use aquifer_host::membership::{Membership, MembershipError, wait_to_resume};
use aquifer_host::nodes::{AfterFence, NodeRegistry};
use aquifer_host::recovery::Recovery;
use aquifer_ipc::size::ByteSize;
use aquifer_ipc::{HeldKind, KeeperShare};
use aquifer_keeper::{KeeperClient, KeeperStore};
use aquifer_metrics::{MetricsAddress, MetricsError, MetricsListener, MetricsServer};
use aquifer_pager::{Backup, CacheShares, Mempool};
use aquifer_segments::host::SegmentError;
use parking_lot::Mutex;

use crate::connections::{Connections, LentMemory, RUN_END_TIMEOUT, Services, serve_run};
use crate::heap_tickets::HeapTickets;
use crate::host_state::{HostState, new_mempool};
use crate::listeners::Listeners;
use crate::memory_governor::MemoryGovernor;
use crate::metrics;
use crate::recalled_runs::RecalledRuns;
use crate::swap_servers::SwapServers;
use host_services::HostServices;
use segments::{restorable_segments, start_segments};

/// Longest time for which a request to stop goes unnoticed.
const TICK: Duration = Duration::from_millis(100);
/// Least number of descriptors that a user needs, for a run with some programs.
const USER_DESCRIPTORS_MIN: usize = 128;
/// Turns of the main loop between checks whether the keeper was restarted.
const KEEPER_CHECK_TURNS: u32 = 10;

/// Options of an agent.
#[derive(Debug)]
pub struct AgentOptions {
    /// The socket for `aquifer run` and for programs of the agent's own user.
    pub socket: PathBuf,
    /// The socket for programs of all users, if the agent serves them.
    pub shared_socket: Option<PathBuf>,
    /// The keeper's socket.
    pub keeper: PathBuf,
    /// Description of the cluster's directory, which is passed verbatim to servers of swap devices
    /// on this host.
    pub directory_description: String,
    /// Largest size of the mempool, in bytes. Memory is allocated as it is used.
    pub mempool_bytes: usize,
    /// Memory of this machine that is available, in bytes.
    pub available_bytes: u64,
    /// Memory of this machine that stays available, in bytes: the page cache returns its memory
    /// before less is.
    pub keep_free_bytes: u64,
    /// Limit of runs while the host has idle memory, in bytes, for runs that give none; `None`:
    /// runs are held at their limit.
    pub limit_max_bytes: Option<u64>,
    /// How the users share the page cache.
    pub cache_shares: CacheShares,
    /// Most pool memory of one user's sessions, in bytes. `None`: half of what the nodes lend.
    pub extents_per_user: Option<u64>,
    /// Most pool memory of the runs of one user, in bytes. `None`: all that the nodes lend.
    pub pages_per_user: Option<u64>,
    /// Pool memory that other users cannot take from the runs of a user, in bytes. `None`: 1/64 of
    /// what the nodes lend.
    pub pages_share: Option<u64>,
    /// Most bytes a second that are moved off memory that nodes recall; 0: no limit. `None`: the
    /// default of the pager.
    pub move_rate: Option<u64>,
    /// When pages of runs that do not choose have a copy on a disk node: the default, and that of
    /// some users, by their ids.
    pub backups: (Backup, BTreeMap<u32, Backup>),
    /// Settings for segments.
    pub segments: SegmentSettings,
    /// Time after the end of this host's lease for which other hosts do not recover it.
    ///
    /// The keeper's grace time must not be longer. A program that is held for longer is ended when
    /// the next agent starts, because another host has freed its memory.
    pub grace: Duration,
    /// The cluster key, for nodes on other machines.
    pub key: Option<ClusterKey>,
    /// Options of connections to nodes on other machines.
    pub connect: ConnectOptions,
    /// A socket that already listens at `socket`.
    pub listener: Option<OwnedFd>,
    /// The address at which metrics are served, if any.
    pub metrics: Option<MetricsAddress>,
    /// Set when the socket's file was deleted: the agent then ends when it serves no program.
    pub when_unused: Arc<AtomicBool>,
    /// Ends this process as if it were killed. Called when the host's lease has ended, because the
    /// agent was stopped or could not reach the directory for too long. The next agent then resumes
    /// the programs.
    pub on_lease_end: fn(),
}

impl AgentOptions {
    /// The folder with the sockets of the services of this machine.
    fn sockets(&self) -> PathBuf {
        self.keeper.parent().map(Path::to_owned).unwrap_or_default()
    }
}

/// Settings for the segments of this host.
#[derive(Clone, Copy, Debug)]
pub struct SegmentSettings {
    /// The address at which agents of other hosts connect. `None`: segments stay on this host.
    pub listen: Option<SocketAddr>,
    /// Most bytes of one user's segments on this host.
    pub bytes_per_user: u64,
    /// Limit of bytes per second that are pulled ahead of programs. `None`: no limit.
    pub pull_rate: Option<u64>,
}

/// Why an agent cannot run.
#[derive(Debug, thiserror::Error)]
pub enum AgentError {
    /// The keeper does not answer, or another agent is connected to it.
    #[error(
        "the keeper at {path} cannot be used: {source}. Start it first (aquifer keeper), or use \
         aquifer up",
        path = path.display()
    )]
    Keeper {
        /// The keeper's socket.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// A socket could not be created.
    #[error("cannot listen at {path}: {source}", path = path.display())]
    Listen {
        /// The socket's path.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// A thread or descriptor could not be created.
    #[error("the agent has no threads or descriptors to serve programs: {0}")]
    Threads(io::Error),
    /// The machine has too little memory for the mempool.
    #[error(
        "a mempool of {} does not fit: only {} of memory are available; give a smaller --mempool",
        ByteSize(*mempool),
        ByteSize(*available)
    )]
    MempoolTooLarge {
        /// The mempool's size, in bytes.
        mempool: u64,
        /// The memory that is available, in bytes.
        available: u64,
    },
    /// The limit of open files of this process leaves no descriptors for users.
    #[error(
        "--shared-socket: the limit of open files is too low to serve programs of all users: raise it \
         (ulimit -n) to at least 1024"
    )]
    FewDescriptors,
    /// The gateway could not be started.
    #[error("the agent's gateway, which accepts connections, cannot be started: {0}")]
    Gateway(io::Error),
    /// The mempool could not be created.
    #[error("no memory for the mempool: {0}")]
    Mempool(io::Error),
    /// Metrics cannot be served.
    #[error(transparent)]
    Metrics(#[from] MetricsError),
    /// Other hosts cannot hand segments over to this one.
    #[error("--segment-listen {address}: {why}")]
    SegmentAddress {
        /// The address.
        address: SocketAddr,
        /// The reason why the address cannot be used.
        why: &'static str,
    },
    /// Segments cannot be served.
    #[error("cannot serve segments: {0}")]
    Segments(#[from] SegmentError),
    /// The host could not join the cluster.
    #[error(transparent)]
    Membership(#[from] MembershipError),
}

/// Serves programs until `stop`. Then it ends them with a message and frees all memory.
///
/// If an earlier agent of this host was killed, this one resumes its programs, and waits for an
/// unavailable directory as long as the programs wait for an agent.
///
/// # Errors
/// If the agent cannot start.
pub fn serve(
    options: &AgentOptions,
    connect: &ConnectDirectory,
    stop: &Arc<AtomicBool>,
    ready: impl FnOnce(),
) -> Result<(), AgentError> {
    let agent = Agent::start(options, connect, stop)?;
    ready();
    agent.run(stop, &options.when_unused)?;
    agent.end_programs("the agent is stopping");
    agent.leave(options);
    Ok(())
}

/// A running agent.
struct Agent {
    connections: Arc<Connections>,
    leak_scanner: LeakScanner,
    recovery: Recovery,
    recalled_runs: RecalledRuns,
    _metrics: Option<MetricsServer>,
    host: Arc<HostServices>,
    membership: Membership,
}

impl Agent {
    /// Joins the cluster, resumes the programs of an earlier agent, and starts the services.
    fn start(
        options: &AgentOptions,
        connect: &ConnectDirectory,
        stop: &Arc<AtomicBool>,
    ) -> Result<Self, AgentError> {
        let (keeper, kept) = KeeperClient::connect(&options.keeper, KeeperShare::Agent, options.grace)
            .map_err(|source| AgentError::Keeper { path: options.keeper.clone(), source })?;
        let takes_over = kept.iter().any(|kept| kept.item.kind == HeldKind::Host);
        let retries =
            if takes_over { DirectoryRetries::during(options.grace, stop) } else { DirectoryRetries::none() };
        let directory = retries.repeat(connect).map_err(MembershipError::Directory)?;
        let mut state = HostState::restore_or_create(options, &kept)?;
        let metrics = metrics::listen(options.metrics.as_ref(), state.predecessor.is_some())?;
        let mut membership = join(options, &directory, &mut state, &retries, stop)?;
        let tenant = Tenant(rustix::process::geteuid().as_raw());
        let identity = Identity { host: membership.host(), epoch: membership.epoch(), tenant };
        let nodes = NodeRegistry::new(
            Arc::clone(&directory),
            identity,
            options.key.clone(),
            options.connect.clone(),
            AfterFence::Wait,
        );
        let descriptors = DescriptorShares::of_process();
        if options.shared_socket.is_some() && !descriptors.has_share_of(USER_DESCRIPTORS_MIN) {
            return Err(AgentError::FewDescriptors);
        }
        nodes.charge_endpoints(&descriptors);
        watch_nodes(&mut membership, &nodes, &retries)?;
        let resumes = state.predecessor.is_some();
        if resumes {
            retries.repeat(|| nodes.load_lives()).map_err(MembershipError::Directory)?;
        }
        state.store(membership.record(), &keeper).map_err(|refused| AgentError::Keeper {
            path: options.keeper.clone(),
            source: io::Error::other(refused),
        })?;
        let lease = Arc::clone(membership.lease_events());
        let HostState { mempool, listener, shared_listener, .. } = state;
        let host = Arc::new(HostServices {
            nodes: Arc::clone(&nodes),
            keeper: Arc::new(keeper),
            lease,
            listeners: Listeners::start(Arc::clone(&descriptors)).map_err(AgentError::Gateway)?,
            descriptors: Arc::clone(&descriptors),
            pool_shares: Arc::new(PoolShares::new(PoolLimits {
                bytes_per_user: options.pages_per_user,
                share_bytes: options.pages_share,
                serves_all_users: options.shared_socket.is_some(),
            })),
        });
        let (kept_segments, kept): (Vec<_>, Vec<_>) =
            kept.into_iter().partition(|kept| kept.item.kind == HeldKind::Segment);
        let kept_segments = restorable_segments(kept_segments, resumes, &host.keeper);
        let (paging, sessions) = start_services(options, &host, mempool, kept, resumes)?;
        let segments = start_segments(options, &membership, &host, kept_segments, retries)?;
        let governor =
            MemoryGovernor::start(&paging, options.keep_free_bytes).map_err(AgentError::Threads)?;
        let swap_servers = Arc::new(SwapServers::default());
        let recalled_runs =
            RecalledRuns::start(&membership, &paging, &swap_servers).map_err(AgentError::Threads)?;
        let services = Services { paging, sessions, segments, swap_servers };
        let serve_metrics = |listener: MetricsListener| {
            metrics::serve(listener, &services, &nodes, membership.lease_events(), &governor)
        };
        let metrics = metrics.map(serve_metrics).transpose()?;
        let recovery =
            Recovery::start(Arc::clone(&directory), Arc::clone(&nodes), membership.record().clone(), tenant)
                .map_err(AgentError::Threads)?;
        // All extents of restored runs and sessions are in their ledgers now.
        let leak_scanner =
            LeakScanner::start(Arc::clone(&nodes), tenant, resumes).map_err(AgentError::Threads)?;
        let heap_tickets = HeapTickets {
            directory,
            key: options.key.clone(),
            identity,
            folder: options.sockets(),
            descriptors,
            tenants: Mutex::default(),
        };
        let access =
            ClusterAccess::new(&options.directory_description, options.connect.encrypt, options.key.as_ref());
        let memory = LentMemory {
            governor,
            limit_max_bytes: options.limit_max_bytes,
            backups: options.backups.clone(),
        };
        let connections =
            Connections::new(&services, &nodes, access, heap_tickets, memory).map_err(AgentError::Threads)?;
        host.listeners.add(ListenerKind::Own, listener);
        if let Some(shared) = shared_listener {
            host.listeners.add(ListenerKind::Shared, shared);
        }
        Ok(Self { connections, leak_scanner, recovery, recalled_runs, _metrics: metrics, host, membership })
    }

    /// Serves users until `stop`, or, with `when_unused`, until no program is served.
    fn run(&self, stop: &AtomicBool, when_unused: &AtomicBool) -> Result<(), AgentError> {
        let mut turns = 0u32;
        while !stop.load(Relaxed) {
            if when_unused.load(Relaxed) && self.connections.is_unused() {
                break;
            }
            self.admit_users()?;
            turns = turns.wrapping_add(1);
            if turns.is_multiple_of(KEEPER_CHECK_TURNS) {
                self.host.keeper.reconnect_if_closed();
            }
        }
        Ok(())
    }

    /// Waits a moment for another user, and starts a thread for the user's connections.
    fn admit_users(&self) -> Result<(), AgentError> {
        let Some(channel) = self.host.listeners.next_user(TICK).map_err(AgentError::Gateway)? else {
            return Ok(());
        };
        let connections = Arc::clone(&self.connections);
        let name = format!("user-{}", channel.uid);
        let spawned = std::thread::Builder::new().name(name).spawn(move || connections.admit_all(channel));
        // The relay observes the end of its channel, and its user connects again.
        if let Err(error) = spawned {
            tracing::error!(%error, "cannot start a thread for a user");
        }
        Ok(())
    }

    /// Ends all runs, sessions and swap devices of this host.
    fn end_programs(&self, reason: &str) {
        end_runs(&self.connections.service, reason);
        self.connections.sessions.end(reason);
        self.connections.swap_servers.end(reason);
    }

    /// Removes the sockets and leaves the cluster.
    fn leave(self, options: &AgentOptions) {
        // If the file was deleted, the next agent may already listen at its path.
        let was_deleted = options.when_unused.load(Relaxed);
        if options.listener.is_none() && !was_deleted {
            let _ = std::fs::remove_file(&options.socket);
        }
        if let Some(path) = options.shared_socket.as_ref().filter(|_| !was_deleted) {
            let _ = std::fs::remove_file(path);
        }
        self.host.keeper.release(HeldKind::Host, 0);
        drop((self.recovery, self.leak_scanner, self.recalled_runs));
        self.membership.leave();
    }
}

/// Starts the services for runs and for sessions, and restores the runs and sessions of an earlier
/// agent that the keeper has held. If `resumes` is false, ends them.
fn start_services(
    options: &AgentOptions,
    host: &Arc<HostServices>,
    mempool: Mempool,
    kept: Vec<RestoredItem>,
    resumes: bool,
) -> Result<(Arc<PagingService>, Arc<SessionService>), AgentError> {
    // A page of the cache that was swapped out would cost more than one of a memory node.
    if let Err(error) = mempool.memory().lock_touched() {
        tracing::debug!(%error, "the mempool may be swapped out: this process may not lock it");
    }
    let mempool = Arc::new(mempool);
    mempool.set_cache_shares(options.cache_shares.clone());
    let service = PagingService::new(
        Arc::clone(host) as Arc<dyn AgentServices>,
        mempool,
        Arc::clone(&host.pool_shares),
    )
    .map_err(AgentError::Threads)?;
    if let Some(rate) = options.move_rate {
        service.set_move_rate((rate > 0).then_some(rate));
    }
    let (kept_sessions, kept): (Vec<_>, Vec<_>) =
        kept.into_iter().partition(|kept| kept.item.kind == HeldKind::Session);
    let restorable = restorable_sessions(kept_sessions, resumes, &host.keeper);
    let sessions = SessionService::new(
        Arc::clone(host) as Arc<dyn NodeConnector>,
        Arc::clone(&host.keeper) as Arc<dyn KeeperStore>,
        Arc::clone(&host.descriptors),
        options.extents_per_user,
    );
    let of_sessions = Arc::downgrade(&sessions);
    host.pool_shares.count_extents(move |owner| {
        of_sessions.upgrade().map_or(0, |sessions| sessions.allocated_bytes(owner))
    });
    host.nodes.wait_for_return_of(&restorable.iter().flat_map(InheritedSession::nodes).collect());
    sessions.restore(restorable);
    let restored = if resumes {
        service.restore(kept)
    } else {
        service.end_kept(kept);
        Vec::new()
    };
    for RestoredRun { run, owner } in restored {
        let service = Arc::clone(&service);
        let spawned = std::thread::Builder::new()
            .name("restored-run".into())
            .spawn(move || serve_run(&owner, &service, &run));
        spawned.map_err(AgentError::Threads)?;
    }
    Ok((service, sessions))
}

/// Returns the sessions of an earlier agent that can be restored, and has the keeper release the
/// others. If `resumes` is false, all are released: other hosts have freed their extents.
fn restorable_sessions(
    kept: Vec<RestoredItem>,
    resumes: bool,
    keeper: &KeeperClient,
) -> Vec<InheritedSession> {
    let mut restorable = Vec::new();
    for RestoredItem { item, fds } in kept {
        match InheritedSession::open(&item, fds) {
            Ok(session) if resumes => restorable.push(session),
            Ok(_) => keeper.release(item.kind, item.id),
            Err(error) => {
                tracing::error!(session = item.id, %error, "cannot restore a session; ending it");
                keeper.release(item.kind, item.id);
            }
        }
    }
    restorable
}

/// Joins the cluster under the host number of the previous agent. If other hosts have recovered
/// that number, joins under a new one, and removes the previous agent's record and mempool from
/// `state`.
fn join(
    options: &AgentOptions,
    directory: &Arc<dyn Directory>,
    state: &mut HostState,
    retries: &DirectoryRetries,
    stop: &Arc<AtomicBool>,
) -> Result<Membership, AgentError> {
    let join = |predecessor: Option<&AgentRecord>| {
        let (directory, stop, act) = (Arc::clone(directory), Arc::clone(stop), options.on_lease_end);
        // An agent that is stopping ends its programs.
        let on_lease_end = move || {
            if !stop.load(Relaxed) {
                act()
            }
        };
        Membership::join(directory, &options.socket, predecessor, options.grace, on_lease_end)
    };
    let Some(predecessor) = state.predecessor.clone() else { return Ok(join(None)?) };
    loop {
        match join(Some(&predecessor)) {
            Err(MembershipError::Directory(DirectoryError::Taken { .. })) => break,
            Err(MembershipError::Directory(error)) if wait_to_resume(retries, &error) => {}
            joined => return Ok(joined?),
        }
    }
    tracing::error!(
        grace = ?options.grace,
        "cannot resume the programs of the previous agent: other hosts have recovered this host's memory; \
         ending them. The keeper's --grace must not exceed the agent's"
    );
    state.predecessor = None;
    state.mempool = new_mempool(options)?;
    Ok(join(None)?)
}

fn watch_nodes(
    membership: &mut Membership,
    nodes: &Arc<NodeRegistry>,
    retries: &DirectoryRetries,
) -> Result<(), MembershipError> {
    loop {
        match membership.watch_nodes(nodes) {
            Err(MembershipError::Directory(error)) if wait_to_resume(retries, &error) => {}
            watched => return watched,
        }
    }
}

fn end_runs(service: &PagingService, reason: &str) {
    let runs = service.runs();
    runs.iter().for_each(|run| run.end(reason));
    let deadline = Instant::now() + RUN_END_TIMEOUT;
    for run in runs {
        if !run.wait_empty(deadline.saturating_duration_since(Instant::now())) {
            tracing::error!(run = run.id(), timeout = ?RUN_END_TIMEOUT, "programs have not ended in time");
        }
        service.close_run(&run);
    }
}
