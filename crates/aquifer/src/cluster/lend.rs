//! `aquifer lend`: change how much a memory node lends.

use std::error::Error;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use aquifer_directory::names::{self, NodeRecord, RequestedMemory, ResizeBlocker};
use aquifer_directory::{Directory, DirectoryEntry, WatchEventKind};
use aquifer_pool::size::SECTION_BYTES;
use indicatif::{ProgressBar, ProgressStyle};

use super::shape::Shape;
use super::source::Source;
use crate::Outcome;
use crate::cli::LendArguments;
use crate::say::say_line;
use crate::settings::DirectorySettings;
use crate::state::StateDir;
use aquifer_ipc::size::ByteSize;

/// How long to wait for news before the bar is drawn anew.
const TICK: Duration = Duration::from_millis(100);
/// A node tries again ten times a second: what holds it up for longer does not pass soon.
const HELD_UP_PATIENCE: Duration = Duration::from_secs(2);
/// A node whose lease is over takes a new one within so long, if it lives.
const LEASE_PATIENCE: Duration = Duration::from_secs(10);

/// Ask a node, and wait until it lends that.
pub fn lend(state: &StateDir, arguments: &LendArguments) -> Outcome {
    let directory = source(state, &arguments.directory)?.connect(state)?;
    let node = choose(names::nodes(&*directory)?, arguments.node)?;
    if (1..SECTION_BYTES).contains(&arguments.size) {
        return Err(format!("a node lends in steps of {}, or nothing", ByteSize(SECTION_BYTES)).into());
    }
    let memory_bytes = arguments.size / SECTION_BYTES * SECTION_BYTES;
    if memory_bytes > node.memory_bytes_max {
        let most = ByteSize(node.memory_bytes_max);
        let why = format!(
            "node {} can lend {most} at most: that is said when it starts, with --memory-max SIZE",
            node.id
        );
        return Err(why.into());
    }
    let wanted = RequestedMemory { node: node.id, epoch: node.epoch, memory_bytes };
    directory.put(&names::requested_memory_key(node.id), &names::encode(&wanted), None)?;
    if arguments.no_wait {
        say_line!(
            "node {} is asked to lend {}; it lends {}",
            node.id,
            ByteSize(memory_bytes),
            ByteSize(node.memory_bytes)
        );
        return Ok(ExitCode::SUCCESS);
    }
    wait(&*directory, &node, wanted)?;
    say_line!("node {} lends {}", node.id, ByteSize(memory_bytes));
    Ok(ExitCode::SUCCESS)
}

/// The directory that was named, else that of the cluster that is up here.
fn source(state: &StateDir, asked: &DirectorySettings) -> Result<Source, Box<dyn Error>> {
    let shape = if asked.address.is_none() { Shape::load(state)? } else { None };
    Ok(Source::new(shape.as_ref().map_or(asked, |shape| &shape.directory))?)
}

fn choose(nodes: Vec<NodeRecord>, asked: Option<u16>) -> Result<NodeRecord, String> {
    let mut ids: Vec<u16> = nodes.iter().map(|node| node.id).collect();
    ids.sort_unstable();
    let ids: Vec<String> = ids.iter().map(ToString::to_string).collect();
    let there =
        if ids.is_empty() { "there are none".to_owned() } else { format!("there are: {}", ids.join(", ")) };
    match asked {
        Some(id) => nodes
            .into_iter()
            .find(|node| node.id == id)
            .ok_or_else(|| format!("no memory node has the number {id}; {there}")),
        None => {
            let [only] = <[NodeRecord; 1]>::try_from(nodes)
                .map_err(|_| format!("say which memory node, with --node NUMBER; {there}"))?;
            Ok(only)
        }
    }
}

/// What follows a wish: the node's record, and what others wish.
struct Follower<'a> {
    wanted: RequestedMemory,
    directory: &'a dyn Directory,
    bar: ProgressBar,
    /// What holds it up, since when.
    held_up: Option<(ResizeBlocker, Instant)>,
    /// The node is not in the directory: perhaps only its lease is over.
    gone_since: Option<Instant>,
}

