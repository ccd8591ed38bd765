//! Start of daemons in the background.

use std::fs::{File, OpenOptions};
use std::io::{self, PipeReader, Read, Seek, SeekFrom};
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};

use super::config::ClusterConfig;
use super::daemon::Daemon;
use super::lock::{LockHolder, holder};
use super::serve::READY;
use super::signals::StopSignal;
use crate::state::StateDir;

/// Timeout of a daemon's start. Nodes take longest, because they initialise their memory.
const READY_TIMEOUT: Duration = Duration::from_secs(60);
/// A log longer than this is renamed to `*.log.old` when its daemon starts again.
const LOG_BYTES_MAX: u64 = 4 << 20;
/// Number of lines of a log that are shown when its daemon fails.
const TAIL_LINES: usize = 10;
/// Bytes at the end of a log that are read for these lines.
const TAIL_BYTES_MAX: u64 = 16 << 10;

/// The option that identifies a daemon of `aquifer up`.
pub const DETACHED_FLAG: &str = "--detached";

/// Why a daemon cannot be started, or its process cannot be found.
#[derive(Debug, thiserror::Error)]
pub enum LaunchError {
    /// A system call failed.
    #[error("{daemon} cannot be started: {what}: {source}")]
    System {
        /// The daemon.
        daemon: Daemon,
        /// The part of the start that failed.
        what: &'static str,
        /// The system's error.
        source: io::Error,
    },
    /// The daemon ended before it served.
    #[error("{daemon} did not start; the end of its log {log}:\n{tail}", log = log.display())]
    Failed {
        /// The daemon.
        daemon: Daemon,
        /// The log file of the daemon.
        log: PathBuf,
        /// The last lines of the log.
        tail: String,
    },
    /// The daemon did not serve in time.
    #[error("{daemon} did not serve within {} s and was killed; the end of its log \
        {log}:\n{tail}", READY_TIMEOUT.as_secs(), log = log.display())]
    Late {
        /// The daemon.
        daemon: Daemon,
        /// The log file of the daemon.
        log: PathBuf,
        /// The last lines of the log.
        tail: String,
    },
    /// The process that started the daemon was asked to stop.
    #[error("{daemon} was killed while it started, because the supervisor was asked to stop")]
    Stopped {
        /// The daemon.
        daemon: Daemon,
    },
    /// The lock of the daemon cannot be read.
    #[error("cannot determine whether {daemon} runs: {source}")]
    Unknown {
        /// The daemon.
        daemon: Daemon,
        /// The system's error.
        source: io::Error,
    },
}

/// A started daemon that may not serve yet.
#[derive(Debug)]
pub struct StartingDaemon {
    daemon: Daemon,
    child: Child,
    output: PipeReader,
    log: PathBuf,
    log_start: u64,
}

/// Starts a daemon in the background.
///
/// # Errors
/// If the process cannot be started.
pub fn start(
    state: &StateDir,
    config: &ClusterConfig,
    daemon: Daemon,
) -> Result<StartingDaemon, LaunchError> {
    let error = |what| move |source| LaunchError::System { daemon, what, source };
    let log = state.log(&daemon.to_string());
    let mut file = open_log(&log).map_err(error("its log"))?;
    let log_start = file.seek(SeekFrom::End(0)).map_err(error("its log"))?;
    let (output, input) = io::pipe().map_err(error("a pipe"))?;
    let mut command = Command::new(own_program().map_err(error("its program"))?);
    command.arg("--state").arg(state.path());
    match daemon {
        Daemon::Directory => command.arg("directory"),
        Daemon::Supervisor => command.arg("supervisor"),
        Daemon::Keeper => command.args(["keeper", "--grace", &format!("{}ms", config.grace_ms)]),
        Daemon::Node(id) if config.disk_node() == Some(id) => command
            .args(["node", "--id", &id.to_string(), "--disk"])
            .arg(config.disk_directory())
            .args(config.disk_bytes.map(|bytes| format!("--memory={bytes}")))
            .args(config.keep_memory.then(|| format!("--grace={}ms", config.grace_ms)))
            .args(config.disk_port.map(|port| format!("--listen=127.0.0.1:{port}")))
            // Its pages are encrypted on the disk; on the loopback device others cannot see them.
            .arg("--encrypt=false")
            .args(config.directory_flags()),
        Daemon::Node(id) => command
            .args(["node", "--id", &id.to_string()])
            .args(["--memory", &config.memory_bytes.to_string()])
            .args(config.memory_bytes_max.map(|bytes| format!("--memory-max={bytes}")))
            .args(config.keep_memory.then(|| format!("--grace={}ms", config.grace_ms)))
            .args(config.ports.get(usize::from(id) - 1).map(|port| format!("--listen=127.0.0.1:{port}")))
            .args(config.directory_flags()),
        Daemon::Heaps(id) => command
            .args(["heap-service", "--id", &id.to_string()])
            .args(config.heap_memory_bytes.map(|bytes| format!("--memory={bytes}")))
            .args(["--grace", &format!("{}ms", config.grace_ms)])
            .args(config.heap_ports.get(usize::from(id) - 1).map(|port| format!("--listen=127.0.0.1:{port}")))
            .args(config.directory_flags()),
        Daemon::Agent => command
            .args(["agent", "--grace", &format!("{}ms", config.grace_ms)])
            .args(config.mempool_bytes.map(|bytes| format!("--mempool={bytes}")))
            .args(config.cache_per_user.map(|bytes| format!("--cache-per-user={bytes}")))
            .args(config.extents_per_user.map(|bytes| format!("--extents-per-user={bytes}")))
            .args(config.pages_per_user.map(|bytes| format!("--pages-per-user={bytes}")))
            .args(config.move_rate.map(|bytes| format!("--move-rate={bytes}")))
            .args(config.shared_socket.as_ref().map(|path| format!("--shared-socket={}", path.display())))
            .args(config.directory_flags()),
    };
    command.arg(DETACHED_FLAG).stdin(Stdio::null()).stdout(input).stderr(file);
    let child = command.spawn().map_err(error("its program"))?;
    Ok(StartingDaemon { daemon, child, output, log, log_start })
}

