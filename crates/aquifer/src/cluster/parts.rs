//! Being a part of the cluster, in the foreground, until SIGTERM or SIGINT.

use std::error::Error;
use std::io::Write;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use aquifer_agent::keeper::{self, KeeperOptions};
use aquifer_agent::{AgentOptions, shadow};
use aquifer_directory::{Directory, DirectoryError, embedded};
use aquifer_fabric::shm;
use aquifer_node::{Listen, NodeOptions, Shutdown};
use tracing_subscriber::EnvFilter;

use super::key;
use super::lock::Lock;
use super::memory::available_bytes;
use super::part::Part;
use super::signals::StopSignal;
use crate::Outcome;
use crate::cli::{AgentArguments, Foreground, GRACE_MS, KeeperArguments, NodeArguments, PartCommand};
use crate::size::Size;
use crate::state::StateDir;

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
        PartCommand::Node(arguments) => {
            let part = Part::Node(arguments.id);
            begin(state, part, &arguments.foreground, |stop, ready| node(state, &arguments, stop, ready))
        }
        PartCommand::Agent(arguments) => begin(state, Part::Agent, &arguments.foreground, |stop, ready| {
            agent(state, &arguments, stop, ready)
        }),
    }
}

/// Tells that the part serves.
struct Ready {
    part: Part,
    detached: bool,
}

impl Ready {
    fn tell(self) {
        tracing::info!(pid = std::process::id(), "{} serves", self.part);
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
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info"));
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).with_ansi(false).init();
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
    let options = KeeperOptions { socket: state.socket(&Part::Keeper.to_string()), grace };
    let stopped = stop_flag(stop)?;
    keeper::serve(&options, &stopped, || ready.tell())
        .map_err(|error| format!("the keeper cannot serve at {}: {error}", options.socket.display()).into())
}

fn node(
    state: &StateDir,
    arguments: &NodeArguments,
    stop: StopSignal,
    ready: Ready,
) -> Result<(), Box<dyn Error>> {
    let shutdown = Shutdown::new();
    let for_signal = shutdown.clone();
    stop.on_stop(move || for_signal.request())?;
    let for_connect = state.clone();
    let connect = Box::new(move || connect(&for_connect));
    let listen = match arguments.listen {
        None => Listen::Shm(state.socket(&Part::Node(arguments.id).to_string()), shm::Options::default()),
        Some(address) => {
            let path = arguments.key.clone().unwrap_or_else(|| state.key_file());
            Listen::Tcp(address, key::load(&path)?, Box::default())
        }
    };
    let options = NodeOptions::new(arguments.id, arguments.memory, listen, connect);
    Ok(aquifer_node::serve(&options, &shutdown, |_| ready.tell())?)
}

fn agent(
    state: &StateDir,
    arguments: &AgentArguments,
    stop: StopSignal,
    ready: Ready,
) -> Result<(), Box<dyn Error>> {
    let keeper = state.socket(&Part::Keeper.to_string());
    let shadow =
        shadow::start(&keeper).map_err(|error| format!("the agent cannot have a shadow: {error}"))?;
    let available = available_bytes()?;
    let mempool = match arguments.mempool {
        Some(asked) if asked > available => {
            let (asked, available) = (Size(asked), Size(available));
            return Err(format!(
                "a mempool of {asked} does not fit: only {available} of memory are available"
            )
            .into());
        }
        Some(asked) => asked,
        None => (available / 2).min(MEMPOOL_BYTES_MAX),
    };
    let options = AgentOptions {
        socket: state.agent_socket(),
        keeper,
        directory: connect(state)?,
        mempool_bytes: usize::try_from(mempool)?,
        key: match &arguments.key {
            Some(path) => Some(key::load(path)?),
            None => Some(state.key_file())
                .filter(|path| path.exists())
                .map(|path| key::load(&path))
                .transpose()?,
        },
    };
    let stopped = stop_flag(stop)?;
    aquifer_agent::serve(&options, &stopped, || ready.tell())?;
    shadow.dismiss();
    Ok(())
}

/// The cluster's directory.
pub fn connect(state: &StateDir) -> Result<Arc<dyn Directory>, DirectoryError> {
    let client = embedded::connect(&state.socket(&Part::Directory.to_string()))?;
    Ok(Arc::new(client))
}

fn stop_flag(stop: StopSignal) -> std::io::Result<Arc<AtomicBool>> {
    let stopped = Arc::new(AtomicBool::new(false));
    let for_signal = Arc::clone(&stopped);
    stop.on_stop(move || for_signal.store(true, Ordering::Relaxed))?;
    Ok(stopped)
}
