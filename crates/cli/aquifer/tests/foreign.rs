//! Daemons in a state folder that `aquifer up` has not started, such as those of systemd.

use std::path::Path;

use aquifer_directory::{Directory, embedded, names};
use rustix::process::Signal;

use crate::cluster::{SMALL, TestCluster, aquifer, end, fail, succeed};
use crate::systemd::ServiceManager;

/// Names of daemons, and whether `aquifer up` has started them.
fn daemons(state: &Path) -> Vec<(String, bool)> {
    let output = aquifer(state, &["status", "--json"]);
    let status: serde_json::Value = serde_json::from_str(&succeed(&output)).unwrap();
    let daemon = |daemon: &serde_json::Value| {
        assert_eq!(daemon["alive"], true, "{daemon}");
        (daemon["name"].as_str().unwrap().to_owned(), daemon["by_up"].as_bool().unwrap())
    };
    status["parts"].as_array().unwrap().iter().map(daemon).collect()
}

#[test]
fn daemons_of_others_are_shown_and_neither_adopted_nor_stopped() {
    let mut manager = ServiceManager::new();
    manager.start(&["directory"], None);
    manager.start(&["keeper"], None);
    manager.start(&["node", "--id", "1", "--memory", "8M"], None);
    let state = manager.path("");
    let all = ["directory", "keeper", "node-1"].map(|name| (name.to_owned(), false));
    for command in [&SMALL[..], &["up"], &["down"], &["down", "--purge"]] {
        let said = fail(&aquifer(&state, command), 1);
        for word in ["directory (process ", "keeper (process ", "node-1 (process ", "not started by"] {
            assert!(said.contains(word), "{command:?}: {word} is missing in: {said}");
        }
        assert_eq!(daemons(&state), all, "{command:?}");
        assert!(!state.join("cluster.json").exists() && !state.join("cluster.key").exists());
    }
    let words = succeed(&aquifer(&state, &["status"]));
    for word in ["`aquifer up` has not started them", "keeper", "lends 8 MiB"] {
        assert!(words.contains(word), "{word} is missing in:\n{words}");
    }
    assert!(!words.contains("Start"), "{words}");
}

#[test]
fn a_node_that_has_died_is_shown_as_missing() {
    let mut manager = ServiceManager::new();
    for daemon in [&["directory"][..], &["keeper"], &["node", "--id", "1", "--memory", "8M"]] {
        manager.start(daemon, None);
    }
    manager.start(&["agent", "--mempool", "8M"], None);
    manager.start(&["node", "--id", "2", "--memory", "8M"], None);
    let state = manager.path("");
    let missing = || {
        let output = aquifer(&state, &["status", "--json"]);
        let status: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        status["missing_nodes"].as_array().unwrap().clone()
    };
    assert!(missing().is_empty());
    manager.kill_last();
    // Its lease would end by itself.
    let directory = embedded::connect(&manager.path("directory.sock")).unwrap();
    let entry = directory.get(&names::node_key(2)).unwrap().unwrap();
    directory.lease_revoke(entry.lease.unwrap()).unwrap();
    while !missing().iter().any(|node| node["id"] == 2 && node["since_s"].is_u64()) {
        std::thread::yield_now();
    }
    let words = String::from_utf8(aquifer(&state, &["status"]).stdout).unwrap();
    assert!(words.lines().any(|line| line.contains("node-2") && line.contains("missing for")), "{words}");
    // A node that stops in order is not missed.
    manager.start(&["node", "--id", "2", "--memory", "8M"], None);
    manager.stop_last();
    assert!(missing().is_empty());
}

#[test]
fn a_daemon_of_another_beside_a_cluster_of_up_is_left_alone() {
    let cluster = TestCluster::new();
    succeed(&cluster.aquifer(&SMALL));
    let mut manager = ServiceManager::at(cluster.state());
    manager.start(&["node", "--id", "3", "--memory", "8M"], None);
    let words = succeed(&cluster.aquifer(&["status"]));
    let line = words.lines().find(|line| line.contains("node-3")).unwrap();
    assert!(line.contains("not started by `aquifer up`"), "{words}");

    end(cluster.pid("agent"), Signal::KILL);
    assert!(succeed(&cluster.aquifer(&["up"])).contains("Started agent"));
    let said = fail(&cluster.aquifer(&["down"]), 1);
    assert!(said.contains("node-3 (process ") && !said.contains("node-1"), "{said}");
    assert_eq!(cluster.running().len(), 6);

    manager.stop_last();
    end(cluster.pid("node-2"), Signal::KILL);
    manager.start(&["node", "--id", "2", "--memory", "8M"], None);
    let said = fail(&cluster.aquifer(&["up"]), 1);
    assert!(said.contains("node-2 (process ") && said.contains("--state"), "{said}");
    manager.stop_last();
    succeed(&cluster.aquifer(&["up"]));
    succeed(&cluster.aquifer(&["down"]));
}
