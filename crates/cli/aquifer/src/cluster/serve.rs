//! A daemon of the cluster, in the foreground, until SIGTERM or SIGINT.

use std::error::Error;
use std::io::Write;
use std::net::TcpListener;
use std::os::fd::AsFd;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use aquifer_agent::{AgentOptions, CacheShares, SegmentSettings, shadow};
use aquifer_directory::ConnectDirectory;
use aquifer_directory::embedded::{DirectoryServer, DirectoryServerOptions, EmbeddedDirectory};
use aquifer_fabric::tcp::ConnectOptions;
use aquifer_fabric::{shm, tcp};
use aquifer_heaps::{DeviceOptions, HeapsListen, HeapsOptions};
use aquifer_keeper::{self as keeper, KeeperOptions};
use aquifer_node::{KeepOptions, ListenAddress, NodeOptions, Shutdown};
use rustix::net::SocketType;

use super::daemon::Daemon;
use super::key;
use super::location::DirectoryLocation;
use super::lock::FileLock;
use super::signals::{StopRequest, StopSignal};
use super::{successor, supervisor, systemd};
use crate::Outcome;
use crate::cli::{
    AgentArguments, DaemonCommand, DetachArguments, GRACE_MS, HeapServiceArguments, KeeperArguments,
    NodeArguments,
};
use crate::say::log_to_stderr;
use crate::settings::{AgentSettings, HeapServiceSettings, Network, NodeSettings, complete};
use crate::state::StateDir;
use aquifer_host_memory::{available_bytes, total_bytes};

/// Interval between checks whether a directory whose lock file was deleted is still used.
const UNUSED_CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// The line that a detached daemon writes to standard output once it serves.
pub const READY: &[u8] = b"ready\n";

/// Runs a daemon until it is asked to stop.
///
/// # Errors
/// If the daemon cannot serve.
pub fn serve(state: &StateDir, command: DaemonCommand) -> Outcome {
    state.create()?;
    match command {
        DaemonCommand::Directory(arguments) => {
            run(state, Daemon::Directory, &arguments.detach, |stop, ready| directory(state, stop, ready))
        }
        DaemonCommand::Keeper(arguments) => run(state, Daemon::Keeper, &arguments.detach, |stop, ready| {
            keeper(state, &arguments, stop, ready)
        }),
        DaemonCommand::Node(NodeArguments { config, settings, detach }) => {
            let settings = complete(settings, config.as_deref(), default_config(&detach, "node.toml"))?;
            let id = settings.id.ok_or(
                "the node has no number: give one with --id NUMBER, or as `id` in its settings file",
            )?;
            run(state, Daemon::Node(id), &detach, |stop, ready| node(state, &settings, id, stop, ready))
        }
        DaemonCommand::HeapService(HeapServiceArguments { config, settings, detach }) => {
            let default = default_config(&detach, "heap-service.toml");
            let settings = complete(settings, config.as_deref(), default)?;
            let id = settings.id.ok_or(
                "the service has no number: give that of its node with --id NUMBER, or as `id` in its \
                settings file",
            )?;
            run(state, Daemon::Heaps(id), &detach, |stop, ready| heaps(state, &settings, id, stop, ready))
        }
        DaemonCommand::Agent(AgentArguments { config, settings, detach, after }) => {
            after.map_or(Ok(()), successor::await_end)?;
            let settings = complete(settings, config.as_deref(), default_config(&detach, "agent.toml"))?;
            run(state, Daemon::Agent, &detach, |stop, ready| agent(state, &settings, stop, ready))
        }
        DaemonCommand::Supervisor(arguments) => {
            run(state, Daemon::Supervisor, &arguments.detach, |stop, ready| {
                supervisor::supervise(state, stop, || ready.notify())
            })
        }
    }
}

/// Usual number of threads that serve connections to a node with a disk.
const DISK_THREADS: usize = 8;

/// Name of the settings file in /etc/aquifer that a daemon reads if `--config` is not given.
///
/// A daemon of `aquifer up` reads no file: it gets all settings on its command line.
fn default_config<'a>(detach: &DetachArguments, name: &'a str) -> Option<&'a str> {
    (!detach.detached).then_some(name)
}

/// Notifies systemd and `aquifer up` that the daemon serves.
struct ReadyNotifier {
    daemon: Daemon,
    is_detached: bool,
}

impl ReadyNotifier {
    fn notify(self) {
        tracing::info!(daemon = %self.daemon, pid = std::process::id(), "daemon serves");
        if let Err(error) = systemd::notify_ready() {
            tracing::warn!(%error, daemon = %self.daemon, "readiness notification to systemd failed");
        }
        if self.is_detached {
            let mut stdout = std::io::stdout();
            // `aquifer up` may have ended; the daemon serves nevertheless.
            let _gone = stdout.write_all(READY).and_then(|()| stdout.flush());
            // A reader of this output that waits for its end must not wait for the end of the
            // daemon.
            let null = std::fs::File::options().write(true).open("/dev/null");
            let _kept = null.map(|null| rustix::stdio::dup2_stdout(&null));
        }
    }
}

