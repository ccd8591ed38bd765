//! `aquifer run`: start an unmodified program on the pool, and be it for everyone who looks: its exit code, its signals,
//! its input and output.

mod agent_link;
mod executable;
mod signals;
mod swap;

use std::ffi::OsString;
use std::fs::File;
use std::io::Write;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus};

use aquifer_ipc::{EXIT_FAILED, RUN_VARIABLE, RunToken, SOCKET_VARIABLE};

use agent_link::{AgentLink, agent_is_gone};
pub use executable::ExecutableError;
use swap::SwapServer;
pub use swap::{SwapOptions, serve_swap};

/// The program cannot be executed, as of `env`.
const EXIT_NOT_EXECUTABLE: i32 = 126;
/// There is no such program, as of `env`.
const EXIT_NOT_FOUND: i32 = 127;
const SHIM: &str = "libaquifer_shim.so";

/// What `aquifer run` is asked to do.
#[derive(Clone, Debug)]
pub struct RunOptions {
    /// Where the agent listens.
    pub agent_socket: PathBuf,
    /// Resident memory and mempool share together, in bytes.
    pub local_bytes: u64,
    /// Memory nodes that each page is to be on.
    pub replicas: u32,
    /// Kernel swap on a device of ours, for what nothing can be loaded into.
    pub swap: Option<SwapOptions>,
    /// Where to write statistics.
    pub stats: Option<PathBuf>,
    /// The program and its arguments.
    pub command: Vec<OsString>,
}

