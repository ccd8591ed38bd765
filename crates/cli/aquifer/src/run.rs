//! `aquifer run`: runs an unmodified program on the pool, with its exit code, signals, input and
//! output.

mod connection;
mod executable;
mod signals;
mod swap;

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::Write;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus};

use aquifer_agent::Backup;
use aquifer_ipc::{EXIT_FAILED, OpenRun, RUN_VARIABLE, RunToken, SOCKET_VARIABLE};
use rustix::process::WaitOptions;

use connection::{RunConnection, on_agent_gone};
pub use executable::ExecutableError;
use swap::SwapServer;
pub use swap::{SwapOptions, serve_swap};

/// Exit code if the program cannot be executed, the same as that of `env`.
const EXIT_NOT_EXECUTABLE: i32 = 126;
/// Exit code if there is no such program, the same as that of `env`.
const EXIT_NOT_FOUND: i32 = 127;
/// File of the shim, in the folder of this binary.
const SHIM: &str = "libaquifer_shim.so";

/// Options of `aquifer run`.
#[derive(Clone, Debug)]
pub struct RunOptions {
    /// Socket of the agent.
    pub agent_socket: PathBuf,
    /// Limit of resident memory, including the run's part of the mempool, in bytes.
    pub local_bytes: u64,
    /// Limit while the host has idle memory, in bytes; `None` for the agent's default.
    pub local_max_bytes: Option<u64>,
    /// Number of memory nodes that hold a copy of each page.
    pub replicas: u32,
    /// When pages have a copy on a disk node; `None` for the agent's default.
    pub backup: Option<Backup>,
    /// Options of the swap device, if the program is paged by kernel swap.
    pub swap: Option<SwapOptions>,
    /// Whether the program continues if this process is killed.
    pub detach: bool,
    /// Whether the run ends when one of its processes is not paged.
    pub strict: bool,
    /// Milliseconds for which the run waits for room in a full pool; `None` for the agent's
    /// default.
    pub wait_for_room_ms: Option<u64>,
    /// File for the statistics.
    pub stats: Option<PathBuf>,
    /// The program and its arguments.
    pub command: Vec<OsString>,
}

