//! Clusters with etcd as their directory, which is killed.

use aquifer_tests_e2e::cluster::{find, text};
use aquifer_tests_e2e::run::{Running, mempool_share, status};
use aquifer_tests_e2e::{Cluster, build, eventually};
use aquifer_tests_support::{EtcdCluster, state_folder};
use serde_json::Value;

const LIMIT: &str = "32M";

fn up(etcd: &EtcdCluster) -> Cluster {
    Cluster::up_with(3, "128M", &["--fabric", "tcp", "--directory", &etcd.address()])
}

fn checker(cluster: &Cluster, rounds: &str) -> Running {
    let checker = build::programs().join("checker");
    let program = [checker.to_str().expect("a plain path"), "pages", "--bytes", "128M", "--rounds", rounds];
    Running::start(&mut cluster.run_command(LIMIT, &program), false, mempool_share(cluster.agent_socket()))
}

/// Waits until much of the program is on memory nodes.
fn await_paging(cluster: &Cluster) {
    eventually("a program to be paged", || {
        let status = status(cluster.agent_socket())?;
        let runs = status["runs"].as_array()?;
        let remote: u64 = runs.iter().filter_map(|run| run["remote_bytes"].as_u64()).sum();
        (remote >= 64 << 20).then_some(())
    });
}

/// The records in the directory: the agent's number and epoch, and the nodes.
fn members(cluster: &Cluster) -> (Value, Vec<u64>) {
    let status = cluster.status();
    let nodes = status["nodes"].as_array().cloned().unwrap_or_default();
    (status["agents"].clone(), nodes.iter().filter_map(|node| node["id"].as_u64()).collect())
}

#[test]
fn nodes_and_agent_remove_their_records_when_they_stop() {
    let etcd = EtcdCluster::start();
    drop(up(&etcd));
    // The numbers are free at once, and the next agent has a greater epoch.
    let second = up(&etcd);
    let (agents, nodes) = members(&second);
    assert_eq!(nodes, [1, 2, 3]);
    assert_eq!(agents.as_array().map(Vec::len), Some(1));
}

#[test]
fn an_unreachable_etcd_is_reported_before_anything_starts() {
    let held = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
    let address = format!("etcd://{}", held.local_addr().expect("it is bound"));
    drop(held);
    let state = state_folder();
    let mut command = std::process::Command::new(build::binary());
    command.arg("--state").arg(state.path()).args([
        "up",
        "--nodes",
        "1",
        "--memory",
        "8M",
        "--directory",
        &address,
    ]);
    let output = command.output().expect("aquifer can be started");
    assert!(!output.status.success());
    let said = text(&output.stderr);
    assert!(said.contains(&address) && said.contains("cannot be reached"), "{said}");
}

#[test]
fn status_knows_an_empty_directory_and_shows_nodes_without_etcd() {
    let mut etcd = EtcdCluster::start();
    let cluster = up(&etcd);
    let misspelt = format!("{}/misspelt", etcd.address());
    let elsewhere = state_folder();
    let status = |directory: &str| {
        let mut command = std::process::Command::new(build::binary());
        command.arg("--state").arg(elsewhere.path()).args(["status", "--directory", directory]);
        let output = command.output().expect("aquifer can be started");
        (output.status.code(), text(&output.stdout))
    };
    let (code, said) = status(&misspelt);
    assert!(
        code == Some(4) && said.contains(&misspelt) && said.contains("no cluster of this name"),
        "{said}"
    );
    let (code, said) = status(&etcd.address());
    assert!(code == Some(0) && said.contains("node-3"), "{said}");

    etcd.member(0).kill();
    let known = cluster.status();
    let problems = known["problems"].to_string();
    assert!(problems.contains("etcd://"), "{known:#}");
    let nodes = known["nodes"].as_array().expect("nodes are listed");
    let has_free = |node: &Value| node["address"].is_null() && node["free_bytes"].as_u64() == Some(128 << 20);
    assert!(nodes.len() == 3 && nodes.iter().all(has_free), "{known:#}");
    etcd.member(0).restart();
}

mod long {
    use super::*;

    #[test]
    fn programs_continue_while_etcd_is_restarted() {
        let mut etcd = EtcdCluster::start();
        let cluster = up(&etcd);
        let status = cluster.status();
        let parts = status["parts"].as_array().expect("parts are listed");
        assert!(
            parts.iter().all(|part| part["name"] != "directory"),
            "the directory is elsewhere: {parts:?}"
        );
        let before = members(&cluster);
        assert_eq!(before.1, [1, 2, 3]);

        let run = checker(&cluster, "12");
        await_paging(&cluster);
        etcd.member(0).kill();
        // Programs start and end without the directory.
        let other = build::programs().join("checker");
        let other = cluster.run(LIMIT, &[other.to_str().expect("a plain path"), "pages", "--bytes", "64M"]);
        assert!(other.status.success(), "{}", text(&other.stderr));
        let told = cluster.status();
        let problems = find(&told, "problems").and_then(Value::as_array).cloned().unwrap_or_default();
        assert!(
            problems
                .iter()
                .any(|problem| problem.as_str().is_some_and(|problem| problem.contains("etcd://")))
        );
        etcd.member(0).restart();

        run.wait().assert_success("the checker, while etcd died and came back");
        cluster.assert_all_free();
        // No lease was lost: the agent has the same epoch.
        eventually("all members to be in the directory", || (members(&cluster) == before).then_some(()));
        // The configuration is stored.
        let again = cluster.command().arg("up").output().expect("aquifer can be started");
        assert!(
            again.status.success() && text(&again.stdout).contains("up already"),
            "{}",
            text(&again.stdout)
        );
    }
}
