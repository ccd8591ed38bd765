//! `aquifer run --swap`: for what nothing can be loaded into. The program runs in a cgroup whose memory is limited, and the kernel swaps to a
//! device of ours; its server is a process of its own, and owns all of it.

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
use crate::cluster::Source;
use crate::say::log_to_stderr;
use crate::settings::DirectorySettings;
use crate::state::StateDir;

/// What `--swap` asks for beside the limit.
#[derive(Clone, Debug)]
pub struct SwapOptions {
    /// The cluster's folder.
    pub state: PathBuf,
    /// The log of the server.
    pub log: PathBuf,
    /// The device's size, if not the default.
    pub bytes: Option<u64>,
}

/// Be the server of a swap device, for the run at the other end of standard input.
pub fn serve_swap(state: &StateDir, arguments: &SwapServerArguments) -> Outcome {
    log_to_stderr();
    let options = aquifer_swap::SwapOptions {
        name: arguments.name.clone(),
        limit_bytes: arguments.local,
        size_bytes: arguments.swap_size,
        agent_socket: state.agent_socket(),
        folder: state.path().to_owned(),
    };
    let connect = |place: &str| {
        let settings: DirectorySettings = serde_json::from_str(place)
            .map_err(|error| format!("the agent does not tell where the cluster's directory is: {error}"))?;
        let directory = Source::new(&settings)?.connect(state);
        directory.map_err(|error| format!("the cluster's directory cannot be reached: {error}").into())
    };
    let run = io::stdin().as_fd().try_clone_to_owned()?;
    Ok(aquifer_swap::serve(run, &options, connect)?)
}

/// The server of the device, with what lets a program into its cgroup.
#[derive(Debug)]
pub(super) struct SwapServer {
    process: Child,
    record: String,
    procs: File,
}

impl SwapServer {
    /// Start it; it is told to end over the socket that comes with it.
    pub(super) fn start(
        options: &RunOptions,
        swap: &SwapOptions,
        name: &str,
    ) -> Result<(Self, OwnedFd), RunError> {
        if !rustix::process::geteuid().is_root() {
            return Err(RunError::SwapIsRoots);
        }
        if let Err(error) = cleanup_stale() {
            crate::say::say_error!("what an earlier run left behind is not all gone: {error}");
        }
        let (ours, theirs) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
                .map_err(io::Error::from)
                .map_err(RunError::SwapServer)?;
        let mut process = spawn(options, swap, name, theirs).map_err(RunError::SwapServer)?;
        match receive_frame(&ours) {
            Ok((Frame::SwapOpened(record), mut fds)) if fds.len() == 1 => {
                let procs = File::from(fds.remove(0));
                Ok((Self { process, record, procs }, ours))
            }
            Ok((Frame::Refused(reason), _)) => {
                // It has nothing more to do than to end.
                let _ = process.wait();
                Err(RunError::Refused(reason))
            }
            answer => {
                let _ = process.kill();
                let _ = process.wait();
                if let Err(error) = cleanup_stale() {
                    crate::say::say_error!("{error}");
                }
                let answer = answer.err().unwrap_or(ReceiveError::Closed).to_string();
                let error = format!("{answer}; its log is {}", swap.log.display());
                Err(RunError::SwapServer(io::Error::other(error)))
            }
        }
    }

    /// A command whose program runs in the cgroup.
    pub(super) fn command(&self, program: &Path) -> Result<Command, RunError> {
        let procs = self.procs.try_clone().map_err(RunError::SwapServer)?;
        Ok(cgroup::command(program.as_os_str(), procs))
    }

    /// What to do when the server is gone while it is needed: nothing that it held can be had any more. Returns the reason.
    pub(super) fn on_gone(&self) -> impl FnOnce() -> String + Send + use<> {
        let record = self.record.clone();
        move || {
            if let Err(error) = record::undo_abandoned(&record) {
                crate::say::say_error!("something of the swap device is left: {error}");
            }
            "the server of its swap device died, and with it the only copy of what was swapped".to_owned()
        }
    }

    /// The server ends by itself, as soon as no program is left; if that is so already, do not leave it to others.
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
        // The terminal's signals are for the program.
        .process_group(0)
        .spawn()
}
