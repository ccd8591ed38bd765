//! `aquifer run --swap`: runs a program that the shim cannot be loaded into.
//!
//! The program runs in a cgroup with a memory limit, and the kernel swaps to a device in the pool.
//! The swap server, a process of its own, owns the cgroup and the device.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use aquifer_channel::{ReceiveError, receive_frame};
use aquifer_ipc::Frame;
use aquifer_swap::setup::{cgroup, cleanup_stale, record};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

use super::{RunError, RunOptions};
use crate::Outcome;
use crate::cli::SwapServerArguments;
use crate::cluster::DirectoryLocation;
use crate::say::log_to_stderr;
use crate::settings::DirectorySettings;
use crate::state::StateDir;

/// Options of `--swap`.
#[derive(Clone, Debug)]
pub struct SwapOptions {
    /// The state folder.
    pub state: PathBuf,
    /// Log of the swap server.
    pub log: PathBuf,
    /// Size of the device, if not the default.
    pub bytes: Option<u64>,
}

/// Serves a swap device, for the `aquifer run` at the other end of standard input.
///
/// # Errors
/// If the device cannot be served.
pub fn serve_swap(state: &StateDir, arguments: &SwapServerArguments) -> Outcome {
    log_to_stderr();
    let options = aquifer_swap::SwapDeviceOptions {
        name: arguments.name.clone(),
        limit_bytes: arguments.local,
        size_bytes: arguments.swap_size,
        agent_socket: state.agent_socket(),
        folder: state.path().to_owned(),
    };
    let connect = |place: &str| {
        let settings: DirectorySettings = serde_json::from_str(place)
            .map_err(|error| format!("the agent sent an invalid location of the directory: {error}"))?;
        let directory = DirectoryLocation::new(&settings)?.connect(state);
        directory.map_err(|error| format!("connection to the directory failed: {error}").into())
    };
    let run = io::stdin().as_fd().try_clone_to_owned()?;
    Ok(aquifer_swap::serve(run, &options, connect)?)
}

/// The process of the swap server, and the `cgroup.procs` file of its cgroup.
#[derive(Debug)]
pub(super) struct SwapServer {
    process: Child,
    record: String,
    procs: File,
}

impl SwapServer {
    /// Starts the server. Also returns the socket to it.
    pub(super) fn start(
        options: &RunOptions,
        swap: &SwapOptions,
        name: &str,
    ) -> Result<(Self, OwnedFd), RunError> {
        if !rustix::process::geteuid().is_root() {
            return Err(RunError::SwapNeedsRoot);
        }
        if let Err(error) = cleanup_stale() {
            crate::say::say_error!("cleanup after an earlier `aquifer run --swap` failed: {error}");
        }
        let (own_end, server_end) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
                .map_err(io::Error::from)
                .map_err(RunError::SwapServer)?;
        let mut process = spawn(options, swap, name, server_end).map_err(RunError::SwapServer)?;
        match receive_frame(&own_end) {
            Ok((Frame::SwapOpened(record), mut fds)) if fds.len() == 1 => {
                let procs = File::from(fds.remove(0));
                Ok((Self { process, record, procs }, own_end))
            }
            Ok((Frame::Refused(reason), _)) => {
                // The server ends after a refusal.
                let _ = process.wait();
                Err(RunError::Refused(reason))
            }
            answer => {
                let _ = process.kill();
                let _ = process.wait();
                if let Err(error) = cleanup_stale() {
                    crate::say::say_error!("cleanup of the swap device failed: {error}");
                }
                let answer = answer.err().unwrap_or(ReceiveError::Closed).to_string();
                let error = format!("{answer}; see its log {}", swap.log.display());
                Err(RunError::SwapServer(io::Error::other(error)))
            }
        }
    }

    /// A command that starts the program in the cgroup.
    pub(super) fn command(&self, program: &Path) -> Result<Command, RunError> {
        let procs = self.procs.try_clone().map_err(RunError::SwapServer)?;
        Ok(cgroup::command(program.as_os_str(), procs))
    }

    /// Returns the function to call if the server dies while the program runs. It removes the
    /// device, and returns the reason why the program is ended: its swapped pages are lost.
    pub(super) fn on_gone(&self) -> impl FnOnce() -> String + Send + use<> {
        let record = self.record.clone();
        move || {
            if let Err(error) = record::undo_abandoned(&record) {
                crate::say::say_error!("cleanup of the swap device failed: {error}");
            }
            "its swap server died, so its swapped pages are lost".to_owned()
        }
    }

    /// Reaps the server if it has ended. The server ends when its cgroup is empty, perhaps later
    /// than this process.
    pub(super) fn reap(mut self) {
        let _ = self.process.try_wait();
    }
}

fn spawn(options: &RunOptions, swap: &SwapOptions, name: &str, socket: OwnedFd) -> io::Result<Child> {
    fs::create_dir_all(swap.log.parent().unwrap_or(Path::new("/")))?;
    let log = OpenOptions::new().append(true).create(true).mode(0o600).open(&swap.log)?;
    let mut command = Command::new(std::env::current_exe()?);
    command.arg("--state").arg(&swap.state);
    command.args(["swap-server", "--local", &options.local_bytes.to_string(), "--name", name]);
    if let Some(bytes) = swap.bytes {
        command.args(["--swap-size", &bytes.to_string()]);
    }
    command
        .stdin(Stdio::from(socket))
        .stdout(Stdio::null())
        .stderr(log)
        .current_dir("/")
        // The server must not get the signals of the terminal.
        .process_group(0)
        .spawn()
}
