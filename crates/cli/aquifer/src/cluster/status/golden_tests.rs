//! Golden JSON of `aquifer status --json`.
//! A changed golden file needs a line in CHANGELOG: users' scripts depend on it.

use aquifer_tests_support::golden;

use super::*;

#[test]
fn golden_status() {
    let mut golden = golden!("status");
    let node = NodeStatus {
        id: 1,
        address: Some("node-1.sock".into()),
        memory_bytes: 2,
        memory_bytes_wanted: 3,
        recalled_bytes: 1,
        memory_bytes_max: 4,
        free_bytes: Some(5),
        is_disk: false,
    };
    let agent =
        AgentRecord { host: 1, address: "agent.sock".into(), epoch: 2, claim_epoch: 3, is_recovery: false };
    // Golden tests of `crates/daemons/agent` have the other fields.
    let asked = AgentStatus {
        host: 1,
        mempool_bytes: 2,
        cached_bytes: 5,
        borrowed_bytes: 6,
        available_bytes: 7,
        keep_free_bytes: 8,
        mempool_used_bytes: 3,
        nodes: Vec::new(),
        missing_nodes: Vec::new(),
        tenants: Vec::new(),
        users: Vec::new(),
        sessions: Vec::new(),
        runs: Vec::new(),
    };
    let status = Status {
        state: "/run/user/1/aquifer".into(),
        up: true,
        is_reachable: true,
        empty_directory: None,
        command: "aquifer".into(),
        daemons: vec![DaemonStatus { name: "node-1".into(), is_running: true, pid: Some(7), is_of_up: true }],
        nodes: vec![node],
        missing_nodes: vec![MissingNode { id: 2, since_s: Some(9) }],
        heaps: vec![HeapsStatus {
            node: 1,
            address: "here:1".into(),
            memory_bytes: 8,
            heaps: Some(Vec::new()),
        }],
        agents: vec![agent],
        agent: Some(asked),
        segments: None,
        problems: vec!["one".into()],
    };
    golden.lines(&serde_json::to_string_pretty(&status).expect("numbers and texts can be written"));
    let stopped = Status {
        state: String::new(),
        up: false,
        is_reachable: true,
        empty_directory: None,
        command: "aquifer".into(),
        daemons: vec![DaemonStatus { name: "agent".into(), is_running: false, pid: None, is_of_up: true }],
        nodes: Vec::new(),
        missing_nodes: Vec::new(),
        heaps: Vec::new(),
        agents: Vec::new(),
        agent: None,
        segments: None,
        problems: Vec::new(),
    };
    golden.lines(&serde_json::to_string_pretty(&stopped).expect("numbers and texts can be written"));
    golden.check();
}

#[test]
fn the_exit_code_says_whether_a_cluster_is_up() {
    let status = |running: &[bool]| Status {
        state: String::new(),
        up: false,
        is_reachable: true,
        empty_directory: None,
        command: "aquifer".into(),
        daemons: running
            .iter()
            .map(|is_running| DaemonStatus {
                name: "agent".into(),
                is_running: *is_running,
                pid: None,
                is_of_up: true,
            })
            .collect(),
        nodes: Vec::new(),
        missing_nodes: Vec::new(),
        heaps: Vec::new(),
        agents: Vec::new(),
        agent: None,
        segments: None,
        problems: Vec::new(),
    };
    let exit_codes =
        [&[][..], &[true, true], &[true, false], &[false]].map(|running| status(running).exit_code());
    assert_eq!(exit_codes, [EXIT_NO_CLUSTER, 0, EXIT_DEGRADED, EXIT_DEGRADED]);
    let empty = Status { empty_directory: Some("etcd://h:1/blu".into()), ..status(&[]) };
    assert_eq!(empty.exit_code(), EXIT_NO_CLUSTER, "the directory has answered, and has no cluster");
    let elsewhere = Status { missing_nodes: vec![MissingNode { id: 1, since_s: None }], ..status(&[]) };
    assert_eq!(elsewhere.exit_code(), 0, "the directory has a cluster");
}
