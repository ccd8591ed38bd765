//! `aquifer drain`: empties a node, so that it can be stopped.

use std::error::Error;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use aquifer_directory::Directory;
use aquifer_directory::names::{self, MemoryHolder, NodeRecord, RequestedMemory, ResizeBlocker};
use aquifer_ipc::size::ByteSize;
use indicatif::{ProgressBar, ProgressStyle};

use super::lend::{OBSTACLE_TIMEOUT, choose, location};
use super::status::name_of;
use crate::Outcome;
use crate::cli::DrainArguments;
use crate::say::{say_error, say_line};
use crate::state::StateDir;

/// Interval at which the node's record is read.
const POLL_INTERVAL: Duration = Duration::from_millis(200);
/// Time without progress after which the command says what may prevent it.
const STALL_TIMEOUT: Duration = Duration::from_secs(10);
/// Time within which a running node whose lease has expired gets a new one.
const LEASE_TIMEOUT: Duration = Duration::from_secs(10);

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
        RequestedMemory { node: node.id, epoch: node.epoch, memory_bytes: 0, drained_from: Some(before) };
    directory.put(&names::requested_memory_key(node.id), &names::encode(&request), None)?;
    if arguments.no_wait {
        say_line!("node {} is being drained; `aquifer status` shows what is left", node.id);
        return Ok(ExitCode::SUCCESS);
    }
    wait(&*directory, &node)?;
    say_line!("node {0} is empty. Stop it, or let it lend again: aquifer drain {0} --undo", node.id);
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
    let request = RequestedMemory { node: node.id, epoch: node.epoch, memory_bytes, drained_from: None };
    directory.put(&names::requested_memory_key(node.id), &names::encode(&request), None)?;
    say_line!("node {} is to lend {} again", node.id, ByteSize(memory_bytes));
    Ok(ExitCode::SUCCESS)
}

/// Waits until a node lends nothing, with a progress bar.
fn wait(directory: &dyn Directory, node: &NodeRecord) -> Result<(), Box<dyn Error>> {
    let bar = ProgressBar::new(0);
    let template = "{elapsed} {wide_bar} {bytes} of {total_bytes}, {bytes_per_sec}, {eta} left";
    let bar = match ProgressStyle::with_template(template) {
        Ok(style) => bar.with_style(style),
        Err(_) => bar,
    };
    let mut progress = DrainProgress::default();
    let mut missing_since = None;
    loop {
        let record = directory.get(&names::node_key(node.id))?;
        let record: Option<NodeRecord> = record.as_ref().map(names::decode).transpose()?;
        match record.filter(|record| record.epoch == node.epoch) {
            Some(record) if record.memory_bytes == 0 && record.requested_memory_bytes == 0 => {
                bar.finish_and_clear();
                return Ok(());
            }
            Some(record) => {
                missing_since = None;
                if let Err(why) = progress.update(&record, &bar) {
                    bar.finish_and_clear();
                    return Err(why.into());
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
            bar.finish_and_clear();
            return Err(format!("the drain of node {} was undone by another process", node.id).into());
        }
        std::thread::sleep(POLL_INTERVAL);
    }
}

/// The progress of a drain.
#[derive(Default)]
struct DrainProgress {
    /// The most memory that the node has recalled.
    total: u64,
    /// The rest of it, and the time since when.
    left: Option<(u64, Instant)>,
    is_stalled: bool,
    /// The reason why the node does not lend less, other than memory in use, and the time since
    /// when.
    blocker: Option<(ResizeBlocker, Instant)>,
}

impl DrainProgress {
    /// Shows the progress.
    ///
    /// # Errors
    /// The reason why the node cannot be emptied, if that lasts.
    fn update(&mut self, record: &NodeRecord, bar: &ProgressBar) -> Result<(), String> {
        let left = record.recalled_bytes;
        if left > self.total {
            self.total = left;
            bar.set_length(left);
        }
        bar.set_position(self.total - left);
        let blocker = record.resize_blocker.filter(|blocker| *blocker != ResizeBlocker::InUse);
        if blocker != self.blocker.map(|(before, _)| before) {
            self.blocker = blocker.map(|blocker| (blocker, Instant::now()));
        }
        if let Some((blocker, since)) = self.blocker
            && since.elapsed() >= OBSTACLE_TIMEOUT
        {
            return Err(format!("node {} lends {}: {blocker}", record.id, ByteSize(record.memory_bytes)));
        }
        match self.left {
            Some((before, since)) if before == left => {
                if left > 0 && !self.is_stalled && since.elapsed() >= STALL_TIMEOUT {
                    self.is_stalled = true;
                    say_stalled(record, bar);
                }
            }
            _ => (self.left, self.is_stalled) = (Some((left, Instant::now())), false),
        }
        Ok(())
    }
}

/// Says why nothing may move.
fn say_stalled(record: &NodeRecord, bar: &ProgressBar) {
    let what = format!(
        "{} of node {} do not move: {}. The other nodes have no room, there are too few for the replicas, \
         or it is memory of sessions, heaps or caches, which is freed when their programs end",
        ByteSize(record.recalled_bytes),
        record.id,
        show_holders(&record.recalled_from)
    );
    // The bar is hidden if standard error is not a terminal.
    if bar.is_hidden() { say_error!("{what}") } else { bar.println(what) }
}

/// The users that have memory, as text: `64 MiB of anne, 2 MiB of heaps`.
fn show_holders(holders: &[MemoryHolder]) -> String {
    let show = |holder: &MemoryHolder| {
        let name = holder.tenant.map_or_else(|| "heaps".to_owned(), name_of);
        format!("{} of {name}", ByteSize(holder.bytes))
    };
    holders.iter().map(show).collect::<Vec<_>>().join(", ")
}
