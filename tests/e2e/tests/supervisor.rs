//! The supervisor of `aquifer up`: daemons that die are started again, and those that are stopped
//! are not.

use std::fs::File;
use std::path::Path;

use aquifer_tests_e2e::cluster::text;
use aquifer_tests_e2e::restart::start_missing;
use aquifer_tests_e2e::{Cluster, eventually, processes};
use rustix::process::Signal;

/// The process that has locked a daemon's lock file last.
fn last_process(cluster: &Cluster, daemon: &str) -> Option<u32> {
    let lock = std::fs::read_to_string(cluster.state().join(format!("{daemon}.lock"))).ok()?;
    lock.lines().next()?.parse().ok()
}

/// Kills daemons, and waits until the supervisor has started them again.
fn kill_and_await(cluster: &Cluster, daemons: &[&str]) {
    let processes: Vec<_> =
        daemons.iter().map(|daemon| last_process(cluster, daemon).expect("it runs")).collect();
    for process in &processes {
        processes::kill(*process);
    }
    for (daemon, before) in daemons.iter().zip(processes) {
        eventually(&format!("{daemon} to be started again"), || {
            last_process(cluster, daemon).filter(|process| *process != before)
        });
    }
}

/// Whether no process holds the lock of a file.
fn is_free(lock: &Path) -> bool {
    File::open(lock).expect("it is ours").try_lock().is_ok()
}

#[test]
fn daemons_that_die_are_started_again_and_those_that_are_stopped_are_not() {
    let cluster = Cluster::up_with_supervisor(2, "64M", &[]);
    kill_and_await(&cluster, &["directory", "node-1", "agent"]);
    eventually("all daemons to serve", || (cluster.status()["up"] == true).then_some(()));
    assert_eq!(text(&cluster.run("64M", &["echo", "here"]).stdout), "here\n");

    processes::kill(cluster.daemon("supervisor", None));
    assert_eq!(cluster.status()["up"], false);
    start_missing(&cluster, "Started supervisor\n");

    let stopped = cluster.daemon("node", Some(1));
    processes::signal(stopped, Signal::TERM);
    eventually("the node to stop", || (!processes::is_alive(stopped)).then_some(()));
    // The supervisor would start the node that has ended first before the other.
    kill_and_await(&cluster, &["node-2"]);
    assert_eq!(last_process(&cluster, "node-1"), Some(stopped), "it was stopped");
    start_missing(&cluster, "Started node-1\n");

    let down = cluster.command().arg("down").output().expect("aquifer can be started");
    let said = text(&down.stdout);
    assert!(said.contains("Stopped supervisor, agent, node-1, node-2, keeper, directory"), "{said}");
    assert!(!said.contains("killed"), "{said}");
    assert!(cluster.daemons().is_empty(), "{:?}", cluster.daemons());
    for file in std::fs::read_dir(cluster.state()).expect("it is ours").flatten() {
        let path = file.path();
        assert!(path.extension().is_none_or(|name| name != "lock") || is_free(&path), "{}", path.display());
    }
}

mod long {
    use super::*;

    /// The supervisor watches a daemon that `aquifer up` has started after it was stopped.
    #[test]
    fn a_daemon_that_was_started_by_another_is_watched() {
        let cluster = Cluster::up_with_supervisor(1, "64M", &[]);
        let stopped = cluster.daemon("keeper", None);
        processes::signal(stopped, Signal::TERM);
        eventually("the keeper to stop", || (!processes::is_alive(stopped)).then_some(()));
        start_missing(&cluster, "Started keeper\n");
        kill_and_await(&cluster, &["keeper"]);
        kill_and_await(&cluster, &["keeper"]);
        eventually("all daemons to serve", || (cluster.status()["up"] == true).then_some(()));
    }

    #[test]
    fn the_supervisor_ends_with_the_configuration() {
        let cluster = Cluster::up_with_supervisor(1, "64M", &[]);
        let supervisor = cluster.daemon("supervisor", None);
        std::fs::remove_file(cluster.state().join("cluster.json")).expect("it is there");
        eventually("the supervisor to end", || (!processes::is_alive(supervisor)).then_some(()));
        let cluster = Cluster::up_with_supervisor(1, "64M", &[]);
        let supervisor = cluster.daemon("supervisor", None);
        std::fs::remove_file(cluster.state().join("supervisor.lock")).expect("it is there");
        eventually("the supervisor to end", || (!processes::is_alive(supervisor)).then_some(()));
    }
}
