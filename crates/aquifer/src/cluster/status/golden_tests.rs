//! Golden JSON of `aquifer status --json`.
//! A changed golden file needs a line in CHANGELOG: users' scripts depend on it.

use aquifer_tests_support::golden;

use super::*;

#[test]
fn golden_status() {
    let mut golden = golden!("status");
    let node = NodeStatus {
        id: 1,
        address: "node-1.sock".into(),
        memory_bytes: 2,
        memory_bytes_wanted: 3,
        memory_bytes_max: 4,
        free_bytes: Some(5),
    };
    let agent =
        AgentRecord { host: 1, address: "agent.sock".into(), epoch: 2, claim_epoch: 3, is_recovery: false };
    // The rest of it is fixed where it is made (`crates/agent`).
    let asked = AgentStatus {
        host: 1,
        mempool_bytes: 2,
        mempool_used_bytes: 3,
        nodes: Vec::new(),
        tenants: Vec::new(),
        users: Vec::new(),
        sessions: Vec::new(),
        runs: Vec::new(),
    };
    let status = Status {
        state: "/run/user/1/aquifer".into(),
        up: true,
        parts: vec![PartStatus { name: "node-1".into(), alive: true, pid: Some(7) }],
        nodes: vec![node],
        agents: vec![agent],
        agent: Some(asked),
        problems: vec!["one".into()],
    };
    golden.lines(&serde_json::to_string_pretty(&status).expect("numbers and texts can be written"));
    let nothing = Status {
        state: String::new(),
        up: false,
        parts: vec![PartStatus { name: "agent".into(), alive: false, pid: None }],
        nodes: Vec::new(),
        agents: Vec::new(),
        agent: None,
        problems: Vec::new(),
    };
    golden.lines(&serde_json::to_string_pretty(&nothing).expect("numbers and texts can be written"));
    golden.check();
}
