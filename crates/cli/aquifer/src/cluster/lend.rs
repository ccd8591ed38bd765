//! `aquifer lend`: changes how much memory a node lends.

use std::error::Error;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use aquifer_directory::names::{self, NodeRecord, RequestedMemory, ResizeBlocker};
use aquifer_directory::{Directory, DirectoryEntry, WatchEventKind};
use aquifer_pool::size::SECTION_BYTES;
use indicatif::{ProgressBar, ProgressStyle};

use super::config::ClusterConfig;
use super::location::DirectoryLocation;
use crate::Outcome;
use crate::cli::LendArguments;
use crate::say::say_line;
use crate::settings::DirectorySettings;
use crate::state::StateDir;
use aquifer_ipc::size::ByteSize;

/// Time without an event after which the progress bar is redrawn.
const REDRAW_INTERVAL: Duration = Duration::from_millis(100);
/// Time after which an obstacle is reported as an error. A node retries ten times a second.
pub(super) const OBSTACLE_TIMEOUT: Duration = Duration::from_secs(2);
/// Time within which a running node whose lease has expired gets a new one.
const LEASE_TIMEOUT: Duration = Duration::from_secs(10);

/// Requests a size from a node and waits until the node lends it.
pub fn lend(state: &StateDir, arguments: &LendArguments) -> Outcome {
    let directory = location(state, &arguments.directory)?.connect(state)?;
    let node = choose(names::nodes(&*directory)?, arguments.node, "give the node with --node NUMBER")?;
    if (1..SECTION_BYTES).contains(&arguments.size) {
        return Err(format!(
            "a node lends in steps of {}: give that much or more, or 0",
            ByteSize(SECTION_BYTES)
        )
        .into());
    }
    let memory_bytes = arguments.size / SECTION_BYTES * SECTION_BYTES;
    if memory_bytes > node.memory_bytes_max {
        let max = ByteSize(node.memory_bytes_max);
        let why = format!(
            "node {} can lend {max} at most: restart it with a greater --memory-max, or start another \
             (aquifer node --id NUMBER --memory SIZE)",
            node.id
        );
        return Err(why.into());
    }
    let request = RequestedMemory::new(node.id, node.epoch, memory_bytes);
    directory.put(&names::requested_memory_key(node.id), &names::encode(&request), None)?;
    if arguments.no_wait {
        say_line!(
            "requested {1} from node {0}, which lends {2}",
            node.id,
            ByteSize(memory_bytes),
            ByteSize(node.memory_bytes)
        );
        return Ok(ExitCode::SUCCESS);
    }
    wait(&*directory, &node, request)?;
    say_line!("node {} lends {}", node.id, ByteSize(memory_bytes));
    Ok(ExitCode::SUCCESS)
}

/// The directory of the command line; without one, the directory of the cluster in the state
/// folder.
pub(super) fn location(
    state: &StateDir,
    settings: &DirectorySettings,
) -> Result<DirectoryLocation, Box<dyn Error>> {
    let config = if settings.address.is_none() { ClusterConfig::load(state)? } else { None };
    Ok(DirectoryLocation::new(config.as_ref().map_or(settings, |config| &config.directory))?)
}

/// The node with the number `id`; without a number, the only node. `hint` says how to give one.
///
/// # Errors
/// A message with the numbers of all nodes.
pub(super) fn choose(nodes: Vec<NodeRecord>, id: Option<u16>, hint: &str) -> Result<NodeRecord, String> {
    let mut ids: Vec<u16> = nodes.iter().map(|node| node.id).collect();
    ids.sort_unstable();
    let ids: Vec<String> = ids.iter().map(ToString::to_string).collect();
    let known = if ids.is_empty() {
        "the directory has no node".to_owned()
    } else {
        format!("nodes: {}", ids.join(", "))
    };
    match id {
        Some(id) => nodes
            .into_iter()
            .find(|node| node.id == id)
            .ok_or_else(|| format!("there is no node {id}; {known}")),
        None => {
            let [only] = <[NodeRecord; 1]>::try_from(nodes).map_err(|_| format!("{hint}; {known}"))?;
            Ok(only)
        }
    }
}

/// Watches a node's record until the node lends the requested size.
struct LendProgress<'a> {
    request: RequestedMemory,
    directory: &'a dyn Directory,
    bar: ProgressBar,
    /// The reason why the node does not lend the requested size, and the time since when.
    blocker: Option<(ResizeBlocker, Instant)>,
    /// The time since when the node has no record. Its lease may have expired although it runs.
    missing_since: Option<Instant>,
}