/// Follow what the node says until it lends so much.
fn wait(directory: &dyn Directory, node: &NodeRecord, wanted: RequestedMemory) -> Result<(), Box<dyn Error>> {
    let bar = bar(node.memory_bytes.abs_diff(wanted.memory_bytes));
    let mut follower = Follower { wanted, directory, bar, held_up: None, gone_since: None };
    let key = names::node_key(node.id);
    let listing = directory.list(&key)?;
    let mut watch = directory.watch(&key, listing.revision + 1)?;
    let mut entry = listing.entries.into_iter().find(|entry| entry.key == key);
    loop {
        if follower.is_so(entry.as_ref(), node.memory_bytes)? {
            follower.bar.finish_and_clear();
            return Ok(());
        }
        let Some(event) = watch.next(TICK)? else {
            follower.bar.tick();
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

impl Follower<'_> {
    /// Whether the node lends what was wished. `began_with` is what it lent before, for the bar.
    fn is_so(&mut self, entry: Option<&DirectoryEntry>, began_with: u64) -> Result<bool, Box<dyn Error>> {
        let RequestedMemory { node, epoch, memory_bytes } = self.wanted;
        let gone = || format!("node {node} is gone, and with it the wish");
        let Some(entry) = entry else {
            let since = *self.gone_since.get_or_insert_with(Instant::now);
            return if since.elapsed() < LEASE_PATIENCE { Ok(false) } else { Err(gone().into()) };
        };
        self.gone_since = None;
        let record: NodeRecord = names::decode(entry)?;
        if record.epoch != epoch {
            return Err(gone().into());
        }
        if record.requested_memory_bytes != memory_bytes {
            // It has not heard of it yet; or of another since.
            self.check_wish()?;
            return Ok(false);
        }
        self.bar.set_position(began_with.abs_diff(record.memory_bytes));
        if record.memory_bytes == memory_bytes {
            return Ok(true);
        }
        if let Some(held_up) = record.resize_blocker {
            self.tell(held_up, record.memory_bytes)?;
        }
        Ok(false)
    }

    fn check_wish(&self) -> Result<(), Box<dyn Error>> {
        let node = self.wanted.node;
        let entry = self.directory.get(&names::requested_memory_key(node))?;
        match entry.as_ref().map(names::decode::<RequestedMemory>).transpose()? {
            Some(wish) if wish == self.wanted => Ok(()),
            Some(wish) => Err(format!(
                "somebody else has asked node {node} for {} meanwhile",
                ByteSize(wish.memory_bytes)
            )
            .into()),
            None => Err(format!("somebody has taken back what node {node} was asked").into()),
        }
    }

    /// What holds it up; what does not pass by itself is an error.
    fn tell(&mut self, held_up: ResizeBlocker, lent: u64) -> Result<(), Box<dyn Error>> {
        let is_news = self.held_up.is_none_or(|(before, _)| before != held_up);
        if is_news {
            self.held_up = Some((held_up, Instant::now()));
        }
        let is_lasting = self.held_up.is_some_and(|(_, since)| since.elapsed() >= HELD_UP_PATIENCE);
        let what = format!("node {} lends {}: {held_up}", self.wanted.node, ByteSize(lent));
        if held_up != ResizeBlocker::InUse && is_lasting {
            self.bar.finish_and_clear();
            return Err(what.into());
        }
        if held_up == ResizeBlocker::InUse && is_news {
            // The bar hides where nobody looks.
            self.bar.set_message("waiting for what is in use");
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
            kept_ms: 0,
            epoch: 1,
        }
    }

    #[test]
    fn a_node_is_chosen_or_those_that_there_are_are_told() {
        assert_eq!(choose(vec![node(7)], None).unwrap().id, 7);
        assert_eq!(choose(vec![node(7), node(3)], Some(3)).unwrap().id, 3);
        for asked in [None, Some(4)] {
            assert!(choose(vec![node(7), node(3)], asked).unwrap_err().contains("there are: 3, 7"));
            assert!(choose(Vec::new(), asked).unwrap_err().contains("there are none"));
        }
    }
}
