//! `aquifer lend`: change how much a memory node lends.

use std::process::ExitCode;
use std::time::Duration;

use aquifer_directory::names::{self, HeldUp, NodeRecord, WantedRecord};
use aquifer_directory::{Directory, Entry, EventKind};
use aquifer_pool::size::SECTION_BYTES;
use indicatif::{ProgressBar, ProgressStyle};

use super::shape::Shape;
use super::source::Source;
use crate::Outcome;
use crate::cli::LendArguments;
use crate::say::say_line;
use crate::settings::DirectorySettings;
use crate::size::Size;
use crate::state::StateDir;

/// How long to wait for news before the bar is drawn anew.
const TICK: Duration = Duration::from_millis(100);

/// Ask a node, and wait until it lends that.
pub fn lend(state: &StateDir, arguments: &LendArguments) -> Outcome {
    let directory = source(state, &arguments.directory)?.connect(state)?;
    let node = choose(names::nodes(&*directory)?, arguments.node)?;
    let memory_bytes = arguments.size / SECTION_BYTES * SECTION_BYTES;
    if memory_bytes > node.memory_bytes_max {
        let most = Size(node.memory_bytes_max);
        let why = format!(
            "node {} can lend {most} at most: that is said when it starts, with --memory-max SIZE",
            node.id
        );
        return Err(why.into());
    }
    let wanted = WantedRecord { node: node.id, epoch: node.epoch, memory_bytes };
    directory.put(&names::wanted(node.id), &names::encode(&wanted), None)?;
    if arguments.no_wait {
        say_line!(
            "node {} is asked to lend {}; it lends {}",
            node.id,
            Size(memory_bytes),
            Size(node.memory_bytes)
        );
        return Ok(ExitCode::SUCCESS);
    }
    wait(&*directory, &node, memory_bytes)?;
    say_line!("node {} lends {}", node.id, Size(memory_bytes));
    Ok(ExitCode::SUCCESS)
}

/// The directory that was named, else that of the cluster that is up here.
fn source(state: &StateDir, asked: &DirectorySettings) -> Result<Source, Box<dyn std::error::Error>> {
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

/// Follow what the node says until it lends so much.
fn wait(directory: &dyn Directory, node: &NodeRecord, wanted: u64) -> Result<(), Box<dyn std::error::Error>> {
    let gone = || format!("node {} is gone, and with it the wish", node.id);
    let key = names::node(node.id);
    let listing = directory.list(&key)?;
    let mut watch = directory.watch(&key, listing.revision + 1)?;
    let entry = listing.entries.into_iter().find(|entry| entry.key == key).ok_or_else(gone)?;
    let mut record: NodeRecord = names::decode(&entry)?;
    let bar = bar(node.memory_bytes.abs_diff(wanted));
    let mut told = None;
    loop {
        if record.epoch != node.epoch {
            return Err(gone().into());
        }
        if record.memory_bytes == wanted {
            bar.finish_and_clear();
            return Ok(());
        }
        bar.set_position(node.memory_bytes.abs_diff(record.memory_bytes));
        let held_up = record.held_up.filter(|_| record.memory_bytes_wanted == wanted);
        if let Some(held_up) = held_up.filter(|held_up| told != Some(*held_up)) {
            told = Some(held_up);
            let what = format!("node {} lends {}: {held_up}", node.id, Size(record.memory_bytes));
            if held_up != HeldUp::InUse {
                bar.finish_and_clear();
                return Err(what.into());
            }
            // The bar hides where nobody looks.
            bar.set_message("waiting for what is in use");
            if bar.is_hidden() {
                eprintln!("aquifer: {what}");
            }
        }
        let Some(event) = watch.next(TICK)? else {
            bar.tick();
            continue;
        };
        if event.key == key {
            let EventKind::Put { value, lease } = event.kind else { return Err(gone().into()) };
            record = names::decode(&Entry { key: event.key, value, version: event.revision, lease })?;
        }
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
            memory_bytes_wanted: 0,
            held_up: None,
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