/// Why a program was not run, or was ended.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// The program.
    #[error(transparent)]
    Executable(#[from] ExecutableError),
    /// No agent.
    #[error("no cluster is up (nothing answers at {path}): start one with `aquifer up`", path = path.display())]
    NoCluster {
        /// Where it was looked for.
        path: PathBuf,
    },
    /// The agent said no.
    #[error("{0}")]
    Refused(String),
    /// The connection to the agent failed.
    #[error("the agent does not answer as it should: {0}")]
    Agent(std::io::Error),
    /// The build is incomplete.
    #[error("{path} is missing: it must lie beside the aquifer program (cargo build --release makes both)", path = path.display())]
    NoShim {
        /// Where it should be.
        path: PathBuf,
    },
    /// Not root.
    #[error(
        "--swap makes a cgroup and a swap device, which is for root only: run as root, or without --swap if the program is dynamically linked"
    )]
    SwapIsRoots,
    /// No device.
    #[error("the server of the swap device does not work: {0}")]
    SwapServer(std::io::Error),
    /// The statistics cannot be written.
    #[error("cannot write statistics to {path}: {source}", path = path.display())]
    Stats {
        /// Where.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// It could not be started.
    #[error("{program}: {source}", program = program.display())]
    Start {
        /// The program.
        program: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// The agent or the keeper ended it.
    #[error("{program} was ended: {reason}", program = program.display())]
    Ended {
        /// The program.
        program: PathBuf,
        /// Why.
        reason: String,
    },
}

impl RunError {
    /// The exit code that says the same to scripts.
    #[must_use]
    pub fn exit_code(&self) -> i32 {
        match self {
            Self::Executable(ExecutableError::NotFound { .. }) => EXIT_NOT_FOUND,
            Self::Executable(_) => EXIT_NOT_EXECUTABLE,
            Self::Start { source, .. } if source.kind() == std::io::ErrorKind::NotFound => EXIT_NOT_FOUND,
            Self::Start { .. } => EXIT_NOT_EXECUTABLE,
            _ => EXIT_FAILED,
        }
    }
}

/// Run a program; returns its exit code. If a signal ended it, this process ends by the same one.
///
/// # Errors
/// If it could not be run on the pool, or was ended because the pool could not go on.
pub fn run(options: &RunOptions) -> Result<i32, RunError> {
    let program = executable::find(&options.command[0])?;
    match &options.swap {
        None => run_on_agent(options, program),
        Some(swap) => run_on_swap(options, swap, program),
    }
}

fn run_on_agent(options: &RunOptions, program: PathBuf) -> Result<i32, RunError> {
    let shim = shim_path()?;
    executable::check(&program)?;
    let stats = options.stats.as_deref().map(open_stats).transpose()?;
    let name = name_of(&program);
    let mut link = AgentLink::open(&options.agent_socket, &name, options.local_bytes, options.replicas)?;
    signals::install();
    let mut command = Command::new(&program);
    prepare(&mut command, options, &shim, &link);
    let status = attend(options, &program, command, &mut link, agent_is_gone(name))?;
    let statistics = link.close();
    end(program, status, &link, statistics, stats)
}

fn run_on_swap(options: &RunOptions, swap: &SwapOptions, program: PathBuf) -> Result<i32, RunError> {
    executable::check_startable(&program)?;
    let stats = options.stats.as_deref().map(open_stats).transpose()?;
    let (server, socket) = SwapServer::start(options, swap, &name_of(&program))?;
    let mut link = AgentLink::over(socket, RunToken([0; 16]));
    signals::install();
    let command = server.command(&program)?;
    let status = attend(options, &program, command, &mut link, server.on_gone())?;
    let statistics = link.close();
    if statistics.is_none() {
        link.settle();
    }
    server.reap();
    end(program, status, &link, statistics, stats)
}

/// Start the program and wait for its end; signals go to it.
fn attend(
    options: &RunOptions,
    program: &Path,
    mut command: Command,
    link: &mut AgentLink,
    on_gone: impl FnOnce() -> String + Send + 'static,
) -> Result<ExitStatus, RunError> {
    let started = command.arg0(&options.command[0]).args(&options.command[1..]).spawn();
    let mut child = started.map_err(|source| RunError::Start { program: program.to_owned(), source })?;
    signals::forward_to(child.id());
    link.listen(on_gone);
    let status = wait(&mut child);
    signals::forward_to(0);
    Ok(status)
}

/// What the program's end is to whoever started it.
fn end(
    program: PathBuf,
    status: ExitStatus,
    link: &AgentLink,
    statistics: Option<String>,
    stats: Option<(File, PathBuf)>,
) -> Result<i32, RunError> {
    if let (Some((mut file, path)), Some(statistics)) = (stats, statistics) {
        writeln!(file, "{statistics}").map_err(|source| RunError::Stats { path, source })?;
    }
    // What was swapped and cannot be had raises SIGBUS, when it is touched before the program is ended.
    let ends =
        [rustix::process::Signal::KILL, rustix::process::Signal::BUS].map(|signal| Some(signal.as_raw()));
    if let Some(reason) = link.reason().filter(|_| ends.contains(&status.signal())) {
        return Err(RunError::Ended { program, reason });
    }
    Ok(pass_on(status))
}

fn name_of(program: &Path) -> String {
    program.file_name().unwrap_or(program.as_os_str()).to_string_lossy().into_owned()
}

fn shim_path() -> Result<PathBuf, RunError> {
    let own = std::env::current_exe().map_err(RunError::Agent)?;
    let path = own.with_file_name(SHIM);
    if path.exists() { Ok(path) } else { Err(RunError::NoShim { path }) }
}

fn open_stats(path: &Path) -> Result<(File, PathBuf), RunError> {
    let file = File::create(path).map_err(|source| RunError::Stats { path: path.to_owned(), source })?;
    Ok((file, path.to_owned()))
}

fn prepare(command: &mut Command, options: &RunOptions, shim: &Path, link: &AgentLink) {
    let mut preload = shim.as_os_str().to_owned();
    if let Some(others) = std::env::var_os("LD_PRELOAD").filter(|others| !others.is_empty()) {
        preload.push(":");
        preload.push(others);
    }
    command
        .env("LD_PRELOAD", preload)
        .env(SOCKET_VARIABLE, &options.agent_socket)
        .env(RUN_VARIABLE, link.token().to_hex());
}

fn wait(child: &mut Child) -> ExitStatus {
    loop {
        match child.wait() {
            Ok(status) => return status,
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            // It is our own child, so there is nothing else that could go wrong.
            Err(error) => panic!("waiting for the program failed: {error}"),
        }
    }
}

fn pass_on(status: ExitStatus) -> i32 {
    match (status.code(), status.signal()) {
        (Some(code), _) => code,
        (None, Some(signal)) => {
            signals::die_by(signal);
            128 + signal
        }
        (None, None) => EXIT_FAILED,
    }
}