impl StartingDaemon {
    /// Process number of the daemon.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Waits until the daemon serves.
    ///
    /// # Errors
    /// If the daemon ends before, or does not serve in time; then it is killed.
    pub fn wait(self) -> Result<(), LaunchError> {
        self.wait_for(None)
    }

    /// Waits until the daemon serves, or this process is asked to stop; then the daemon is killed.
    ///
    /// # Errors
    /// Those of [`Self::wait`], and if this process is asked to stop.
    pub fn wait_unless_stopped(self, stop: &mut StopSignal) -> Result<(), LaunchError> {
        self.wait_for(Some(stop))
    }

    fn wait_for(mut self, mut stop: Option<&mut StopSignal>) -> Result<(), LaunchError> {
        let end = Instant::now() + READY_TIMEOUT;
        let mut received = Vec::new();
        while !received.ends_with(READY) {
            let error = |source| LaunchError::System { daemon: self.daemon, what: "its output", source };
            let left = || end.saturating_duration_since(Instant::now());
            if let Some(stop) = &mut stop
                && stop.wait_or(&[self.output.as_fd()], Some(left())).is_some()
            {
                self.kill();
                return Err(LaunchError::Stopped { daemon: self.daemon });
            }
            if !wait_readable(&self.output, left()).map_err(error)? {
                self.kill();
                return Err(LaunchError::Late { daemon: self.daemon, tail: self.tail(), log: self.log });
            }
            let mut chunk = [0; 64];
            let count = self.output.read(&mut chunk).map_err(error)?;
            received.extend_from_slice(&chunk[..count]);
            if count == 0 || received.len() > 1024 {
                self.kill();
                return Err(LaunchError::Failed { daemon: self.daemon, tail: self.tail(), log: self.log });
            }
        }
        Ok(())
    }

    fn kill(&mut self) {
        // Fails if the process has ended.
        let _ended = self.child.kill();
        let _waited = self.child.wait();
    }

    /// The last lines that the daemon has written to its log since its start.
    fn tail(&self) -> String {
        let text = read_from(&self.log, self.log_start)
            .unwrap_or_else(|error| format!("(it cannot be read: {error})"));
        let lines: Vec<_> = text.lines().collect();
        let shown = &lines[lines.len().saturating_sub(TAIL_LINES)..];
        if shown.is_empty() {
            // If the disk is full the daemon could not write its log.
            let is_full = rustix::fs::statvfs(&self.log).is_ok_and(|disk| disk.f_bavail == 0);
            let why = if is_full { "empty: no space left on its disk" } else { "empty" };
            return format!("  ({why})");
        }
        shown.iter().map(|line| format!("  {line}")).collect::<Vec<_>>().join("\n")
    }
}

/// The path of this process's program. If the file was replaced, the path of the new file: an
/// upgrade takes effect when a daemon starts. If the file was removed, a path at which the kernel
/// still has it.
fn own_program() -> io::Result<PathBuf> {
    /// Suffix that the kernel appends to the path of a file that was replaced or removed.
    const REMOVED: &str = " (deleted)";
    let path = std::env::current_exe()?;
    if path.exists() {
        return Ok(path);
    }
    let replaced = path.to_str().and_then(|path| path.strip_suffix(REMOVED)).map(PathBuf::from);
    Ok(replaced.filter(|path| path.exists()).unwrap_or_else(|| PathBuf::from("/proc/self/exe")))
}

fn open_log(path: &Path) -> io::Result<File> {
    if std::fs::metadata(path).is_ok_and(|metadata| metadata.len() > LOG_BYTES_MAX) {
        std::fs::rename(path, path.with_extension("log.old"))?;
    }
    OpenOptions::new().create(true).append(true).mode(0o600).open(path)
}

fn read_from(path: &Path, start: u64) -> io::Result<String> {
    let mut file = File::open(path)?;
    let length = file.metadata()?.len();
    file.seek(SeekFrom::Start(start.max(length.saturating_sub(TAIL_BYTES_MAX))))?;
    let mut bytes = Vec::new();
    file.take(TAIL_BYTES_MAX).read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// The process of a daemon, if it runs.
///
/// # Errors
/// If the daemon's lock cannot be read.
pub fn process_of(state: &StateDir, daemon: Daemon) -> Result<Option<LockHolder>, LaunchError> {
    holder(&state.lock(&daemon.to_string())).map_err(|source| LaunchError::Unknown { daemon, source })
}

/// Waits until the descriptor is readable; returns false after the timeout.
fn wait_readable(descriptor: &impl AsFd, timeout: Duration) -> io::Result<bool> {
    let end = Instant::now() + timeout;
    loop {
        let left = end.saturating_duration_since(Instant::now());
        let left = Timespec::try_from(left).map_err(io::Error::other)?;
        match rustix::event::poll(&mut [PollFd::new(descriptor, PollFlags::IN)], Some(&left)) {
            Err(rustix::io::Errno::INTR) => {}
            polled => return Ok(polled? > 0),
        }
    }
}
