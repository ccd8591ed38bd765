//! Deaths and stops of nodes under programs with replicas.

use aquifer_tests_e2e::cluster::text;
use aquifer_tests_e2e::only_run::{await_faults, end_checker, figure};
use aquifer_tests_e2e::restart::restart_agent;
use aquifer_tests_e2e::run::{Running, mempool_share};
use aquifer_tests_e2e::{Cluster, build, eventually, processes};
use rustix::process::Signal;

const LIMIT: &str = "16M";
const BYTES: &str = "48M";

fn start_checker(cluster: &Cluster, rounds: &str) -> Running {
    let checker = build::programs().join("checker");
    let mut command = cluster.command();
    command.args(["run", "--replicas", "2", "--local", LIMIT, "--"]).arg(checker);
    command.args(["pages", "--bytes", BYTES, "--rounds", rounds]);
    Running::start(&mut command, false, mempool_share(cluster.agent_socket()))
}

/// Waits until pages of the program are on two nodes.
fn await_paging(cluster: &Cluster) {
    eventually("a program to be paged", || {
        (figure(cluster, "remote_bytes")? >= 48 << 20 && figure(cluster, "degraded_slabs")? == 0)
            .then_some(())
    });
}

fn await_replicas(cluster: &Cluster) {
    eventually("all pages to be on two nodes again", || {
        (figure(cluster, "degraded_slabs")? == 0).then_some(())
    });
}

#[test]
fn a_dead_node_is_not_noticed() {
    kill_a_node("shm", "8");
}

#[test]
fn a_dead_node_elsewhere_is_not_noticed() {
    kill_a_node("tcp", "3");
}

fn kill_a_node(fabric: &str, rounds: &str) {
    let cluster = Cluster::up_with(3, "256M", &["--fabric", fabric]);
    let run = start_checker(&cluster, rounds);
    await_paging(&cluster);
    processes::signal(cluster.daemon("node", Some(2)), Signal::KILL);
    let outcome = run.wait();
    outcome.assert_success("the run beside a node that died");
    assert_eq!(outcome.stderr, "", "it should not have noticed");
}

/// The program continues while the node is away, although the node's memory is kept for longer than
/// the test takes. Its pages have one replica less meanwhile.
#[test]
fn a_node_with_kept_memory_is_not_waited_for() {
    let options = ["--fabric", "tcp", "--keep-memory", "--grace", "10m"];
    let cluster = Cluster::up_with(3, "256M", &options);
    let run = start_checker(&cluster, "1000000");
    await_paging(&cluster);
    let node = cluster.daemon("node", Some(2));
    processes::signal(node, Signal::STOP);
    await_faults(&cluster, 8_000);
    processes::signal(node, Signal::CONT);
    await_faults(&cluster, 8_000);
    await_replicas(&cluster);
    processes::kill(node);
    await_faults(&cluster, 8_000);
    let output = cluster.command().arg("up").output().expect("aquifer can be started");
    assert!(output.status.success(), "aquifer up failed: {}", text(&output.stderr));
    await_replicas(&cluster);
    await_faults(&cluster, 8_000);
    end_checker(&cluster, run);
    cluster.assert_all_free();
}

#[test]
fn replicas_are_made_again_so_that_another_node_may_die() {
    let cluster = Cluster::up(3, "256M");
    let run = start_checker(&cluster, "1000000");
    await_paging(&cluster);
    processes::signal(cluster.daemon("node", Some(3)), Signal::KILL);
    eventually("all pages to be on two nodes again", || {
        (figure(&cluster, "copied_slabs")? > 0 && figure(&cluster, "degraded_slabs")? == 0).then_some(())
    });
    processes::signal(cluster.daemon("node", Some(1)), Signal::KILL);
    eventually("the second death to be seen", || (figure(&cluster, "degraded_slabs")? > 0).then_some(()));
    let said = text(&cluster.command().arg("status").output().expect("aquifer can be started").stdout);
    assert!(said.contains("degraded"), "people should see it: {said}");
    await_faults(&cluster, 50_000);
    end_checker(&cluster, run);
}

