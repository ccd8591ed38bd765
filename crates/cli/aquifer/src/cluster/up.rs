//! `aquifer up`: starts the daemons of the cluster that do not run.

use std::os::fd::AsFd;
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use super::config::ClusterConfig;
use super::daemon::{Daemon, names};
use super::down::stop_daemons;
use super::key;
use super::launch::{LaunchError, process_of, start};
use super::location::DirectoryLocation;
use super::lock::LockHolder;
use super::running::{RunningDaemon, lock_cluster, refuse_foreign, running_daemons};
use crate::Outcome;
use crate::check::why_no_agent;
use crate::cli::UpArguments;
use crate::say::say_line;
use crate::settings::DirectorySettings;
use crate::state::StateDir;
use aquifer_channel::socket::wait_readable;
use aquifer_host_memory::available_bytes;
use aquifer_ipc::Frame;
use aquifer_ipc::size::ByteSize;

/// Advice for a folder with daemons that `aquifer up` has not started.
const ELSEWHERE: &str = "choose another folder with --state, or stop them first";

/// Timeout of a request to the keeper.
const KEEPER_TIMEOUT: Duration = Duration::from_secs(5);

/// Starts the daemons of the cluster that do not run, and returns once they serve.
pub fn up(state: &StateDir, arguments: &UpArguments) -> Outcome {
    let arguments = with_absolute_paths(arguments)?;
    if !state.path().exists() {
        // Refused arguments must leave no folder.
        let config = ClusterConfig::from_arguments(&arguments);
        check_start(state, &config, &config.daemons(), &arguments)?;
    }
    state.create()?;
    let _lock = lock_cluster(state, || {})?;
    let running = running_daemons(state)?;
    // `aquifer up` creates no cluster in a folder with daemons that it has not started.
    let is_new = running.iter().all(|daemon| !daemon.is_of_up);
    if is_new {
        refuse_foreign(state, &running, ELSEWHERE)?;
    }
    let config = config(state, &arguments)?;
    let daemons = config.daemons();
    refuse_foreign(state, running.iter().filter(|running| daemons.contains(&running.daemon)), ELSEWHERE)?;
    await_ending(running.iter().filter(|running| daemons.contains(&running.daemon)))?;
    let missing = missing(state, &config)?;
    if missing.is_empty() {
        if let Some(socket) = config.lost_sockets(state).first() {
            return Err(lost_socket(socket).into());
        }
        say_line!("The cluster is up already: {config}, in {}", state.path().display());
        return Ok(ExitCode::SUCCESS);
    }
    check_start(state, &config, &missing, &arguments)?;
    key::ensure(&state.key_file())?;
    config.save(state)?;
    if let Err(error) = start_all(state, &config, &missing) {
        // Daemons that ran before are left alone.
        stop_daemons(state, &missing)?;
        if missing.len() == config.daemons().len() {
            let _left = std::fs::remove_file(state.cluster_config());
        }
        return Err(error.into());
    }
    if let Err(error) = watch_exits(state, &config.daemons()) {
        crate::say::say_error!("the keeper will not log how daemons end: {error}");
    }
    say_line!("Started {}", names(&missing));
    say_line!("The cluster is up: {config}, in {}", state.path().display());
    if !arguments.without_runs {
        say_line!("Try: {} run --local 64M -- PROGRAM ARGUMENTS", state.command());
    }
    Ok(ExitCode::SUCCESS)
}

/// Checks the requirements of all daemons before any is started: one message is better than one of
/// each daemon.
fn check_start(
    state: &StateDir,
    config: &ClusterConfig,
    missing: &[Daemon],
    arguments: &UpArguments,
) -> Result<(), Box<dyn std::error::Error>> {
    check_memory(config, missing)?;
    // An agent that can serve no program would hide the agent that serves all users.
    if missing.contains(&Daemon::Agent)
        && !arguments.without_runs
        && let Err(error) = aquifer_agent::can_serve_programs()
    {
        let advice = "; for extents, heaps and caches alone: aquifer up --without-runs";
        return Err(format!("{}{advice}", why_no_agent(&error)).into());
    }
    let location = DirectoryLocation::new(&config.directory)?;
    if !location.is_own() {
        location.connect(state)?;
    }
    Ok(())
}

/// Advice about a deleted socket of the agent.
pub(super) fn lost_socket(socket: &Path) -> String {
    format!(
        "the agent's socket {} is gone, so that no program can reach the agent: stop the cluster with \
         `aquifer down` and start it again",
        socket.display()
    )
}

/// The arguments with absolute paths, since daemons have another working directory.
fn with_absolute_paths(arguments: &UpArguments) -> std::io::Result<UpArguments> {
    let mut arguments = arguments.clone();
    let UpArguments { directory, shared_socket, disk_path, .. } = &mut arguments;
    let DirectorySettings { ca, cert, key, .. } = directory;
    for path in [ca, cert, key, shared_socket, disk_path].into_iter().flatten() {
        *path = std::path::absolute(&path)?;
    }
    Ok(arguments)
}

