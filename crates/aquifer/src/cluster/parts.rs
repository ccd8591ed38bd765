//! Being a part of the cluster, in the foreground, until SIGTERM or SIGINT.

use std::error::Error;
use std::io::Write;
use std::net::TcpListener;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use aquifer_agent::{AgentOptions, shadow};
use aquifer_directory::embedded;
use aquifer_fabric::tcp::ConnectOptions;
use aquifer_fabric::{shm, tcp};
use aquifer_keeper::{self as keeper, KeeperOptions};
use aquifer_node::{Keep, Listen, NodeOptions, Shutdown};
use rustix::net::SocketType;

use super::key;
use super::lock::Lock;
use super::part::Part;
use super::signals::StopSignal;
use super::source::Source;
use super::systemd;
use crate::Outcome;
use crate::cli::{AgentArguments, Foreground, GRACE_MS, KeeperArguments, NodeArguments, PartCommand};
use crate::say::log_to_stderr;
use crate::settings::{AgentSettings, Network, NodeSettings, complete};
use crate::state::StateDir;
use aquifer_ipc::size::ByteSize;
use aquifer_node::memory::available_bytes;

/// Most that a mempool takes unless it is told otherwise.
const MEMPOOL_BYTES_MAX: u64 = 4 << 30;

/// What a part tells `aquifer up` when it serves.
pub const READY: &[u8] = b"ready\n";

/// Be a part, until it is asked to end.
pub fn be(state: &StateDir, command: PartCommand) -> Outcome {
    state.create()?;
    match command {
        PartCommand::Directory(arguments) => {
            begin(state, Part::Directory, &arguments.foreground, |stop, ready| directory(state, stop, ready))
        }
        PartCommand::Keeper(arguments) => begin(state, Part::Keeper, &arguments.foreground, |stop, ready| {
            keeper(state, &arguments, stop, ready)
        }),
        PartCommand::Node(NodeArguments { config, settings, foreground }) => {
            let settings = complete(settings, config.as_deref(), usual(&foreground, "node.toml"))?;
            let id = settings.id.ok_or("a node must be told its number in the cluster: --id NUMBER")?;
            begin(state, Part::Node(id), &foreground, |stop, ready| node(state, &settings, id, stop, ready))
        }
        PartCommand::Agent(AgentArguments { config, settings, foreground }) => {
            let settings = complete(settings, config.as_deref(), usual(&foreground, "agent.toml"))?;
            begin(state, Part::Agent, &foreground, |stop, ready| agent(state, &settings, stop, ready))
        }
    }
}

/// The machine's own file is for the machine's own parts, not for those of a cluster that `aquifer up` tells all they need.
fn usual<'a>(foreground: &Foreground, name: &'a str) -> Option<&'a str> {
    (!foreground.detached).then_some(name)
}

/// Tells that the part serves.
struct Ready {
    part: Part,
    detached: bool,
}

impl Ready {
    fn tell(self) {
        tracing::info!(pid = std::process::id(), "{} serves", self.part);
        if let Err(error) = systemd::tell_ready() {
            tracing::warn!(%error, "systemd cannot be told that {} serves", self.part);
        }
        if self.detached {
            let mut stdout = std::io::stdout();
            // Whoever started us may be gone; that is no reason to stop.
            let _gone = stdout.write_all(READY).and_then(|()| stdout.flush());
            // Whoever waits for the end of our output shall not wait for ours.
            let null = std::fs::File::options().write(true).open("/dev/null");
            let _kept = null.map(|null| rustix::stdio::dup2_stdout(&null));
        }
    }
}

/// What all parts do before and after.
fn begin(
    state: &StateDir,
    part: Part,
    foreground: &Foreground,
    serve: impl FnOnce(StopSignal, Ready) -> Result<(), Box<dyn Error>>,
) -> Outcome {
    if foreground.detached {
        // Fails only if we lead a group already, and then we are detached enough.
        let _leader = rustix::process::setsid();
        std::env::set_current_dir("/")?;
    }
    let stop = StopSignal::install()?;
    let path = state.lock(&part.to_string());
    let lock = Lock::take(&path).map_err(|error| format!("{} cannot be locked: {error}", path.display()))?;
    let Some(_lock) = lock else {
        return Err(format!("{part} is running already in {}", state.path().display()).into());
    };
    log_to_stderr();
    serve(stop, Ready { part, detached: foreground.detached })?;
    tracing::info!("{part} has stopped");
    Ok(ExitCode::SUCCESS)
}

fn directory(state: &StateDir, stop: StopSignal, ready: Ready) -> Result<(), Box<dyn Error>> {
    let socket = state.socket(&Part::Directory.to_string());
    use std::os::fd::AsFd;
    Ok(embedded::serve(&state.directory_file(), &socket, stop.as_fd(), || ready.tell())?)
}

fn keeper(
    state: &StateDir,
    arguments: &KeeperArguments,
    stop: StopSignal,
    ready: Ready,
) -> Result<(), Box<dyn Error>> {
    let grace = Duration::from_millis(arguments.grace.unwrap_or(GRACE_MS));
    let listener = systemd::listener("keeper", SocketType::SEQPACKET)?;
    let options = KeeperOptions { socket: state.socket(&Part::Keeper.to_string()), grace, listener };
    let stopped = stop_flag(stop)?;
    raise_descriptor_limit();
    keeper::serve(&options, &stopped, || ready.tell())
        .map_err(|error| format!("the keeper cannot serve at {}: {error}", options.socket.display()).into())
}

