//! Starting a part in the background, and stopping one.

use std::fs::{File, OpenOptions};
use std::io::{self, PipeReader, Read, Seek, SeekFrom};
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::process::{Signal, pidfd_send_signal};

use super::lock::{Life, Process, life};
use super::part::Part;
use super::parts::READY;
use super::shape::Shape;
use crate::state::StateDir;

/// How long a part may take until it serves. Most of it is a node's, which has memory to lay out.
const READY_TIMEOUT: Duration = Duration::from_secs(60);
/// A log longer than this is put aside when its part starts anew.
const LOG_BYTES_MAX: u64 = 4 << 20;
/// So much of a log is shown when a part fails.
const TAIL_LINES: usize = 10;
const TAIL_BYTES_MAX: u64 = 16 << 10;

/// Why a part is not there, or still is.
#[derive(Debug, thiserror::Error)]
pub enum LaunchError {
    /// The system refused.
    #[error("{part} cannot be started: {what}: {source}")]
    System {
        /// The part.
        part: Part,
        /// What was attempted.
        what: &'static str,
        /// What the system said.
        source: io::Error,
    },
    /// It ended before it served.
    #[error("{part} did not start. Its log, {log}, says:\n{tail}", log = log.display())]
    Failed {
        /// The part.
        part: Part,
        /// Its log.
        log: PathBuf,
        /// The log's end.
        tail: String,
    },
    /// It does not serve.
    #[error("{part} does not serve after {} s. Its log, {log}, says:\n{tail}", READY_TIMEOUT.as_secs(), log = log.display())]
    Late {
        /// The part.
        part: Part,
        /// Its log.
        log: PathBuf,
        /// The log's end.
        tail: String,
    },
    /// Its lock cannot be read.
    #[error("cannot tell whether {part} is alive: {source}")]
    Unknown {
        /// The part.
        part: Part,
        /// What the system said.
        source: io::Error,
    },
    /// It does not end.
    #[error("{part} (process {pid}) does not end, not even when killed")]
    Undying {
        /// The part.
        part: Part,
        /// Its process.
        pid: u32,
    },
}

/// A part that was started and may not serve yet.
#[derive(Debug)]
pub struct Starting {
    part: Part,
    child: Child,
    output: PipeReader,
    log: PathBuf,
    log_start: u64,
}

/// Start a part in the background.
pub fn start(state: &StateDir, shape: &Shape, part: Part) -> Result<Starting, LaunchError> {
    let error = |what| move |source| LaunchError::System { part, what, source };
    let log = state.log(&part.to_string());
    let mut file = open_log(&log).map_err(error("its log"))?;
    let log_start = file.seek(SeekFrom::End(0)).map_err(error("its log"))?;
    let (output, input) = io::pipe().map_err(error("a pipe"))?;
    let binary = std::env::current_exe().map_err(error("its program"))?;
    let mut command = Command::new(binary);
    command.arg("--state").arg(state.path());
    match part {
        Part::Directory => command.arg("directory"),
        Part::Keeper => command.args(["keeper", "--grace", &format!("{}ms", shape.grace_ms)]),
        Part::Node(id) => command
            .args(["node", "--id", &id.to_string()])
            .args(["--memory", &shape.memory_bytes.to_string()])
            .args(shape.memory_bytes_max.map(|bytes| format!("--memory-max={bytes}")))
            .args(shape.keep_memory.then(|| format!("--grace={}ms", shape.grace_ms)))
            .args(shape.ports.get(usize::from(id) - 1).map(|port| format!("--listen=127.0.0.1:{port}")))
            .args(shape.directory_flags()),
        Part::Agent => command
            .args(["agent", "--grace", &format!("{}ms", shape.grace_ms)])
            .args(shape.mempool_bytes.map(|bytes| format!("--mempool={bytes}")))
            .args(shape.extents_per_user.map(|bytes| format!("--extents-per-user={bytes}")))
            .args(shape.shared_socket.as_ref().map(|path| format!("--shared-socket={}", path.display())))
            .args(shape.directory_flags()),
    };
    command.arg("--detached").stdin(Stdio::null()).stdout(input).stderr(file);
    let child = command.spawn().map_err(error("its program"))?;
    Ok(Starting { part, child, output, log, log_start })
}

impl Starting {
    /// Wait until it serves.
    pub fn wait(mut self) -> Result<(), LaunchError> {
        let end = Instant::now() + READY_TIMEOUT;
        let mut told = Vec::new();
        while !told.ends_with(READY) {
            let error = |source| LaunchError::System { part: self.part, what: "its output", source };
            if !wait_readable(&self.output, end.saturating_duration_since(Instant::now())).map_err(error)? {
                let _ended = self.child.kill();
                let _waited = self.child.wait();
                return Err(LaunchError::Late { part: self.part, tail: self.tail(), log: self.log });
            }
            let mut chunk = [0; 64];
            let count = self.output.read(&mut chunk).map_err(error)?;
            told.extend_from_slice(&chunk[..count]);
            if count == 0 || told.len() > 1024 {
                let _ended = self.child.kill();
                let _waited = self.child.wait();
                return Err(LaunchError::Failed { part: self.part, tail: self.tail(), log: self.log });
            }
        }
        Ok(())
    }

    fn tail(&self) -> String {
        let text = read_from(&self.log, self.log_start)
            .unwrap_or_else(|error| format!("(it cannot be read: {error})"));
        let lines: Vec<_> = text.lines().collect();
        let shown = &lines[lines.len().saturating_sub(TAIL_LINES)..];
        if shown.is_empty() {
            // Then it could not write its log, either.
            let is_full = rustix::fs::statvfs(&self.log).is_ok_and(|disk| disk.f_bavail == 0);
            let why = if is_full { "nothing: there is no space left on that disk" } else { "nothing" };
            return format!("  ({why})");
        }
        shown.iter().map(|line| format!("  {line}")).collect::<Vec<_>>().join("\n")
    }
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

/// Whether a part is alive.
pub fn life_of(state: &StateDir, part: Part) -> Result<Option<Process>, LaunchError> {
    match life(&state.lock(&part.to_string())) {
        Ok(Life::Alive(process)) => Ok(Some(process)),
        Ok(Life::Dead) => Ok(None),
        Err(source) => Err(LaunchError::Unknown { part, source }),
    }
}

/// How a part ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum End {
    /// By itself, when it was asked to.
    Asked,
    /// It did not listen.
    Killed,
}

/// Ask parts to end, all at once; kill those that are still there after `patience`.
pub fn stop(parts: Vec<(Part, Process)>, patience: Duration) -> Result<Vec<(Part, End)>, LaunchError> {
    for (_, process) in &parts {
        // It may have ended by itself meanwhile, which is as well.
        let _gone = pidfd_send_signal(&process.pidfd, Signal::TERM);
    }
    let end = Instant::now() + patience;
    let mut ended = Vec::new();
    for (part, process) in parts {
        let error = |source| LaunchError::Unknown { part, source };
        let left = end.saturating_duration_since(Instant::now());
        if wait_readable(&process.pidfd, left).map_err(error)? {
            ended.push((part, End::Asked));
            continue;
        }
        let _gone = pidfd_send_signal(&process.pidfd, Signal::KILL);
        if !wait_readable(&process.pidfd, Duration::from_secs(5)).map_err(error)? {
            return Err(LaunchError::Undying { part, pid: process.pid });
        }
        ended.push((part, End::Killed));
    }
    Ok(ended)
}

/// Wait until there is something to read, or the process has ended; `false` if there is not in time.
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
