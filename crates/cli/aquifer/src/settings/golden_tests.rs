//! Golden settings files, as a user may have them in `/etc/aquifer`.
//! A changed golden file needs a line in CHANGELOG, and the old key should remain valid.

use super::*;

fn directory() -> DirectorySettings {
    DirectorySettings {
        address: Some("etcds://a:2379/blue".into()),
        ca: Some("ca.pem".into()),
        cert: Some("own.pem".into()),
        key: Some("own.key".into()),
    }
}

fn file<T: Settings>(name: &str) -> T {
    load(&Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name)).expect("it makes sense")
}

#[test]
fn golden_files_of_settings() {
    let node = NodeSettings {
        id: Some(1),
        memory: Some(2 << 30),
        memory_max: Some(3 << 30),
        keep_free: Some(4 << 20),
        disk: Some("/disk".into()),
        drain_on_stop: Some(60_000),
        grace: Some(5000),
        listen: Some("10.0.0.1:6".parse().expect("it is an address")),
        fabric: Some(Network::Verbs),
        advertise: Some("10.0.0.1:7".parse().expect("it is an address")),
        key: Some("cluster.key".into()),
        encrypt: Some(true),
        threads: Some(8),
        rate_bytes: Some(9 << 20),
        rate_operations: Some(10),
        metrics: Some("127.0.0.1:11".parse().expect("it is a place")),
        directory: directory(),
    };
    assert_eq!(file::<NodeSettings>("node.toml"), node);
    let agent = AgentSettings {
        mempool: Some(1 << 30),
        keep_free: Some(5 << 20),
        local_max: Some(u64::MAX),
        cache_per_user: Some(6 << 30),
        cache_weight: vec![CacheWeight { uid: 1000, weight: 4 }],
        extents_per_user: Some(2 << 30),
        pages_per_user: Some(3 << 30),
        pages_share: Some(64 << 20),
        move_rate: Some(20 << 20),
        backup: Some(aquifer_agent::Backup::Always),
        backup_of: vec![UserBackup { uid: 1000, backup: aquifer_agent::Backup::Never }],
        segment_listen: Some("10.0.0.1:8".parse().expect("it is an address")),
        segment_memory: Some(3 << 30),
        segment_pull_rate: Some(4 << 20),
        key: Some("cluster.key".into()),
        shared_socket: Some("/run/aquifer.sock".into()),
        encrypt: Some(false),
        grace: Some(120_000),
        metrics: Some("unix:/run/metrics.sock".parse().expect("it is a place")),
        directory: directory(),
    };
    assert_eq!(file::<AgentSettings>("agent.toml"), agent);
}

/// A cluster's shape has these as JSON, and so has what an agent lends.
#[test]
fn golden_place_of_the_directory() {
    let text = r#"{"address":"etcds://a:2379/blue","ca":"ca.pem","cert":"own.pem","key":"own.key"}"#;
    assert_eq!(serde_json::to_string(&directory()).expect("texts can be written"), text);
    assert_eq!(serde_json::from_str::<DirectorySettings>(text).expect("it makes sense"), directory());
    assert_eq!(FOLDER, "/etc/aquifer");
}