/// Waits until the node lends the requested size, with a progress bar.
fn wait(
    directory: &dyn Directory,
    node: &NodeRecord,
    request: RequestedMemory,
) -> Result<(), Box<dyn Error>> {
    let bar = bar(node.memory_bytes.abs_diff(request.memory_bytes));
    let mut progress = LendProgress { request, directory, bar, blocker: None, missing_since: None };
    let key = names::node_key(node.id);
    let listing = directory.list(&key)?;
    let mut watch = directory.watch(&key, listing.revision + 1)?;
    let mut entry = listing.entries.into_iter().find(|entry| entry.key == key);
    loop {
        if progress.is_done(entry.as_ref(), node.memory_bytes)? {
            progress.bar.finish_and_clear();
            return Ok(());
        }
        let Some(event) = watch.next(REDRAW_INTERVAL)? else {
            progress.bar.tick();
            continue;
        };
        if event.key == key {
            entry = match event.kind {
                WatchEventKind::Put { value, lease } => {
                    Some(DirectoryEntry { key: event.key, value, version: event.revision, lease })
                }
                WatchEventKind::Delete => None,
            };
        }
    }
}

impl LendProgress<'_> {
    /// Whether the node lends the requested size. `initial_bytes` is the size that it lent before
    /// the request.
    fn is_done(
        &mut self,
        entry: Option<&DirectoryEntry>,
        initial_bytes: u64,
    ) -> Result<bool, Box<dyn Error>> {
        let RequestedMemory { node, epoch, memory_bytes, .. } = self.request;
        let ended = || format!("node {node} has ended, so the request has no effect");
        let Some(entry) = entry else {
            let since = *self.missing_since.get_or_insert_with(Instant::now);
            return if since.elapsed() < LEASE_TIMEOUT { Ok(false) } else { Err(ended().into()) };
        };
        self.missing_since = None;
        let record: NodeRecord = names::decode(entry)?;
        if record.epoch != epoch {
            return Err(ended().into());
        }
        if record.requested_memory_bytes != memory_bytes {
            // The node has not read the request yet, or has read a later one.
            self.check_request()?;
            return Ok(false);
        }
        self.bar.set_position(initial_bytes.abs_diff(record.memory_bytes));
        if record.memory_bytes == memory_bytes {
            return Ok(true);
        }
        if let Some(blocker) = record.resize_blocker {
            self.report(blocker, record.memory_bytes)?;
        }
        Ok(false)
    }

    /// # Errors
    /// If another process has replaced or removed the request.
    fn check_request(&self) -> Result<(), Box<dyn Error>> {
        let node = self.request.node;
        let entry = self.directory.get(&names::requested_memory_key(node))?;
        match entry.as_ref().map(names::decode::<RequestedMemory>).transpose()? {
            Some(request) if request == self.request => Ok(()),
            Some(request) => Err(format!(
                "another request replaced this one: node {node} is to lend {}",
                ByteSize(request.memory_bytes)
            )
            .into()),
            None => Err(format!("the request to node {node} was removed by another process").into()),
        }
    }

    /// Reports why the node does not lend the requested size.
    ///
    /// # Errors
    /// If the reason lasts, and is not memory in use, which will be freed.
    fn report(&mut self, blocker: ResizeBlocker, lent_bytes: u64) -> Result<(), Box<dyn Error>> {
        let is_new = self.blocker.is_none_or(|(before, _)| before != blocker);
        if is_new {
            self.blocker = Some((blocker, Instant::now()));
        }
        let is_persistent = self.blocker.is_some_and(|(_, since)| since.elapsed() >= OBSTACLE_TIMEOUT);
        let what = format!("node {} lends {}: {blocker}", self.request.node, ByteSize(lent_bytes));
        if blocker != ResizeBlocker::InUse && is_persistent {
            self.bar.finish_and_clear();
            return Err(what.into());
        }
        if blocker == ResizeBlocker::InUse && is_new {
            // The bar is hidden if standard error is not a terminal.
            self.bar.set_message("waiting until memory in use is moved or freed");
            if self.bar.is_hidden() {
                crate::say::say_error!("{what}");
            }
        }
        Ok(())
    }
}

fn bar(bytes: u64) -> ProgressBar {
    let bar = ProgressBar::new(bytes);
    match ProgressStyle::with_template("{elapsed} {wide_bar} {bytes} of {total_bytes}  {msg}") {
        Ok(style) => bar.with_style(style),
        Err(_) => bar,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(id: u16) -> NodeRecord {
        let (fabric, address) = ("shm".to_owned(), "/there".to_owned());
        NodeRecord {
            id,
            fabric,
            address,
            memory_bytes: 0,
            memory_bytes_max: 0,
            requested_memory_bytes: 0,
            resize_blocker: None,
            recalled_bytes: 0,
            recalled_from: Vec::new(),
            kept_ms: 0,
            epoch: 1,
            is_disk: false,
        }
    }

    #[test]
    fn a_node_is_chosen_or_the_error_lists_all() {
        assert_eq!(choose(vec![node(7)], None, "").unwrap().id, 7);
        assert_eq!(choose(vec![node(7), node(3)], Some(3), "").unwrap().id, 3);
        for id in [None, Some(4)] {
            assert!(choose(vec![node(7), node(3)], id, "").unwrap_err().contains("nodes: 3, 7"));
            assert!(choose(Vec::new(), id, "").unwrap_err().contains("no node"));
        }
    }
}