/// Runs `serve` with the daemon's lock held.
fn run(
    state: &StateDir,
    daemon: Daemon,
    detach: &DetachArguments,
    serve: impl FnOnce(StopSignal, ReadyNotifier) -> Result<(), Box<dyn Error>>,
) -> Outcome {
    if detach.detached {
        // Fails only if this process already leads a process group; then it is detached.
        let _leader = rustix::process::setsid();
        std::env::set_current_dir("/")?;
    }
    let mut stop = StopSignal::install()?;
    let path = state.lock(&daemon.to_string());
    let lock =
        FileLock::try_acquire(&path).map_err(|error| format!("cannot lock {}: {error}", path.display()))?;
    let Some(lock) = lock else {
        return Err(format!("{daemon} is already running in {}", state.path().display()).into());
    };
    log_to_stderr();
    raise_descriptor_limit();
    stop.watch_lock(daemon, &lock);
    serve(stop, ReadyNotifier { daemon, is_detached: detach.detached })?;
    tracing::info!(%daemon, "daemon stopped");
    Ok(ExitCode::SUCCESS)
}

fn directory(state: &StateDir, mut stop: StopSignal, ready: ReadyNotifier) -> Result<(), Box<dyn Error>> {
    let socket = state.socket(&Daemon::Directory.to_string());
    let directory = EmbeddedDirectory::open(&state.directory_file())?;
    let mut server = DirectoryServer::start(directory, &socket, DirectoryServerOptions::default())?;
    ready.notify();
    if stop.wait(None) == Some(StopRequest::WhenUnused) {
        server.leave_socket_file();
        while server.is_used()? && stop.wait(Some(UNUSED_CHECK_INTERVAL)).is_none() {}
    }
    Ok(())
}

fn keeper(
    state: &StateDir,
    arguments: &KeeperArguments,
    stop: StopSignal,
    ready: ReadyNotifier,
) -> Result<(), Box<dyn Error>> {
    let grace = Duration::from_millis(arguments.grace.unwrap_or(GRACE_MS));
    let listener = systemd::listener("keeper", SocketType::SEQPACKET)?;
    let StopFlags { now, when_unused } = StopFlags::of(stop)?;
    let socket = state.socket(&Daemon::Keeper.to_string());
    let options = KeeperOptions { socket, grace, listener, items_max: keeper::ITEMS_MAX, when_unused };
    keeper::serve(&options, &now, || ready.notify())
        .map_err(|error| format!("keeper cannot serve at {}: {error}", options.socket.display()).into())
}

fn node(
    state: &StateDir,
    settings: &NodeSettings,
    id: u16,
    stop: StopSignal,
    ready: ReadyNotifier,
) -> Result<(), Box<dyn Error>> {
    let memory = settings.memory.ok_or(
        "the node has no size: give the memory that it lends with --memory \
        SIZE, or as `memory` in its settings file",
    )?;
    let shutdown = Shutdown::new();
    let for_signal = shutdown.clone();
    stop.on_request(move |request| match request {
        StopRequest::Now => for_signal.request(),
        StopRequest::WhenUnused => for_signal.request_when_unused(),
    })?;
    let (location, for_connect) = (DirectoryLocation::new(&settings.directory)?, state.clone());
    let connect = Box::new(move || location.connect(&for_connect));
    let mut options = NodeOptions::new(id, memory, listen(state, settings, id)?, connect);
    options.keep_free_bytes = settings.keep_free;
    options.drain_on_stop = settings.drain_on_stop.map(Duration::from_millis);
    options.memory_bytes_max = settings.memory_max.unwrap_or(memory);
    options.advertise = settings.advertise;
    options.metrics.clone_from(&settings.metrics);
    options.keep = settings.grace.map(|grace_ms| KeepOptions {
        keeper: state.socket(&Daemon::Keeper.to_string()),
        grace: Duration::from_millis(grace_ms),
    });
    options.heaps = settings.disk.is_none().then(|| heap_memory_socket(state, id));
    options.disk.clone_from(&settings.disk);
    Ok(aquifer_node::serve(&options, &shutdown, |_| ready.notify())?)
}

