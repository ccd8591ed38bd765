//! `aquifer down`: stop what is there.

use std::io;
use std::process::ExitCode;
use std::time::Duration;

use super::launch::{End, LaunchError, life_of, stop};
use super::lock::Lock;
use super::part::{Part, names};
use crate::Outcome;
use crate::say::say_line;
use crate::state::StateDir;

/// Name of the lock that `up` and `down` hold, so that they do not work against each other.
pub const CHANGING: &str = ".cluster";

/// The agent ends its programs first, and gives their memory back; it and nodes say goodbye to a directory that may not answer.
const LONG_PATIENCE: Duration = Duration::from_secs(15);
const PATIENCE: Duration = Duration::from_secs(5);

/// Stop the cluster and remove its traces, but for the logs and the directory's file.
pub fn down(state: &StateDir) -> Outcome {
    if !state.path().exists() {
        say_line!("No cluster is up in {}", state.path().display());
        return Ok(ExitCode::SUCCESS);
    }
    state.create()?;
    let _lock = Lock::wait(&state.lock(CHANGING), || {
        crate::say::say_error!("another aquifer up or down is at work here; waiting for it");
    })?;
    let mut parts = known_parts(state)?;
    parts.sort_unstable();
    let ended = stop_parts(state, &parts)?;
    match std::fs::remove_file(state.shape()) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error.into()),
        _ => {}
    }
    if ended.is_empty() {
        say_line!("No cluster is up in {}", state.path().display());
        return Ok(ExitCode::SUCCESS);
    }
    let stopped: Vec<_> = ended.iter().map(|(part, _)| *part).collect();
    say_line!("Stopped {}", names(&stopped));
    let killed: Vec<_> = ended.iter().filter(|(_, end)| *end == End::Killed).map(|(part, _)| *part).collect();
    if !killed.is_empty() {
        say_line!("These did not end when asked, and were killed: {}", names(&killed));
    }
    Ok(ExitCode::SUCCESS)
}

/// Every part that ever was here, whatever the shape says.
fn known_parts(state: &StateDir) -> io::Result<Vec<Part>> {
    let mut parts = Vec::new();
    for file in std::fs::read_dir(state.path())? {
        let name = file?.file_name();
        let part = name.to_str().and_then(|name| name.strip_suffix(".lock")).and_then(Part::named);
        parts.extend(part);
    }
    Ok(parts)
}

/// Stop those that are alive: the agent first, as it needs all others to give memory back; the directory last, as all others
/// say goodbye there. What a part leaves behind is removed only when it is dead.
pub fn stop_parts(state: &StateDir, parts: &[Part]) -> Result<Vec<(Part, End)>, LaunchError> {
    const TURNS: [Duration; 4] = [LONG_PATIENCE, LONG_PATIENCE, PATIENCE, PATIENCE];
    let mut ended = Vec::new();
    for (turn, patience) in TURNS.into_iter().enumerate() {
        let group: Vec<_> = parts.iter().copied().filter(|part| turn_of(*part) == turn).collect();
        let mut living = Vec::new();
        for part in &group {
            living.extend(life_of(state, *part)?.map(|process| (*part, process)));
        }
        ended.extend(stop(living, patience)?);
        for part in group {
            // The lock file stays: whoever waits for it would else hold one that nobody sees.
            let _missing = std::fs::remove_file(state.socket(&part.to_string()));
        }
    }
    Ok(ended)
}

/// Whose turn it is to be stopped.
fn turn_of(part: Part) -> usize {
    match part {
        Part::Agent => 0,
        Part::Node(_) => 1,
        Part::Keeper => 2,
        Part::Directory => 3,
    }
}