/// Requests that the keeper logs how each of these daemons ends. A daemon works without that.
///
/// # Errors
/// If the keeper does not answer.
pub(super) fn watch_exits(state: &StateDir, daemons: &[Daemon]) -> std::io::Result<()> {
    let socket = state.socket(&Daemon::Keeper.to_string());
    let keeper = aquifer_channel::connect_with_timeout(&socket, KEEPER_TIMEOUT)?;
    for daemon in daemons.iter().filter(|daemon| **daemon != Daemon::Keeper) {
        // A daemon that has ended meanwhile cannot be watched.
        let Ok(Some(LockHolder { pid, pidfd, .. })) = process_of(state, *daemon) else { continue };
        let watch = Frame::WatchDaemon { pid, name: daemon.to_string() };
        aquifer_channel::send_frame(&keeper, &watch, &[pidfd.as_fd()])?;
    }
    Ok(())
}

/// The stored configuration; or a new one if there is none, or if it differs and no daemon of it
/// runs.
fn config(state: &StateDir, arguments: &UpArguments) -> Result<ClusterConfig, Box<dyn std::error::Error>> {
    let Some(stored) = ClusterConfig::load(state)? else { return new_config(arguments) };
    match stored.check(arguments) {
        Ok(()) => Ok(stored),
        Err(_) if missing(state, &stored)?.len() == stored.daemons().len() => new_config(arguments),
        Err(error) => Err(error.into()),
    }
}

fn new_config(arguments: &UpArguments) -> Result<ClusterConfig, Box<dyn std::error::Error>> {
    let mut config = ClusterConfig::from_arguments(arguments);
    config.choose_ports()?;
    Ok(config)
}

/// Waits until the daemons that were asked to stop have ended.
fn await_ending<'a>(running: impl Iterator<Item = &'a RunningDaemon>) -> std::io::Result<()> {
    for RunningDaemon { daemon, process, .. } in running.filter(|running| running.process.is_ending) {
        crate::say::say_error!("waiting for {daemon} (process {}), which is stopping", process.pid);
        while !wait_readable(&[&process.pidfd], Duration::MAX)? {}
    }
    Ok(())
}

/// The daemons of the cluster that do not run.
fn missing(state: &StateDir, config: &ClusterConfig) -> Result<Vec<Daemon>, LaunchError> {
    let mut missing = Vec::new();
    for daemon in config.daemons() {
        if process_of(state, daemon)?.is_none() {
            missing.push(daemon);
        }
    }
    Ok(missing)
}

/// Checks that the machine has the memory that the nodes will lend.
///
/// Nodes allocate their memory as it is used. Without the check, the machine would run out of
/// memory while programs run.
fn check_memory(config: &ClusterConfig, missing: &[Daemon]) -> Result<(), Box<dyn std::error::Error>> {
    let lent_max = config.memory_bytes_max.unwrap_or(config.memory_bytes);
    if let Some(for_heaps) = config.heap_memory_bytes.filter(|bytes| *bytes > lent_max) {
        let (for_heaps, lent_max) = (ByteSize(for_heaps), ByteSize(lent_max));
        return Err(format!(
            "heaps cannot take {for_heaps} of a node that lends {lent_max}: give a smaller --heap-memory, \
             or a larger --memory"
        )
        .into());
    }
    let lends_memory =
        |daemon: &&Daemon| matches!(daemon, Daemon::Node(id) if config.disk_node() != Some(*id));
    let nodes = missing.iter().filter(lends_memory).count();
    let needed = config.memory_bytes.saturating_mul(nodes as u64);
    let available = available_bytes()?;
    if needed > available {
        let (each, needed, available) =
            (ByteSize(config.memory_bytes), ByteSize(needed), ByteSize(available));
        let advice = if missing.len() == config.daemons().len() {
            "give a smaller --memory or --nodes"
        } else {
            "free some, or stop the cluster (aquifer down) and start it with a smaller --memory or --nodes"
        };
        return Err(format!(
            "{nodes} nodes of {each} are {needed}, but only {available} of memory are available: {advice}"
        )
        .into());
    }
    Ok(())
}

/// Starts the directory and the keeper first, then all nodes at once, then the agent, and last the
/// supervisor, so that it finds all of them.
fn start_all(state: &StateDir, config: &ClusterConfig, missing: &[Daemon]) -> Result<(), LaunchError> {
    let is_node = |daemon: &&Daemon| matches!(daemon, Daemon::Node(_) | Daemon::Heaps(_));
    for daemon in missing.iter().filter(|daemon| matches!(daemon, Daemon::Directory | Daemon::Keeper)) {
        start(state, config, *daemon)?.wait()?;
    }
    let starting: Result<Vec<_>, _> =
        missing.iter().filter(is_node).map(|daemon| start(state, config, *daemon)).collect();
    for node in starting? {
        node.wait()?;
    }
    for daemon in missing.iter().filter(|daemon| matches!(daemon, Daemon::Agent | Daemon::Supervisor)) {
        start(state, config, *daemon)?.wait()?;
    }
    Ok(())
}
