//! Killing the agent, and nodes, under programs that go on.

use crate::cluster::text;
use crate::run::{Running, status};
use crate::{Cluster, eventually, processes};

/// Kill the agent, and start another.
///
/// # Panics
/// If there is none, or none comes.
pub fn restart_agent(cluster: &Cluster) {
    let agent = cluster.part("agent", None);
    processes::kill(agent);
    start_missing(cluster, "Started agent");
}

/// Kill a node, and start another under its number.
///
/// # Panics
/// If there is none, or none comes.
pub fn restart_node(cluster: &Cluster, number: usize) {
    processes::kill(cluster.part("node", Some(number)));
    start_missing(cluster, &format!("Started node-{number}"));
}

/// `aquifer up`, which says that it started something.
///
/// # Panics
/// If it did not.
pub fn start_missing(cluster: &Cluster, what: &str) {
    let output = cluster.command().arg("up").output().expect("aquifer can be started");
    assert!(output.status.success(), "aquifer up failed: {}", text(&output.stderr));
    assert!(text(&output.stdout).contains(what), "{}", text(&output.stdout));
}

/// A figure of all programs of the run together, as the agent that runs now has counted it; `None`
/// if there is no answer.
#[must_use]
pub fn figure(cluster: &Cluster, name: &str) -> Option<u64> {
    let status = status(cluster.agent_socket())?;
    Some(status["runs"].as_array()?.iter().filter_map(|run| run[name].as_u64()).sum())
}

/// Wait until `is_time`; false if the program has ended before.
///
/// # Panics
/// If neither happens.
#[must_use]
pub fn await_time(run: &mut Running, what: &str, mut is_time: impl FnMut() -> bool) -> bool {
    eventually(what, || {
        if run.has_ended() {
            return Some(false);
        }
        is_time().then_some(true)
    })
}
