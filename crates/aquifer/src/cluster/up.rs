//! `aquifer up`: start what is missing.

use std::os::fd::AsFd;
use std::process::ExitCode;

use super::down::{CHANGING, stop_parts};
use super::key;
use super::launch::{LaunchError, life_of, start};
use super::lock::{Lock, Process};
use super::part::{Part, names};
use super::shape::Shape;
use super::source::Source;
use crate::Outcome;
use crate::cli::UpArguments;
use crate::say::say_line;
use crate::state::StateDir;
use aquifer_ipc::Frame;
use aquifer_ipc::size::ByteSize;
use aquifer_node::memory::available_bytes;

/// Start the cluster, or what of it is missing, and return when it serves.
pub fn up(state: &StateDir, arguments: &UpArguments) -> Outcome {
    state.create()?;
    let _lock = Lock::wait(&state.lock(CHANGING), || {
        crate::say::say_error!("another aquifer up or down is at work here; waiting for it");
    })?;
    let shape = shape(state, arguments)?;
    let missing = missing(state, &shape)?;
    if missing.is_empty() {
        say_line!("The cluster is up already: {shape}, in {}", state.path().display());
        return Ok(ExitCode::SUCCESS);
    }
    check_memory(&shape, &missing)?;
    let source = Source::new(&shape.directory)?;
    if !source.is_own() {
        // Else each part would say so in its log.
        source.connect(state)?;
    }
    shape.save(state)?;
    if let Err(error) = start_all(state, &shape, &missing) {
        // What was there before stays; a cluster that never was leaves nothing behind.
        stop_parts(state, &missing)?;
        if missing.len() == shape.parts().len() {
            let _left = std::fs::remove_file(state.shape());
        }
        return Err(error.into());
    }
    watch_exits(state, &shape);
    say_line!("Started {}", names(&missing));
    say_line!("The cluster is up: {shape}, in {}", state.path().display());
    say_line!("Try: aquifer run --local 64M -- PROGRAM ARGUMENTS");
    Ok(ExitCode::SUCCESS)
}

/// Has the keeper log how each daemon ends. A daemon that is not watched works as well, so a failure is only a warning.
fn watch_exits(state: &StateDir, shape: &Shape) {
    let warn =
        |error: &dyn std::error::Error| crate::say::say_error!("the ends of daemons are not logged: {error}");
    let keeper = match aquifer_channel::connect(&state.socket(&Part::Keeper.to_string())) {
        Ok(keeper) => keeper,
        Err(error) => return warn(&error),
    };
    for part in shape.parts().into_iter().filter(|part| *part != Part::Keeper) {
        // A daemon that has ended meanwhile cannot be watched.
        let Ok(Some(Process { pid, pidfd })) = life_of(state, part) else { continue };
        let watch = Frame::WatchDaemon { pid, name: part.to_string() };
        if let Err(error) = aquifer_channel::send_frame(&keeper, &watch, &[pidfd.as_fd()]) {
            return warn(&error);
        }
    }
}

/// The shape that is up or was, else the one asked for.
fn shape(state: &StateDir, arguments: &UpArguments) -> Result<Shape, Box<dyn std::error::Error>> {
    let Some(known) = Shape::load(state)? else { return fresh(state, arguments) };
    match known.check(arguments) {
        Ok(()) => Ok(known),
        // Nothing of it lives: what is asked for now counts.
        Err(_) if missing(state, &known)?.len() == known.parts().len() => fresh(state, arguments),
        Err(error) => Err(error.into()),
    }
}

fn fresh(state: &StateDir, arguments: &UpArguments) -> Result<Shape, Box<dyn std::error::Error>> {
    let mut shape = Shape::asked(arguments);
    shape.make_paths_absolute()?;
    shape.choose_ports()?;
    key::ensure(&state.key_file())?;
    Ok(shape)
}

fn missing(state: &StateDir, shape: &Shape) -> Result<Vec<Part>, LaunchError> {
    let mut missing = Vec::new();
    for part in shape.parts() {
        if life_of(state, part)?.is_none() {
            missing.push(part);
        }
    }
    Ok(missing)
}

/// Said before anything is started: memory that is lent is promised, and a promise that cannot be kept kills programs later.
fn check_memory(shape: &Shape, missing: &[Part]) -> Outcome {
    let nodes = missing.iter().filter(|part| matches!(part, Part::Node(_))).count();
    let needed = shape.memory_bytes.saturating_mul(u64::try_from(nodes)?);
    let available = available_bytes()?;
    if needed > available {
        let (each, needed, available) = (ByteSize(shape.memory_bytes), ByteSize(needed), ByteSize(available));
        return Err(format!(
            "{nodes} nodes of {each} are {needed}, and only {available} of memory are available: \
             ask for less with --memory or --nodes"
        )
        .into());
    }
    Ok(ExitCode::SUCCESS)
}

/// Directory and keeper first, then all nodes at once, then the agent.
fn start_all(state: &StateDir, shape: &Shape, missing: &[Part]) -> Result<(), LaunchError> {
    let is_node = |part: &&Part| matches!(part, Part::Node(_));
    for part in missing.iter().filter(|part| matches!(part, Part::Directory | Part::Keeper)) {
        start(state, shape, *part)?.wait()?;
    }
    let starting: Result<Vec<_>, _> =
        missing.iter().filter(is_node).map(|part| start(state, shape, *part)).collect();
    for node in starting? {
        node.wait()?;
    }
    for part in missing.iter().filter(|part| matches!(part, Part::Agent)) {
        start(state, shape, *part)?.wait()?;
    }
    Ok(())
}