/// Replaces the nodes one after the other, as an upgrade does. Runs that began before use the new
/// nodes.
#[test]
fn all_nodes_may_be_replaced_under_a_program() {
    for fabric in ["shm", "tcp"] {
        let cluster = Cluster::up_with(3, "256M", &["--fabric", fabric]);
        let run = start_checker(&cluster, "1000000");
        await_paging(&cluster);
        for node in [3, 1, 2] {
            let before = figure(&cluster, "copied_slabs").expect("the program runs");
            processes::kill(cluster.daemon("node", Some(node)));
            let output = cluster.command().arg("up").output().expect("aquifer can be started");
            assert!(output.status.success(), "aquifer up failed: {}", text(&output.stderr));
            eventually("all pages to be on two nodes again", || {
                let is_whole =
                    figure(&cluster, "copied_slabs")? > before && figure(&cluster, "degraded_slabs")? == 0;
                is_whole.then_some(())
            });
        }
        await_faults(&cluster, 8_000);
        end_checker(&cluster, run);
    }
}

/// The next agent finds a node with the same number and new memory.
#[test]
fn a_node_may_be_replaced_while_there_is_no_agent() {
    let cluster = Cluster::up(3, "256M");
    let run = start_checker(&cluster, "1000000");
    await_paging(&cluster);
    processes::kill(cluster.daemon("agent", None));
    processes::kill(cluster.daemon("node", Some(2)));
    let output = cluster.command().arg("up").output().expect("aquifer can be started");
    assert!(output.status.success(), "aquifer up failed: {}", text(&output.stderr));
    eventually("all pages to be on two nodes again", || {
        (figure(&cluster, "copied_slabs")? > 0 && figure(&cluster, "degraded_slabs")? == 0).then_some(())
    });
    processes::kill(cluster.daemon("node", Some(1)));
    await_faults(&cluster, 50_000);
    end_checker(&cluster, run);
}

/// The next agent resumes without a node that does not answer, and frees the memory there later.
fn resume_without_a_node(is_away: bool) {
    let cluster = Cluster::up_with(3, "256M", &["--fabric", "tcp"]);
    let run = start_checker(&cluster, "1000000");
    await_paging(&cluster);
    let node = cluster.daemon("node", Some(2));
    processes::signal(node, Signal::STOP);
    if is_away {
        cluster.await_nodes(2);
    }
    restart_agent(&cluster);
    eventually("copies to be made", || (figure(&cluster, "copied_slabs")? > 0).then_some(()));
    processes::signal(node, Signal::CONT);
    cluster.await_nodes(3);
    await_faults(&cluster, 20_000);
    end_checker(&cluster, run);
    cluster.assert_all_free();
}

#[test]
fn more_replicas_than_nodes_are_refused() {
    let cluster = Cluster::up(1, "64M");
    let run = |replicas: &str| {
        let mut command = cluster.command();
        command.args(["run", "--replicas", replicas, "--local", "64M", "--", "true"]);
        command.output().expect("aquifer can be started")
    };
    let output = run("2");
    assert_eq!(output.status.code(), Some(125));
    let said = text(&output.stderr);
    assert!(said.contains("--replicas 2") && said.contains("the cluster has 1"), "{said}");
    assert!(run("1").status.success());
}

mod long {
    use super::*;

    /// Without kept memory, the replicas of a node whose lease has ended are made again.
    #[test]
    fn the_replicas_of_a_stopped_node_are_made_again() {
        let cluster = Cluster::up_with(3, "256M", &["--fabric", "tcp"]);
        let run = start_checker(&cluster, "1000000");
        await_paging(&cluster);
        let node = cluster.daemon("node", Some(2));
        processes::signal(node, Signal::STOP);
        eventually("the replicas of the node to be made again", || {
            (figure(&cluster, "copied_slabs")? > 0).then_some(())
        });
        await_faults(&cluster, 20_000);
        // The node's replicas are out of date: they are not read, and are freed.
        processes::signal(node, Signal::CONT);
        await_faults(&cluster, 20_000);
        end_checker(&cluster, run);
        cluster.assert_all_free();
    }

    #[test]
    fn a_node_may_be_stopped_while_an_agent_takes_over() {
        resume_without_a_node(false);
    }

    /// The node has no record meanwhile, so the agent does not know that it will return with its
    /// memory.
    #[test]
    fn a_node_may_be_down_while_an_agent_takes_over() {
        resume_without_a_node(true);
    }
}