fn node(
    state: &StateDir,
    settings: &NodeSettings,
    id: u16,
    stop: StopSignal,
    ready: Ready,
) -> Result<(), Box<dyn Error>> {
    let memory = settings.memory.ok_or("a node must be told how much it lends: --memory SIZE")?;
    let shutdown = Shutdown::new();
    let for_signal = shutdown.clone();
    stop.on_stop(move || for_signal.request())?;
    let (source, for_connect) = (Source::new(&settings.directory)?, state.clone());
    let connect = Box::new(move || source.connect(&for_connect));
    let mut options = NodeOptions::new(id, memory, listen(state, settings, id)?, connect);
    options.keep_free_bytes = settings.keep_free;
    options.memory_bytes_max = settings.memory_max.unwrap_or(memory);
    options.advertise = settings.advertise;
    options.metrics.clone_from(&settings.metrics);
    options.keep = settings.grace.map(|grace_ms| Keep {
        keeper: state.socket(&Part::Keeper.to_string()),
        grace: Duration::from_millis(grace_ms),
    });
    Ok(aquifer_node::serve(&options, &shutdown, |_| ready.tell())?)
}

/// Where a node listens: on the socket that systemd has for it, at an address, or for this machine.
fn listen(state: &StateDir, settings: &NodeSettings, id: u16) -> Result<Listen, Box<dyn Error>> {
    let NodeSettings { encrypt, threads, rate_bytes, rate_operations, .. } = settings;
    let given = systemd::listener("node", SocketType::STREAM)?.map(TcpListener::from);
    if given.is_none() && settings.listen.is_none() {
        if settings.advertise.is_some()
            || settings.fabric.is_some()
            || encrypt.is_some()
            || threads.is_some()
            || rate_bytes.is_some()
            || rate_operations.is_some()
        {
            let why = "a fabric, encryption, threads, rates and another address are for nodes that lend over a network: say where, with --listen ADDRESS";
            return Err(why.into());
        }
        let socket = state.socket(&Part::Node(id).to_string());
        return Ok(Listen::Shm(socket, shm::Options::default()));
    }
    let is_over_verbs = settings.fabric == Some(Network::Verbs);
    let mut options = tcp::Options::default();
    options.encrypt = encrypt.unwrap_or(options.encrypt);
    options.threads = threads.map_or(options.threads, usize::from);
    options.rate = tcp::Rate { bytes_per_s: *rate_bytes, operations_per_s: rate_operations.map(u64::from) };
    let key = key::load(&settings.key.clone().unwrap_or_else(|| state.key_file()))?;
    let address = match &given {
        Some(listener) => listener.local_addr()?,
        None => settings.listen.expect("one of the two is there"),
    };
    if settings.advertise.unwrap_or(address).ip().is_unspecified() {
        let why = format!(
            "{address} is every address of this machine and none that others can go to: say with --advertise by which they reach it"
        );
        return Err(why.into());
    }
    if is_over_verbs {
        let is_asked = encrypt.unwrap_or(false)
            || threads.is_some()
            || rate_bytes.is_some()
            || rate_operations.is_some();
        if is_asked || given.is_some() {
            let why = "over verbs the devices do all the work: they do not encrypt, have no threads and no rates, and take no socket from systemd";
            return Err(why.into());
        }
        return Ok(Listen::Verbs(address, key));
    }
    Ok(match given {
        Some(listener) => Listen::TcpOn(Arc::new(listener), key, Box::new(options)),
        None => Listen::Tcp(address, key, Box::new(options)),
    })
}

fn agent(
    state: &StateDir,
    settings: &AgentSettings,
    stop: StopSignal,
    ready: Ready,
) -> Result<(), Box<dyn Error>> {
    let keeper = state.socket(&Part::Keeper.to_string());
    let shadow =
        shadow::start(&keeper).map_err(|error| format!("the agent cannot have a shadow: {error}"))?;
    let available = available_bytes()?;
    let mempool = match settings.mempool {
        Some(asked) if asked > available => {
            let (asked, available) = (ByteSize(asked), ByteSize(available));
            return Err(format!(
                "a mempool of {asked} does not fit: only {available} of memory are available"
            )
            .into());
        }
        Some(asked) => asked,
        None => (available / 2).min(MEMPOOL_BYTES_MAX),
    };
    let mut connect = ConnectOptions::default();
    connect.encrypt = settings.encrypt.unwrap_or(connect.encrypt);
    let options = AgentOptions {
        socket: state.agent_socket(),
        shared_socket: settings.shared_socket.clone(),
        keeper,
        directory: Source::new(&settings.directory)?.connect(state)?,
        directory_place: serde_json::to_string(&settings.directory)?,
        mempool_bytes: usize::try_from(mempool)?,
        extents_per_user: settings.extents_per_user,
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
    };
    let stopped = stop_flag(stop)?;
    raise_descriptor_limit();
    aquifer_agent::serve(&options, &stopped, || ready.tell())?;
    shadow.dismiss();
    Ok(())
}

/// Each paged program needs a dozen descriptors, in the agent as in the keeper: allow as many as the system lets us.
fn raise_descriptor_limit() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    let wanted = Rlimit { current: limit.maximum, maximum: limit.maximum };
    if let Err(error) = setrlimit(Resource::Nofile, wanted) {
        tracing::warn!(%error, ?limit, "the limit of open files stays: it bounds how many programs can be paged");
    }
}

fn stop_flag(stop: StopSignal) -> std::io::Result<Arc<AtomicBool>> {
    let stopped = Arc::new(AtomicBool::new(false));
    let for_signal = Arc::clone(&stopped);
    stop.on_stop(move || for_signal.store(true, Ordering::Relaxed))?;
    Ok(stopped)
}
