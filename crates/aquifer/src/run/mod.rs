//! `aquifer run`: start an unmodified program on the pool, and be it for everyone who looks: its exit code, its signals,
//! its input and output.

mod agent_link;
mod executable;
mod signals;

use std::ffi::OsString;
use std::fs::File;
use std::io::Write;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus};

use aquifer_ipc::{EXIT_FAILED, RUN_VARIABLE, SOCKET_VARIABLE};

use agent_link::AgentLink;
pub use executable::ExecutableError;

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
    let shim = shim_path()?;
    let program = executable::find(&options.command[0])?;
    executable::check(&program)?;
    let mut stats = options.stats.as_deref().map(open_stats).transpose()?;
    let name = program.file_name().unwrap_or(program.as_os_str()).to_string_lossy().into_owned();
    let mut link = AgentLink::open(&options.agent_socket, &name, options.local_bytes, options.replicas)?;
    signals::install();
    let mut child = start(options, &program, &shim, &link)?;
    signals::forward_to(child.id());
    link.listen(&name);
    let status = wait(&mut child);
    signals::forward_to(0);
    let statistics = link.close();
    if let (Some((file, path)), Some(statistics)) = (&mut stats, &statistics) {
        writeln!(file, "{statistics}").map_err(|source| RunError::Stats { path: path.clone(), source })?;
    }
    if let Some(reason) =
        link.reason().filter(|_| status.signal() == Some(rustix::process::Signal::KILL.as_raw()))
    {
        return Err(RunError::Ended { program, reason });
    }
    Ok(pass_on(status))
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

fn start(options: &RunOptions, program: &Path, shim: &Path, link: &AgentLink) -> Result<Child, RunError> {
    let mut preload = shim.as_os_str().to_owned();
    if let Some(others) = std::env::var_os("LD_PRELOAD").filter(|others| !others.is_empty()) {
        preload.push(":");
        preload.push(others);
    }
    Command::new(program)
        .arg0(&options.command[0])
        .args(&options.command[1..])
        .env("LD_PRELOAD", preload)
        .env(SOCKET_VARIABLE, &options.agent_socket)
        .env(RUN_VARIABLE, link.token().to_hex())
        .spawn()
        .map_err(|source| RunError::Start { program: program.to_owned(), source })
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
