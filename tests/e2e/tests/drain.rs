//! Nodes that are emptied under programs which check every byte.

use std::process::Output;

use aquifer_tests_e2e::cluster::text;
use aquifer_tests_e2e::only_run::{await_faults, end_checker, figure, figures};
use aquifer_tests_e2e::run::{Running, mempool_share};
use aquifer_tests_e2e::{Cluster, build, eventually, processes};
use rustix::process::Signal;
use serde_json::Value;

const MIB: u64 = 1 << 20;

fn drain(cluster: &Cluster, words: &[&str]) -> Output {
    cluster.command().arg("drain").args(words).output().expect("it can be started")
}

fn assert_drained(cluster: &Cluster, node: &str) {
    let output = drain(cluster, &[node]);
    assert!(output.status.success(), "{}\n{}", text(&output.stderr), cluster.logs());
    assert!(text(&output.stdout).contains("is empty"), "{}", text(&output.stdout));
    let lent = lent_bytes(cluster, node);
    assert_eq!(lent, Some(0), "node {node}");
}

fn undo(cluster: &Cluster, node: &str) {
    let output = drain(cluster, &[node, "--undo"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    eventually("the node to lend again", || (lent_bytes(cluster, node)? > 0).then_some(()));
}

/// The memory that a node lends, as `aquifer status` shows it.
fn lent_bytes(cluster: &Cluster, node: &str) -> Option<u64> {
    let status = cluster.status();
    let nodes = status["nodes"].as_array()?;
    let of_node = |other: &&Value| other["id"].as_u64().is_some_and(|id| id.to_string() == node);
    nodes.iter().find(of_node)?["memory_bytes"].as_u64()
}

fn start_checker(cluster: &Cluster, replicas: &str, bytes: &str) -> Running {
    let checker = build::programs().join("checker");
    let mut command = cluster.command();
    command.args(["run", "--replicas", replicas, "--local", "16M", "--"]).arg(checker);
    command.args(["pages", "--bytes", bytes, "--rounds", "1000000"]);
    Running::start(&mut command, false, mempool_share(cluster.agent_socket()))
}

/// Memory of the only run that nodes recall.
fn recalled_bytes(cluster: &Cluster) -> Option<u64> {
    let run = figures(cluster)?;
    let recalled = run["recalled"].as_array()?;
    Some(recalled.iter().filter_map(|recalled| recalled["bytes"].as_u64()).sum())
}

/// Drains each node in turn, and kills the last one when it is empty.
fn drain_all(fabric: &str) {
    let cluster = Cluster::up_with(2, "256M", &["--fabric", fabric]);
    let run = start_checker(&cluster, "1", "64M");
    eventually("most of it to be on nodes", || (figure(&cluster, "remote_bytes")? >= 40 * MIB).then_some(()));
    for node in ["1", "2"] {
        assert_drained(&cluster, node);
        await_faults(&cluster, 5000);
        undo(&cluster, node);
    }
    assert!(figure(&cluster, "moved_bytes") >= Some(40 * MIB));
    assert_drained(&cluster, "1");
    processes::signal(cluster.daemon("node", Some(1)), Signal::KILL);
    await_faults(&cluster, 5000);
    end_checker(&cluster, run);
}

#[test]
fn all_nodes_are_drained_one_after_another() {
    drain_all("shm");
}

#[test]
fn all_nodes_are_drained_one_after_another_over_tcp() {
    drain_all("tcp");
}

#[test]
fn replicas_stay_on_distinct_nodes_when_one_is_drained() {
    for replicas in ["2", "3"] {
        let cluster = Cluster::up(4, "128M");
        let run = start_checker(&cluster, replicas, "40M");
        let is_complete = || {
            (figure(&cluster, "remote_bytes")? >= 40 * MIB && figure(&cluster, "degraded_slabs")? == 0)
                .then_some(())
        };
        eventually("all pages to be on distinct nodes", is_complete);
        assert_drained(&cluster, "3");
        eventually("all replicas to exist again", is_complete);
        processes::signal(cluster.daemon("node", Some(3)), Signal::KILL);
        await_faults(&cluster, 5000);
        assert_eq!(figure(&cluster, "lost_pages"), Some(0));
        end_checker(&cluster, run);
    }
}

#[test]
fn a_drain_without_room_elsewhere_can_be_undone() {
    let cluster = Cluster::up(1, "128M");
    let run = start_checker(&cluster, "1", "40M");
    eventually("pages on the node", || (figure(&cluster, "remote_bytes")? >= 20 * MIB).then_some(()));
    let output = drain(&cluster, &["--no-wait"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    eventually("the node to want its memory back", || (recalled_bytes(&cluster)? >= 20 * MIB).then_some(()));
    await_faults(&cluster, 5000);
    undo(&cluster, "1");
    eventually("nothing to leave any more", || (recalled_bytes(&cluster)? == 0).then_some(()));
    let again = drain(&cluster, &["--undo"]);
    assert!(text(&again.stderr).contains("is not being drained"), "{}", text(&again.stderr));
    end_checker(&cluster, run);
    cluster.assert_all_free();
}

#[test]
fn a_forced_drain_names_the_run_that_loses_memory() {
    // Without a page cache, in which pages outlive the node.
    let cluster = Cluster::up_with(2, "128M", &["--cache-per-user=0"]);
    assert_drained(&cluster, "2");
    let run = start_checker(&cluster, "1", "40M");
    eventually("pages on the node", || (figure(&cluster, "remote_bytes")? >= 20 * MIB).then_some(()));
    let asked = drain(&cluster, &["1", "--force"]);
    assert!(!asked.status.success());
    assert!(text(&asked.stderr).contains("add --yes"), "{}", text(&asked.stderr));
    await_faults(&cluster, 5000);
    let forced = drain(&cluster, &["1", "--force", "--yes"]);
    let printed = text(&forced.stdout);
    assert!(forced.status.success(), "{printed}{}", text(&forced.stderr));
    for expected in ["checker", "without a copy on another node", "node 1 has ended"] {
        assert!(printed.contains(expected), "no \"{expected}\" in: {printed}");
    }
    // Until then, evicted pages wait for room.
    undo(&cluster, "2");
    let outcome = run.wait();
    assert!(outcome.stderr.contains("memory node"), "no message: {}", outcome.stderr);
    assert!(!outcome.stderr.contains("FAILED"), "the program saw wrong memory: {}", outcome.stderr);
}
