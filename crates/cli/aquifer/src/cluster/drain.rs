//! `aquifer drain`: empties a node, so that it can be stopped.

mod holders;
mod progress;
mod services;

use std::error::Error;
use std::io::{IsTerminal, Write};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use aquifer_directory::Directory;
use aquifer_directory::names::{self, NodeRecord, RequestedMemory};
use aquifer_ipc::size::ByteSize;

use super::lend::{choose, location};
use crate::Outcome;
use crate::cli::DrainArguments;
use crate::say::{say_error, say_line};
use crate::state::StateDir;
use holders::show_holders;
use progress::{DrainProgress, DrainState};
use services::show_services;

/// Interval at which the node's record is read.
const POLL_INTERVAL: Duration = Duration::from_millis(200);
/// Time within which a running node whose lease has expired gets a new one.
const LEASE_TIMEOUT: Duration = Duration::from_secs(10);
/// Timeout of the end of a node that was drained by force.
const END_TIMEOUT: Duration = Duration::from_secs(30);

/// Empties a node and waits until nothing is left on it, or undoes that.
pub fn drain(state: &StateDir, arguments: &DrainArguments) -> Outcome {
    let directory = location(state, &arguments.directory)?.connect(state)?;
    let node = choose(names::nodes(&*directory)?, arguments.node, "give the number of the node")?;
    let request = read_request(&*directory, &node)?;
    if arguments.undo {
        return undo(&*directory, &node, request);
    }
    let before = request.map(|request| request.drained_from.unwrap_or(request.memory_bytes));
    let before = before.unwrap_or(node.requested_memory_bytes);
    let request =
        RequestedMemory { drained_from: Some(before), ..RequestedMemory::new(node.id, node.epoch, 0) };
    directory.put(&names::requested_memory_key(node.id), &names::encode(&request), None)?;
    for line in show_services(&*directory, &node)? {
        say_error!("{line}");
    }
    if arguments.no_wait {
        say_line!("node {} is being drained; `aquifer status` shows what is left", node.id);
        return Ok(ExitCode::SUCCESS);
    }
    match wait(&*directory, &node, arguments.force)? {
        WaitEnd::Empty => {
            say_line!("node {0} is empty. Stop it, or let it lend again: aquifer drain {0} --undo", node.id);
        }
        WaitEnd::Unmovable => {
            force(&*directory, &node, request, arguments.yes)?;
            say_line!("node {} has ended, and what was left on it is lost", node.id);
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Reads the last request to a node; `None` if there is none for this life of its memory.
fn read_request(
    directory: &dyn Directory,
    node: &NodeRecord,
) -> Result<Option<RequestedMemory>, Box<dyn Error>> {
    let entry = directory.get(&names::requested_memory_key(node.id))?;
    let request: Option<RequestedMemory> = entry.as_ref().map(names::decode).transpose()?;
    Ok(request.filter(|request| request.epoch == node.epoch))
}

fn undo(directory: &dyn Directory, node: &NodeRecord, request: Option<RequestedMemory>) -> Outcome {
    let Some(memory_bytes) = request.and_then(|request| request.drained_from) else {
        return Err(format!("node {} is not being drained", node.id).into());
    };
    if memory_bytes == 0 {
        let why = format!(
            "node {0} lent nothing before the drain either: let it lend something by `aquifer lend SIZE \
             --node {0}`",
            node.id
        );
        return Err(why.into());
    }
    let request = RequestedMemory::new(node.id, node.epoch, memory_bytes);
    directory.put(&names::requested_memory_key(node.id), &names::encode(&request), None)?;
    say_line!("node {} is to lend {} again", node.id, ByteSize(memory_bytes));
    Ok(ExitCode::SUCCESS)
}

/// How the wait for a drain ended.
enum WaitEnd {
    Empty,
    /// The rest does not move, or the node cannot be emptied.
    Unmovable,
}

/// Waits until a node lends nothing, with a progress bar. With `is_forced`, ends when the rest does
/// not move.
fn wait(directory: &dyn Directory, node: &NodeRecord, is_forced: bool) -> Result<WaitEnd, Box<dyn Error>> {
    let mut progress = DrainProgress::new();
    let end = follow(directory, node, is_forced, &mut progress);
    progress.end();
    end
}

fn follow(
    directory: &dyn Directory,
    node: &NodeRecord,
    is_forced: bool,
    progress: &mut DrainProgress,
) -> Result<WaitEnd, Box<dyn Error>> {
    let mut missing_since = None;
    let mut has_said_why = false;
    loop {
        let nodes = names::nodes(directory)?;
        let is_alone = nodes.iter().all(|other| other.id == node.id || other.memory_bytes == 0);
        match nodes.into_iter().find(|record| record.id == node.id && record.epoch == node.epoch) {
            Some(record) if record.memory_bytes == 0 && record.requested_memory_bytes == 0 => {
                return Ok(WaitEnd::Empty);
            }
            Some(record) => {
                missing_since = None;
                match progress.update(&record, is_alone) {
                    DrainState::Continues => has_said_why = false,
                    DrainState::Stalled | DrainState::Blocked(_) if is_forced => {
                        return Ok(WaitEnd::Unmovable);
                    }
                    DrainState::Stalled if has_said_why => {}
                    DrainState::Stalled => {
                        has_said_why = true;
                        say_stalled(directory, &record, progress)?;
                    }
                    DrainState::Blocked(why) => return Err(why.into()),
                }
            }
            // Its lease may have expired although it runs.
            None => {
                let since: Instant = *missing_since.get_or_insert_with(Instant::now);
                if since.elapsed() >= LEASE_TIMEOUT {
                    return Err(format!("node {} has ended before it was empty", node.id).into());
                }
            }
        }
        if read_request(directory, node)?.is_none_or(|request| request.drained_from.is_none()) {
            return Err(format!("the drain of node {} was undone by another process", node.id).into());
        }
        std::thread::sleep(POLL_INTERVAL);
    }
}

/// The record of this life of a node; `None` if there is none at present.
fn read_record(directory: &dyn Directory, node: &NodeRecord) -> Result<Option<NodeRecord>, Box<dyn Error>> {
    let record = directory.get(&names::node_key(node.id))?;
    let record: Option<NodeRecord> = record.as_ref().map(names::decode).transpose()?;
    Ok(record.filter(|record| record.epoch == node.epoch))
}

/// Says what does not move, and why it may not.
fn say_stalled(
    directory: &dyn Directory,
    record: &NodeRecord,
    progress: &DrainProgress,
) -> Result<(), Box<dyn Error>> {
    progress.say(&format!("{} of node {} do not move:", ByteSize(record.recalled_bytes), record.id));
    for line in show_holders(directory, record)? {
        progress.say(&format!("  {line}"));
    }
    progress.say(
        "The other nodes have no room, there are too few for the replicas, or it is memory of sessions, \
         heaps or caches, which is freed when their programs end. `aquifer drain --force` gives it up.",
    );
    Ok(())
}

/// Names the programs that lose memory, asks whether they may, and ends the node.
fn force(
    directory: &dyn Directory,
    node: &NodeRecord,
    request: RequestedMemory,
    is_confirmed: bool,
) -> Result<(), Box<dyn Error>> {
    let record = read_record(directory, node)?.unwrap_or_else(|| node.clone());
    say_line!("{} of node {} do not move:", ByteSize(record.recalled_bytes), node.id);
    for line in show_holders(directory, &record)? {
        say_line!("  {line}");
    }
    say_line!("If the node ends, a program ends when it needs a page without a copy on another node.");
    if !is_confirmed && !confirm(&format!("End node {}?", node.id))? {
        return Err(
            format!("node {0} continues: let it lend again by `aquifer drain {0} --undo`", node.id).into()
        );
    }
    let request = RequestedMemory { is_forced: true, ..request };
    directory.put(&names::requested_memory_key(node.id), &names::encode(&request), None)?;
    let since = Instant::now();
    while read_record(directory, node)?.is_some() {
        if since.elapsed() >= END_TIMEOUT {
            return Err(format!("node {} has not ended: see its log", node.id).into());
        }
        std::thread::sleep(POLL_INTERVAL);
    }
    Ok(())
}

/// Asks a question on the terminal. Returns true for yes.
fn confirm(question: &str) -> Result<bool, Box<dyn Error>> {
    let stdin = std::io::stdin();
    if !stdin.is_terminal() {
        return Err("standard input is no terminal to ask on: add --yes".into());
    }
    // Without standard error no one sees the question, and no answer comes.
    write!(std::io::stderr(), "{question} [y/N] ")?;
    let mut answer = String::new();
    stdin.read_line(&mut answer)?;
    Ok(matches!(answer.trim(), "y" | "Y" | "yes"))
}
