//! Running daemons of a state folder, and whether `aquifer up` has started them.
//!
//! systemd, or a user in a terminal, can start daemons in any state folder. `aquifer up` and
//! `aquifer down` change only daemons that `aquifer up` has started: another daemon may hold the
//! memory of programs on other machines.

use std::io;
use std::path::PathBuf;

use super::daemon::Daemon;
use super::launch::{DETACHED_FLAG, LaunchError, process_of};
use super::lock::{FileLock, LockHolder};
use crate::state::StateDir;

/// Name of the lock that is held while daemons of the cluster are started or stopped: by `aquifer
/// up`, `aquifer down` and the supervisor.
const CLUSTER_LOCK: &str = ".cluster";

/// A daemon that runs in a state folder.
#[derive(Debug)]
pub struct RunningDaemon {
    /// The daemon.
    pub daemon: Daemon,
    /// The process of the daemon.
    pub process: LockHolder,
    /// True if `aquifer up` has started the process.
    pub is_of_up: bool,
}

/// Daemons run in a state folder that `aquifer up` has not started.
#[derive(Debug, thiserror::Error)]
#[error(
    "these daemons in {folder} were not started by `aquifer up`: {daemons}; {advice}",
    folder = folder.display()
)]
pub struct ForeignDaemons {
    folder: PathBuf,
    /// Names and process numbers of the daemons.
    daemons: String,
    advice: &'static str,
}

/// Acquires the cluster's lock. If another process holds it, reports that, calls `waiting`, and
/// waits for that process.
///
/// # Errors
/// If a system call fails.
pub fn lock_cluster(state: &StateDir, waiting: impl FnOnce()) -> io::Result<FileLock> {
    FileLock::acquire(&state.lock(CLUSTER_LOCK), || {
        crate::say::say_error!(
            "waiting for another `aquifer up` or `aquifer down`, or for a restart by the supervisor, to \
             finish in {}",
            state.path().display()
        );
        waiting();
    })
}

/// Acquires the cluster's lock; `None` if another process holds it.
///
/// # Errors
/// If a system call fails.
pub fn try_lock_cluster(state: &StateDir) -> io::Result<Option<FileLock>> {
    FileLock::acquire_if_free(&state.lock(CLUSTER_LOCK))
}

/// All daemons that have ever run in the state folder, whether or not its configuration has them.
///
/// # Errors
/// If the folder cannot be read.
pub fn known_daemons(state: &StateDir) -> io::Result<Vec<Daemon>> {
    let files = match std::fs::read_dir(state.path()) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        files => files?,
    };
    let mut daemons = Vec::new();
    for file in files {
        let name = file?.file_name();
        let daemon = name.to_str().and_then(|name| name.strip_suffix(".lock")).and_then(Daemon::from_name);
        daemons.extend(daemon);
    }
    daemons.sort_unstable();
    Ok(daemons)
}

/// The daemons that hold their locks in the state folder.
///
/// # Errors
/// If the folder or a lock cannot be read.
pub fn running_daemons(state: &StateDir) -> Result<Vec<RunningDaemon>, Box<dyn std::error::Error>> {
    let mut running = Vec::new();
    for daemon in known_daemons(state)? {
        running.extend(running_daemon(state, daemon)?);
    }
    Ok(running)
}

/// Returns a daemon if it runs.
///
/// # Errors
/// If the daemon's lock cannot be read.
pub fn running_daemon(state: &StateDir, daemon: Daemon) -> Result<Option<RunningDaemon>, LaunchError> {
    let process = process_of(state, daemon)?;
    Ok(process.map(|process| {
        let is_of_up = is_started_by_up(process.pid);
        RunningDaemon { daemon, process, is_of_up }
    }))
}

/// Whether `aquifer up` or its supervisor has started a process: only they give a daemon this
/// option, which agents pass on to their successors.
pub fn is_started_by_up(pid: u32) -> bool {
    let words = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    words.split(|byte| *byte == 0).any(|word| word == DETACHED_FLAG.as_bytes())
}

/// Checks that `aquifer up` has started all these daemons.
///
/// # Errors
/// The names of the others, with `advice`.
pub fn refuse_foreign<'a>(
    state: &StateDir,
    running: impl IntoIterator<Item = &'a RunningDaemon>,
    advice: &'static str,
) -> Result<(), ForeignDaemons> {
    let foreign = running.into_iter().filter(|running| !running.is_of_up);
    let names: Vec<_> =
        foreign.map(|running| format!("{} (process {})", running.daemon, running.process.pid)).collect();
    if names.is_empty() {
        return Ok(());
    }
    Err(ForeignDaemons { folder: state.path().to_owned(), daemons: names.join(", "), advice })
}
