//! Restarts of the agent and of nodes while programs run.

use crate::cluster::text;
use crate::run::{Running, status};
use crate::{Cluster, eventually, processes};

/// Kills the agent and starts another.
///
/// # Panics
/// If none runs, or none starts.
pub fn restart_agent(cluster: &Cluster) {
    let agent = cluster.daemon("agent", None);
    processes::kill(agent);
    start_missing(cluster, "Started agent");
}

/// Kills a node and starts another with its number.
///
/// # Panics
/// If none runs, or none starts.
pub fn restart_node(cluster: &Cluster, number: usize) {
    processes::kill(cluster.daemon("node", Some(number)));
    start_missing(cluster, &format!("Started node-{number}"));
}

/// Kills the service of heaps of a node and starts another.
///
/// # Panics
/// If none runs, or none starts.
pub fn restart_heaps(cluster: &Cluster, number: usize) {
    processes::kill(cluster.daemon("heap-service", Some(number)));
    start_missing(cluster, &format!("Started heaps-{number}"));
}

/// Runs `aquifer up`, whose output must contain `what`.
///
/// # Panics
/// If the output does not contain it.
pub fn start_missing(cluster: &Cluster, what: &str) {
    let output = cluster.command().arg("up").output().expect("aquifer can be started");
    assert!(output.status.success(), "aquifer up failed: {}", text(&output.stderr));
    assert!(text(&output.stdout).contains(what), "{}", text(&output.stdout));
}

/// Sum of a statistic over all runs, counted since the agent's start; `None` if the agent does not
/// answer.
#[must_use]
pub fn figure(cluster: &Cluster, name: &str) -> Option<u64> {
    let status = status(cluster.agent_socket())?;
    Some(status["runs"].as_array()?.iter().filter_map(|run| run[name].as_u64()).sum())
}

/// Waits until `is_time`; returns false if the program has ended before.
///
/// # Panics
/// If neither happens in time.
#[must_use]
pub fn await_time(run: &mut Running, what: &str, mut is_time: impl FnMut() -> bool) -> bool {
    eventually(what, || {
        if run.has_ended() {
            return Some(false);
        }
        is_time().then_some(true)
    })
}