fn heaps(
    state: &StateDir,
    settings: &HeapServiceSettings,
    node: u16,
    stop: StopSignal,
    ready: ReadyNotifier,
) -> Result<(), Box<dyn Error>> {
    let memory = settings.memory.ok_or(
        "the service has no size: give the memory that heaps may take with --memory SIZE, or as \
        `memory` in its settings file",
    )?;
    let listen = match systemd::listener("heap-service", SocketType::STREAM)? {
        Some(listener) => HeapsListen::On(TcpListener::from(listener)),
        None => HeapsListen::At(settings.listen.ok_or(
            "the service has no address: give one with --listen ADDRESS, or as `listen` in its settings \
            file",
        )?),
    };
    let device = settings.rdma.map(|address| {
        let heap_bytes = settings.rdma_heap.unwrap_or(memory / 2);
        DeviceOptions { address, heap_bytes }
    });
    let StopFlags { now, when_unused } = StopFlags::of(stop)?;
    let (location, for_connect) = (DirectoryLocation::new(&settings.directory)?, state.clone());
    let options = HeapsOptions {
        node,
        memory_bytes: memory,
        node_socket: (settings.own_memory != Some(true) && device.is_none())
            .then(|| heap_memory_socket(state, node)),
        listen,
        advertise: settings.advertise,
        device,
        key: key::load(&settings.key.clone().unwrap_or_else(|| state.key_file()))?,
        threads: settings.threads.map(usize::from),
        encrypt: settings.encrypt,
        connect: Box::new(move || location.connect(&for_connect)),
        lease_ttl: aquifer_heaps::LEASE_TTL,
        keeper: state.socket(&Daemon::Keeper.to_string()),
        socket: state.socket(&Daemon::Heaps(node).to_string()),
        grace: Duration::from_millis(settings.grace.unwrap_or(GRACE_MS)),
        metrics: settings.metrics.clone(),
    };
    Ok(aquifer_heaps::serve(options, &now, &when_unused, || ready.notify())?)
}

/// The socket at which a node lends memory to the heaps of this machine.
fn heap_memory_socket(state: &StateDir, node: u16) -> std::path::PathBuf {
    // As short as the name of the node's own socket, for which state folders leave room.
    state.socket(&format!("span-{node}"))
}

/// The address at which a node listens: a socket from systemd, a network address, or shared memory
/// of this machine.
///
/// # Errors
/// If the settings contradict each other.
fn listen(state: &StateDir, settings: &NodeSettings, id: u16) -> Result<ListenAddress, Box<dyn Error>> {
    let NodeSettings { encrypt, threads, rate_bytes, rate_operations, .. } = settings;
    let from_systemd = systemd::listener("node", SocketType::STREAM)?.map(TcpListener::from);
    if from_systemd.is_none() && settings.listen.is_none() {
        if settings.advertise.is_some()
            || settings.fabric.is_some()
            || encrypt.is_some()
            || threads.is_some()
            || rate_bytes.is_some()
            || rate_operations.is_some()
        {
            let why = "--fabric, --encrypt, --threads, --rate-bytes, --rate-operations and --advertise \
                need a node that lends over a network: give its address with --listen ADDRESS";
            return Err(why.into());
        }
        let socket = state.socket(&Daemon::Node(id).to_string());
        return Ok(ListenAddress::Shm(socket, shm::ShmOptions::default()));
    }
    let is_over_verbs = settings.fabric == Some(Network::Verbs);
    let mut options = tcp::TcpOptions::default();
    options.encrypt = encrypt.unwrap_or(options.encrypt);
    if settings.disk.is_some() {
        // A thread waits for the disk, and serves no other connection meanwhile.
        options.threads = DISK_THREADS;
    }
    options.threads = threads.map_or(options.threads, usize::from);
    options.rate = tcp::Rate { bytes_per_s: *rate_bytes, operations_per_s: rate_operations.map(u64::from) };
    let key = key::load(&settings.key.clone().unwrap_or_else(|| state.key_file()))?;
    let address = match &from_systemd {
        Some(listener) => listener.local_addr()?,
        None => settings.listen.expect("checked above: there is a socket or an address"),
    };
    if settings.advertise.unwrap_or(address).ip().is_unspecified() {
        let why = format!(
            "hosts cannot connect to the unspecified address {address}: give the address at which they \
                reach this node with --advertise ADDRESS"
        );
        return Err(why.into());
    }
    if is_over_verbs {
        let has_tcp_settings = encrypt.unwrap_or(false)
            || threads.is_some()
            || rate_bytes.is_some()
            || rate_operations.is_some();
        if has_tcp_settings || from_systemd.is_some() {
            let why = "--fabric verbs does not support --encrypt, --threads, --rate-bytes, \
                --rate-operations or a socket from systemd: the RDMA device does the transfers";
            return Err(why.into());
        }
        return Ok(ListenAddress::Verbs(address, key));
    }
    Ok(match from_systemd {
        Some(listener) => ListenAddress::TcpOn(Arc::new(listener), key, Box::new(options)),
        None => ListenAddress::Tcp(address, key, Box::new(options)),
    })
}

