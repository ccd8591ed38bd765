//! `aquifer down`: stops all daemons of the cluster.

use std::error::Error;
use std::io;
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use rustix::process::{Signal, pidfd_send_signal};

use super::daemon::{Daemon, names};
use super::launch::process_of;
use super::running::{known_daemons, lock_cluster, refuse_foreign, running_daemon, running_daemons};
use super::stop::{StopOutcome, stop};
use crate::Outcome;
use crate::cli::DownArguments;
use crate::say::say_line;
use crate::state::StateDir;

/// The deadline of each step, from the start of the first one. Daemons that run then are killed.
///
/// An agent ends its programs and frees their memory first. Agent and nodes end their leases, and
/// the directory may not answer.
const STEP_DEADLINES: [Duration; 5] = [
    Duration::from_secs(5),
    Duration::from_secs(15),
    Duration::from_secs(20),
    Duration::from_secs(25),
    Duration::from_secs(30),
];

/// Stops the cluster and removes its sockets and configuration; logs, the key and the directory's
/// file stay unless they are to be purged.
pub fn down(state: &StateDir, arguments: &DownArguments) -> Outcome {
    if !state.path().exists() {
        say_line!("No cluster is up in {}", state.path().display());
        return Ok(ExitCode::SUCCESS);
    }
    state.create()?;
    let _lock = lock_cluster(state, || stop_restarts(state))?;
    refuse_foreign(state, &running_daemons(state)?, "stop them as they were started, such as by systemctl")?;
    let ended = stop_daemons(state, &known_daemons(state)?)?;
    match std::fs::remove_file(state.cluster_config()) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error.into()),
        _ => {}
    }
    if ended.is_empty() {
        say_line!("No cluster is up in {}", state.path().display());
    } else {
        say_stopped(&ended);
    }
    if arguments.purge {
        purge(state)?;
    } else if !ended.is_empty() {
        let path = state.path().display();
        say_line!(
            "The cluster key, the logs and the directory stay in {path} ({} down --purge removes them)",
            state.command()
        );
    }
    Ok(ExitCode::SUCCESS)
}

/// Stops the supervisor: it may hold the cluster's lock while a daemon that it has started waits
/// for another one.
fn stop_restarts(state: &StateDir) {
    // An error is reported by the later attempt, with the lock held.
    if let Ok(Some(supervisor)) = running_daemon(state, Daemon::Supervisor)
        && supervisor.is_of_up
    {
        let _gone = pidfd_send_signal(&supervisor.process.pidfd, Signal::TERM);
    }
}

fn say_stopped(ended: &[(Daemon, StopOutcome)]) {
    let stopped: Vec<_> = ended.iter().map(|(daemon, _)| *daemon).collect();
    say_line!("Stopped {}", names(&stopped));
    let killed: Vec<_> =
        ended.iter().filter(|(_, end)| *end == StopOutcome::Killed).map(|(daemon, _)| *daemon).collect();
    if !killed.is_empty() {
        say_line!("These did not stop in time and were killed: {}", names(&killed));
    }
    for (daemon, end) in ended {
        if let StopOutcome::Unremoved(pid) = end {
            say_line!(
                "Process {pid} ({daemon}) does nothing more, and stays until the kernel has closed what it \
                 had open"
            );
        }
    }
}

/// Removes the files of a cluster from its state folder, and the folder if it is empty then.
fn purge(state: &StateDir) -> Outcome {
    let mut removed = vec![state.key_file(), state.directory_file()];
    let logs = state.log("any").with_file_name("");
    for folder in [state.path(), &logs] {
        let files = std::fs::read_dir(folder).into_iter().flatten().flatten().map(|file| file.path());
        removed.extend(files.filter(|file| is_left_over(file)));
    }
    for file in removed {
        match std::fs::remove_file(&file) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(format!("cannot remove {}: {error}", file.display()).into());
            }
            _ => {}
        }
    }
    let _has_other_files = std::fs::remove_dir(&logs);
    match std::fs::remove_dir(state.path()) {
        Ok(()) => say_line!("Removed {}", state.path().display()),
        Err(_) => say_line!("Removed the cluster from {}, which has other files", state.path().display()),
    }
    Ok(ExitCode::SUCCESS)
}

/// Whether a file in a state folder is a lock, a socket, a log or a record of a cluster.
fn is_left_over(file: &Path) -> bool {
    let extension = file.extension().and_then(|extension| extension.to_str());
    // `span-1.held` is of a node whose memory heaps have.
    extension.is_some_and(|extension| ["lock", "sock", "log", "old", "held"].contains(&extension))
}

/// Stops the running ones of `daemons`, and removes the sockets of all.
///
/// The supervisor is first, so that it starts no daemon again. The agent is next, because it frees
/// memory on the nodes. The directory is last, because agent and nodes end their leases there. A
/// daemon that hangs is killed before the next step: without a keeper, the programs of an agent
/// that is killed would read zeros. A socket is removed only after its daemon has ended.
///
/// # Errors
/// If a daemon cannot be stopped. Then the daemons of later steps are left alone.
pub fn stop_daemons(
    state: &StateDir,
    daemons: &[Daemon],
) -> Result<Vec<(Daemon, StopOutcome)>, Box<dyn Error>> {
    let start = Instant::now();
    let mut ended = Vec::new();
    for (step, deadline) in STEP_DEADLINES.into_iter().enumerate() {
        let group: Vec<_> = daemons.iter().copied().filter(|daemon| stop_step(*daemon) == step).collect();
        let mut running = Vec::new();
        for daemon in &group {
            running.extend(process_of(state, *daemon)?.map(|process| (*daemon, process)));
        }
        ended.extend(stop(running, start + deadline)?);
        for daemon in group {
            // The lock file stays: otherwise a process that waits for the lock would lock a removed
            // file.
            let _missing = std::fs::remove_file(state.socket(&daemon.to_string()));
        }
    }
    Ok(ended)
}

/// The step of `stop_daemons` in which a daemon is stopped.
fn stop_step(daemon: Daemon) -> usize {
    match daemon {
        Daemon::Supervisor => 0,
        Daemon::Agent => 1,
        Daemon::Node(_) | Daemon::Heaps(_) => 2,
        Daemon::Keeper => 3,
        Daemon::Directory => 4,
    }
}
