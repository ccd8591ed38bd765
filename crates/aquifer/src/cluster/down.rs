//! `aquifer down`: stops all daemons of the cluster.

use std::error::Error;
use std::io;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use super::daemon::{Daemon, names};
use super::launch::process_of;
use super::lock::FileLock;
use super::stop::{StopOutcome, stop};
use crate::Outcome;
use crate::say::say_line;
use crate::state::StateDir;

/// Name of the lock that `aquifer up` and `aquifer down` hold while they change the cluster.
pub const CLUSTER_LOCK: &str = ".cluster";

/// When the daemons of each step are killed, from the start of the first step.
///
/// An agent ends its programs and frees their memory first. Agent and nodes end their leases, and
/// the directory may not answer.
const STEP_DEADLINES: [Duration; 4] =
    [Duration::from_secs(15), Duration::from_secs(20), Duration::from_secs(25), Duration::from_secs(30)];

/// Stops the cluster and removes its sockets and configuration; logs, the key and the directory's
/// file stay.
pub fn down(state: &StateDir) -> Outcome {
    if !state.path().exists() {
        say_line!("No cluster is up in {}", state.path().display());
        return Ok(ExitCode::SUCCESS);
    }
    state.create()?;
    let _lock = FileLock::acquire(&state.lock(CLUSTER_LOCK), || {
        crate::say::say_error!(
            "waiting for another `aquifer up` or `aquifer down` to finish in {}",
            state.path().display()
        );
    })?;
    let mut daemons = known_daemons(state)?;
    daemons.sort_unstable();
    let ended = stop_daemons(state, &daemons)?;
    match std::fs::remove_file(state.cluster_config()) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error.into()),
        _ => {}
    }
    if ended.is_empty() {
        say_line!("No cluster is up in {}", state.path().display());
        return Ok(ExitCode::SUCCESS);
    }
    let stopped: Vec<_> = ended.iter().map(|(daemon, _)| *daemon).collect();
    say_line!("Stopped {}", names(&stopped));
    let killed: Vec<_> =
        ended.iter().filter(|(_, end)| *end == StopOutcome::Killed).map(|(daemon, _)| *daemon).collect();
    if !killed.is_empty() {
        say_line!("These did not stop in time and were killed: {}", names(&killed));
    }
    Ok(ExitCode::SUCCESS)
}

/// All daemons that have ever run in the state folder, whether or not the configuration has them.
fn known_daemons(state: &StateDir) -> io::Result<Vec<Daemon>> {
    let mut daemons = Vec::new();
    for file in std::fs::read_dir(state.path())? {
        let name = file?.file_name();
        let daemon = name.to_str().and_then(|name| name.strip_suffix(".lock")).and_then(Daemon::from_name);
        daemons.extend(daemon);
    }
    Ok(daemons)
}

/// Stops those of the daemons that run, and removes the sockets of all.
///
/// The agent is first, because it frees memory on the nodes. The directory is last, because agent
/// and nodes end their leases there. A daemon that hangs is killed before the next step: without a
/// keeper, the programs of an agent that is killed would read zeros. A socket is removed only after
/// its daemon has ended.
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
            // The lock file stays: a process that waits for the lock would otherwise hold that of a
            // removed file.
            let _missing = std::fs::remove_file(state.socket(&daemon.to_string()));
        }
    }
    Ok(ended)
}

/// The step of `stop_daemons` in which a daemon is stopped.
fn stop_step(daemon: Daemon) -> usize {
    match daemon {
        Daemon::Agent => 0,
        Daemon::Node(_) | Daemon::Heaps(_) => 1,
        Daemon::Keeper => 2,
        Daemon::Directory => 3,
    }
}
