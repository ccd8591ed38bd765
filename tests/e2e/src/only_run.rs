//! The only run of a cluster: its figures, and a program that checks its pages.

use rustix::process::Signal;
use serde_json::Value;

use crate::cluster::Cluster;
use crate::eventually::eventually;
use crate::processes;
use crate::run::{Running, status};

/// The statistics of the only run of a cluster.
#[must_use]
pub fn figures(cluster: &Cluster) -> Option<Value> {
    status(cluster.agent_socket())?["runs"].as_array()?.first().cloned()
}

/// A figure of the only run of a cluster.
#[must_use]
pub fn figure(cluster: &Cluster, name: &str) -> Option<u64> {
    figures(cluster)?[name].as_u64()
}

/// Waits until this many more faults of the only run are served.
///
/// # Panics
/// If there is no run, or the faults are not served in time.
pub fn await_faults(cluster: &Cluster, more: u64) {
    let before = figure(cluster, "faults").expect("the program runs");
    eventually("the program to continue", || (figure(cluster, "faults")? >= before + more).then_some(()));
}

/// Kills the program of the only run, which checks its pages.
///
/// # Panics
/// If it has ended, seen a wrong page, or lost one.
pub fn end_checker(cluster: &Cluster, run: Running) {
    let program = processes::descendants(run.pid()).first().copied().expect("the program still runs");
    assert_eq!(figure(cluster, "lost_pages"), Some(0));
    processes::signal(program, Signal::KILL);
    let outcome = run.wait();
    assert!(!outcome.stderr.contains("FAILED"), "the program saw wrong memory: {}", outcome.stderr);
    assert!(!outcome.stderr.contains("SIGBUS"), "a page was lost: {}", outcome.stderr);
}