/// Why a program did not run, or was ended.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// The program cannot be executed or paged.
    #[error(transparent)]
    Executable(#[from] ExecutableError),
    /// No agent listens at the socket.
    #[error("no agent answers at {path}: no cluster is up, or its agent has ended; start it with `aquifer \
        up`, or as it was started", path = path.display())]
    NoCluster {
        /// The socket.
        path: PathBuf,
    },
    /// A process of another user listens at the socket.
    #[error("not run on the pool: {0}")]
    OtherUser(std::io::Error),
    /// The agent or the swap server refused the run, with this reason.
    #[error("{0}")]
    Refused(String),
    /// The connection to the agent failed.
    #[error("connection to the agent failed: {0}")]
    Agent(std::io::Error),
    /// The shim is missing.
    #[error("{path} is missing: it must be in the folder of the aquifer binary (cargo build --release \
        makes both)", path = path.display())]
    NoShim {
        /// The expected path.
        path: PathBuf,
    },
    /// The shim has a path that LD_PRELOAD cannot have.
    #[error("{path} cannot be loaded, because its path has a space or a colon: move the folder of the \
        aquifer binary", path = path.display())]
    ShimPath {
        /// The path.
        path: PathBuf,
    },
    /// `--swap` without root.
    #[error(
        "--swap needs root, since it creates a cgroup and a swap device: run as root, or without --swap \
            if the program is dynamically linked"
    )]
    SwapNeedsRoot,
    /// `--swap` with more than one replica.
    #[error(
        "--swap keeps one copy of each page: run without --replicas and AQUIFER_REPLICAS, or without --swap"
    )]
    SwapWithReplicas,
    /// A swap device has no copies on disks.
    #[error("--swap keeps no copy on a disk: run without --backup and AQUIFER_BACKUP, or without --swap")]
    SwapWithBackup,
    /// `--swap` with `--detach`.
    #[error("--swap ends with `aquifer run`: run without --detach, or without --swap")]
    SwapDetached,
    /// `--swap` with `--strict`.
    #[error("--swap pages all processes of a run: run without --strict, or without --swap")]
    SwapStrict,
    /// `--swap` with `--wait-for-room`.
    #[error("the kernel's swap does not wait for room: run without --wait-for-room, or without --swap")]
    SwapWait,
    /// The swap server cannot be started, or failed.
    #[error("swap server failed: {0}")]
    SwapServer(std::io::Error),
    /// The file for the statistics cannot be created.
    #[error("cannot create statistics file {path}: {source}", path = path.display())]
    Stats {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// The program could not be started.
    #[error("{program} cannot be started: {source}", program = program.display())]
    Start {
        /// The program.
        program: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// The agent or the keeper ended the program.
    #[error("{program} was ended: {reason}", program = program.display())]
    Ended {
        /// The program.
        program: PathBuf,
        /// The reason.
        reason: String,
    },
}

impl RunError {
    /// The exit code of `aquifer run` for this error.
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

/// Whether a program is known to have its data in executable memory, which is not paged.
pub fn has_executable_heap(program: &Path) -> bool {
    executable::has_executable_heap(program)
}

/// Finds a program, and checks that it can be paged by the shim.
///
/// # Errors
/// The reason why it cannot be paged.
pub fn check_program(name: &OsStr) -> Result<PathBuf, ExecutableError> {
    let program = executable::find(name)?;
    executable::check(&program).map(|()| program)
}

/// Runs a program and returns its exit code.
///
/// If a signal ended the program, this process ends by the same signal.
///
/// # Errors
/// If the program could not be run, or if the agent or the keeper ended it.
pub fn run(options: &RunOptions) -> Result<i32, RunError> {
    let program = executable::find(&options.command[0])?;
    match &options.swap {
        None => run_on_agent(options, program),
        Some(_) if options.replicas > 1 => Err(RunError::SwapWithReplicas),
        Some(_) if options.backup.is_some() => Err(RunError::SwapWithBackup),
        Some(_) if options.detach => Err(RunError::SwapDetached),
        Some(_) if options.strict => Err(RunError::SwapStrict),
        Some(_) if options.wait_for_room_ms.is_some() => Err(RunError::SwapWait),
        Some(swap) => run_on_swap(options, swap, program),
    }
}

fn run_on_agent(options: &RunOptions, program: PathBuf) -> Result<i32, RunError> {
    let shim = shim_path()?;
    executable::check(&program)?;
    let stats = options.stats.as_deref().map(open_stats).transpose()?;
    let open = OpenRun {
        limit_bytes: options.local_bytes,
        limit_max_bytes: options.local_max_bytes,
        replicas: options.replicas,
        backup: options.backup.map(Backup::code),
        outlives_owner: options.detach,
        is_strict: options.strict,
        wait_for_room_ms: options.wait_for_room_ms,
        name: name_of(&program),
    };
    let mut connection = RunConnection::open(&options.agent_socket, &open)?;
    signals::install();
    let mut command = Command::new(&program);
    prepare(&mut command, options, &shim, &connection);
    let status = run_to_exit(options, &program, command, &mut connection, on_agent_gone())?;
    let statistics = connection.close();
    finish(program, status, &connection, statistics, stats)
}

fn run_on_swap(options: &RunOptions, swap: &SwapOptions, program: PathBuf) -> Result<i32, RunError> {
    executable::check_startable(&program)?;
    let stats = options.stats.as_deref().map(open_stats).transpose()?;
    let (server, socket) = SwapServer::start(options, swap, &name_of(&program))?;
    let mut connection = RunConnection::new(socket, RunToken([0; 16]));
    signals::install();
    let command = server.command(&program)?;
    let status = run_to_exit(options, &program, command, &mut connection, server.on_gone())?;
    let statistics = connection.close();
    if statistics.is_none() {
        connection.join_listener();
    }
    server.reap();
    finish(program, status, &connection, statistics, stats)
}

/// Starts the program, forwards signals to it, and waits for its end.
fn run_to_exit(
    options: &RunOptions,
    program: &Path,
    mut command: Command,
    connection: &mut RunConnection,
    on_gone: impl FnOnce() -> String + Send + 'static,
) -> Result<ExitStatus, RunError> {
    signals::inherit(&mut command);
    let started = command.arg0(&options.command[0]).args(&options.command[1..]).spawn();
    let mut child = started.map_err(|source| RunError::Start { program: program.to_owned(), source })?;
    signals::forward_to(child.id());
    connection.listen(on_gone);
    let status = wait(&mut child);
    signals::forward_to(0);
    Ok(status)
}

/// Writes the statistics, and returns the program's exit code, or why the program was ended.
///
/// A failed write is reported, but does not replace the program's exit code.
fn finish(
    program: PathBuf,
    status: ExitStatus,
    connection: &RunConnection,
    statistics: Option<String>,
    stats: Option<(File, PathBuf)>,
) -> Result<i32, RunError> {
    if let (Some((mut file, path)), Some(statistics)) = (stats, statistics)
        && let Err(error) = writeln!(file, "{statistics}")
    {
        crate::say::say_error!("cannot write statistics to {}: {error}", path.display());
    }
    // A program that touches a lost page gets SIGBUS, perhaps before it is killed.
    let ending_signals =
        [rustix::process::Signal::KILL, rustix::process::Signal::BUS].map(|signal| Some(signal.as_raw()));
    if let Some(reason) = connection.reason().filter(|_| ending_signals.contains(&status.signal())) {
        return Err(RunError::Ended { program, reason });
    }
    if status.core_dumped() {
        crate::say::say_error!(
            "the core dump has zeros for pages that were not resident; aquifer core PID writes a whole one \
             of a running program"
        );
    }
    Ok(exit_code(status))
}

fn name_of(program: &Path) -> String {
    program.file_name().unwrap_or(program.as_os_str()).to_string_lossy().into_owned()
}

fn shim_path() -> Result<PathBuf, RunError> {
    let own = std::env::current_exe().map_err(RunError::Agent)?;
    let path = own.with_file_name(SHIM);
    if !path.exists() {
        return Err(RunError::NoShim { path });
    }
    // LD_PRELOAD is a list with these separators, which cannot be quoted.
    let is_listable =
        !path.as_os_str().as_bytes().iter().any(|byte| byte.is_ascii_whitespace() || *byte == b':');
    if is_listable { Ok(path) } else { Err(RunError::ShimPath { path }) }
}

fn open_stats(path: &Path) -> Result<(File, PathBuf), RunError> {
    let file = File::create(path).map_err(|source| RunError::Stats { path: path.to_owned(), source })?;
    Ok((file, path.to_owned()))
}

/// Adds the shim to LD_PRELOAD, and passes the agent's socket and the run's token to it.
fn prepare(command: &mut Command, options: &RunOptions, shim: &Path, connection: &RunConnection) {
    let mut preload = shim.as_os_str().to_owned();
    if let Some(others) = std::env::var_os("LD_PRELOAD").filter(|others| !others.is_empty()) {
        preload.push(":");
        preload.push(others);
    }
    command
        .env("LD_PRELOAD", preload)
        .env(SOCKET_VARIABLE, &options.agent_socket)
        .env(RUN_VARIABLE, connection.token().to_hex());
}

fn wait(child: &mut Child) -> ExitStatus {
    if std::process::id() == 1
        && let Some(status) = wait_as_init(child.id())
    {
        return status;
    }
    loop {
        match child.wait() {
            Ok(status) => return status,
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            // The process is a child that was not waited for yet, so there is no other error.
            Err(error) => panic!("wait for the program failed: {error}"),
        }
    }
}

/// Waits for the child as the first process of a PID namespace, such as that of a container:
/// processes whose parents have ended become its children, and it must reap them.
fn wait_as_init(child: u32) -> Option<ExitStatus> {
    loop {
        match rustix::process::wait(WaitOptions::empty()) {
            Ok(Some((pid, status))) if pid.as_raw_nonzero().get().unsigned_abs() == child => {
                return Some(ExitStatus::from_raw(status.as_raw()));
            }
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(_) => return None,
        }
    }
}

/// The exit code of the program. If a signal ended it, ends this process by the same signal.
fn exit_code(status: ExitStatus) -> i32 {
    match (status.code(), status.signal()) {
        (Some(code), _) => code,
        (None, Some(signal)) => {
            signals::die_by(signal);
            128 + signal
        }
        (None, None) => EXIT_FAILED,
    }
}