fn agent(
    state: &StateDir,
    settings: &AgentSettings,
    stop: StopSignal,
    ready: ReadyNotifier,
) -> Result<(), Box<dyn Error>> {
    let keeper = state.socket(&Daemon::Keeper.to_string());
    let shadow = shadow::start(&keeper)
        .map_err(|error| format!("the agent's shadow process cannot be started: {error}"))?;
    let available = available_bytes()?;
    let mempool = settings.mempool.unwrap_or(available / 2);
    let mut connect = ConnectOptions::default();
    connect.encrypt = settings.encrypt.unwrap_or(connect.encrypt);
    let StopFlags { now, when_unused } = StopFlags::of(stop)?;
    let options = AgentOptions {
        socket: state.agent_socket(),
        shared_socket: settings.shared_socket.clone(),
        keeper,
        directory_description: serde_json::to_string(&settings.directory)?,
        mempool_bytes: usize::try_from(mempool)?,
        available_bytes: available,
        keep_free_bytes: match settings.keep_free {
            Some(bytes) => bytes,
            None => aquifer_agent::default_keep_free(total_bytes()?),
        },
        limit_max_bytes: settings.local_max,
        cache_shares: CacheShares {
            bytes_per_user: settings.cache_per_user,
            weights: settings.cache_weight.iter().map(|user| (user.uid, user.weight)).collect(),
        },
        extents_per_user: settings.extents_per_user,
        pages_per_user: settings.pages_per_user,
        pages_share: settings.pages_share,
        move_rate: settings.move_rate,
        backups: (
            settings.backup.unwrap_or_default(),
            settings.backup_of.iter().map(|user| (user.uid, user.backup)).collect(),
        ),
        segments: SegmentSettings {
            listen: settings.segment_listen,
            bytes_per_user: settings.segment_memory.unwrap_or(available / 2),
            pull_rate: settings.segment_pull_rate,
        },
        grace: Duration::from_millis(settings.grace.unwrap_or(GRACE_MS)),
        key: match &settings.key {
            Some(path) => Some(key::load(path)?),
            None => Some(state.key_file())
                .filter(|path| path.exists())
                .map(|path| key::load(&path))
                .transpose()?,
        },
        connect,
        listener: systemd::listener("agent", SocketType::SEQPACKET)?,
        metrics: settings.metrics.clone(),
        when_unused,
        on_lease_end: if ready.is_detached { successor::end_with_successor } else { successor::end },
    };
    let (location, for_connect) = (DirectoryLocation::new(&settings.directory)?, state.clone());
    let connect: ConnectDirectory = Box::new(move || location.connect(&for_connect));
    aquifer_agent::serve(&options, &connect, &now, || ready.notify())?;
    shadow.dismiss();
    Ok(())
}

/// Accepts connections for the agent at the other end of standard input, until it ends.
///
/// # Errors
/// If standard input is no open descriptor.
pub fn gateway() -> Outcome {
    log_to_stderr();
    rustix::thread::set_name(c"aquifer-gateway")?;
    aquifer_gateway::serve(std::io::stdin().as_fd().try_clone_to_owned()?);
    Ok(ExitCode::SUCCESS)
}

/// Most descriptors that a daemon requests: enough for the programs of [`aquifer_agent`]'s limits.
const DESCRIPTORS_WANTED: u64 = 262_144;

/// Raises the limit of open files: each paged program needs some thirty descriptors in the agent,
/// and some in the keeper. Root may raise the hard limit, too.
fn raise_descriptor_limit() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let hard = getrlimit(Resource::Nofile).maximum;
    let raise = |limit| setrlimit(Resource::Nofile, Rlimit { current: limit, maximum: limit });
    let higher = hard.filter(|hard| *hard < DESCRIPTORS_WANTED).map(|_| DESCRIPTORS_WANTED);
    let raised = higher.map_or(raise(hard), |wanted| raise(Some(wanted)).or_else(|_| raise(hard)));
    if let Err(error) = raised {
        tracing::warn!(%error, "limit of open files not raised; it bounds the number of paged programs");
    }
}

/// Requests to stop, as flags that a daemon polls.
struct StopFlags {
    now: Arc<AtomicBool>,
    when_unused: Arc<AtomicBool>,
}

impl StopFlags {
    /// Sets the flags from a thread.
    fn of(stop: StopSignal) -> std::io::Result<Self> {
        let (now, when_unused) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
        let flags = Self { now: Arc::clone(&now), when_unused: Arc::clone(&when_unused) };
        stop.on_request(move |request| match request {
            StopRequest::Now => now.store(true, Ordering::Relaxed),
            StopRequest::WhenUnused => when_unused.store(true, Ordering::Relaxed),
        })?;
        Ok(flags)
    }
}
