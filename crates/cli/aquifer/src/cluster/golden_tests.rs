//! Golden names and bytes of a local cluster's folder.
//! A changed golden file needs a new version of the configuration: the next build must still
//! recognise a running cluster, or refuse it.

use std::path::Path;

use aquifer_tests_support::golden;

use super::config::ClusterConfig;
use super::daemon::Daemon;
use super::key;
use super::lock::FileLock;
use crate::cli::{Fabric, UpArguments};
use crate::settings::DirectorySettings;
use crate::state::StateDir;

#[test]
fn golden_files_of_a_cluster() {
    let mut golden = golden!("state");
    let folder = aquifer_tests_support::state_folder();
    let state = StateDir::locate(Some(folder.path())).expect("it is ours alone");
    let name = |path: &Path| path.strip_prefix(state.path()).expect("it is there").display().to_string();
    for daemon in Daemon::all(2, true) {
        let daemon = daemon.to_string();
        let [socket, lock, log] =
            [state.socket(&daemon), state.lock(&daemon), state.log(&daemon)].map(|path| name(&path));
        golden.text(&daemon, &format!("{socket} {lock} {log}"));
    }
    golden.text("directory's file", &name(&state.directory_file()));
    golden.text("agent's socket", &name(&state.agent_socket()));
    golden.text("cluster's key", &name(&state.key_file()));
    golden.text("shape", &name(&state.cluster_config()));

    key::ensure(&state.key_file()).expect("there is room");
    let text = std::fs::read_to_string(state.key_file()).expect("it was written");
    let digits = |text: &str| text.bytes().all(|digit| matches!(digit, b'0'..=b'9' | b'a'..=b'f'));
    assert!(
        text.len() == 65 && text.strip_suffix('\n').is_some_and(digits),
        "64 digits and the end of the line"
    );
    std::fs::write(state.key_file(), "0f".repeat(32) + "\n").expect("there is room");
    assert_eq!(key::load(&state.key_file()).expect("it is a key").0, [0x0f; 32]);

    let _held = FileLock::try_acquire(&state.lock("node-1")).expect("there is room").expect("it is free");
    let text = std::fs::read_to_string(state.lock("node-1")).expect("it was written");
    assert_eq!(text, format!("{}\n", std::process::id()));

    let arguments = UpArguments {
        nodes: Some(2),
        memory: Some(3),
        memory_max: Some(4),
        disk: Some(18),
        disk_path: Some("/disk".into()),
        heap_memory: Some(8),
        keep_memory: true,
        fabric: Some(Fabric::Tcp),
        mempool: Some(5),
        cache_per_user: Some(16),
        extents_per_user: Some(6),
        pages_per_user: Some(7),
        move_rate: Some(17),
        shared_socket: Some("/run/aquifer.sock".into()),
        grace: Some(7),
        without_runs: false,
        no_restart: true,
        directory: DirectorySettings { address: Some("etcd://a:2379/blue".into()), ..Default::default() },
    };
    let mut full = ClusterConfig::from_arguments(&arguments);
    (full.ports, full.heap_ports, full.disk_port) = (vec![8, 9], vec![10, 11], Some(12));
    let empty = UpArguments {
        nodes: None,
        memory: None,
        memory_max: None,
        disk: None,
        disk_path: None,
        heap_memory: None,
        keep_memory: false,
        fabric: None,
        mempool: None,
        cache_per_user: None,
        extents_per_user: None,
        pages_per_user: None,
        move_rate: None,
        shared_socket: None,
        grace: None,
        without_runs: false,
        no_restart: false,
        directory: DirectorySettings::default(),
    };
    for config in [full, ClusterConfig::from_arguments(&empty)] {
        config.save(&state).expect("there is room");
        golden.lines(&std::fs::read_to_string(state.cluster_config()).expect("it was written"));
        assert_eq!(ClusterConfig::load(&state).expect("it makes sense"), Some(config));
    }
    golden.check();
}
