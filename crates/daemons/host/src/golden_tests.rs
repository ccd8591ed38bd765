//! Golden JSON: the cluster access of swap servers, and the keeper's record of a host
//! (`docs/formats/ipc.md`).
//! A changed golden file needs a changed document. A new field needs a
//! default, because agents of other builds read these records.

use std::fmt::Debug;

use aquifer_directory::names::AgentRecord;
use aquifer_fabric::ClusterKey;
use aquifer_report::RunStatistics;
use aquifer_tests_support::{Golden, golden};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::cluster_access::{ClusterAccess, SwapReport};

fn add<T: Serialize + DeserializeOwned + PartialEq + Debug>(golden: &mut Golden, name: &str, value: &T) {
    let text = serde_json::to_string(value).expect("numbers and texts can be written");
    assert_eq!(&serde_json::from_str::<T>(&text).expect("it was just written"), value, "{name}");
    golden.text(name, &text);
}

#[test]
fn golden_words_to_swap_servers_and_the_keeper() {
    let mut golden = golden!("kept");
    add(&mut golden, "lent", &ClusterAccess::new("{}", true, Some(&ClusterKey([0x5a; 32]))));
    add(&mut golden, "lent without a key", &ClusterAccess::new("unix:/run/x", false, None));
    let statistics = RunStatistics { limit_bytes: 3, ..RunStatistics::default() };
    let cgroup = "aquifer-setup-1".into();
    let report = SwapReport { host: 1, runner: 2, cgroup, least_limit_bytes: 4, statistics };
    add(&mut golden, "report of a swap server", &report);
    let older = r#"{"directory":"{}","encrypt":true,"key":null}"#;
    assert!(!serde_json::from_str::<ClusterAccess>(older).expect("an older agent's").takes_reports);
    let host = AgentRecord {
        host: 1,
        address: "/run/agent.sock".into(),
        epoch: 2,
        claim_epoch: 3,
        is_recovery: false,
    };
    add(&mut golden, "host", &host);
    golden.check();
}
