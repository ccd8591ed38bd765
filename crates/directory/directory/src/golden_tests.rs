//! Golden bytes of `docs/formats/directory.md`: keys, records and the embedded directory's file.
//!
//! A changed golden file needs a changed document; that of the file also needs a new
//! [`crate::embedded::FORMAT`].
//! A new field of a record needs a default, because programs of other versions share the directory.

use std::fmt::Debug;
use std::path::Path;
use std::time::Duration;

use aquifer_tests_support::{Golden, golden};
use redb::{Database, ReadableDatabase, ReadableTable, TableDefinition};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::embedded::EmbeddedDirectory;
use crate::model::DirectoryEntry;
use crate::names::{
    self, AGENTS, AgentRecord, HEAPS, HOLDERS, HeapsRecord, HolderRecord, LIVES, LifeRecord, MemoryHolder,
    NODES, NodeLife, NodeRecord, RECALLED, REQUESTED_MEMORY, RecalledRecord, RecalledRun, RecoveredHosts,
    RequestedMemory, ResizeBlocker, SEGMENT_HOSTS, SEGMENT_PROCESSES, SEGMENTS,
};
use crate::{Directory, KeyOperation, Transaction};

fn node(resize_blocker: Option<ResizeBlocker>) -> NodeRecord {
    NodeRecord {
        id: 1,
        fabric: "tcp".into(),
        address: "10.0.0.1:7400".into(),
        memory_bytes: 2,
        memory_bytes_max: 3,
        requested_memory_bytes: 4,
        resize_blocker,
        recalled_bytes: 7,
        recalled_from: vec![
            MemoryHolder { tenant: Some(1000), bytes: 6 },
            MemoryHolder { tenant: None, bytes: 1 },
        ],
        kept_ms: 5,
        epoch: 6,
        is_disk: false,
    }
}

fn disk_node() -> NodeRecord {
    NodeRecord { is_disk: true, ..node(None) }
}

fn add<T: Serialize + DeserializeOwned + PartialEq + Debug>(golden: &mut Golden, name: &str, record: &T) {
    let value = names::encode(record);
    let entry = DirectoryEntry { key: "key".into(), value: value.clone(), version: 1, lease: None };
    assert_eq!(names::decode::<T>(&entry).as_ref(), Ok(record), "{name}");
    golden.text(name, std::str::from_utf8(&value).expect("JSON is UTF-8"));
}

#[test]
fn golden_keys_and_records() {
    let mut golden = golden!("records");
    golden.text(
        "prefixes",
        &[
            NODES,
            REQUESTED_MEMORY,
            RECALLED,
            AGENTS,
            HOLDERS,
            LIVES,
            HEAPS,
            SEGMENT_HOSTS,
            SEGMENT_PROCESSES,
            SEGMENTS,
        ]
        .join(" "),
    );
    let keys = [
        names::node_key(1),
        names::requested_memory_key(2),
        names::recalled_key(2),
        names::agent_key(3),
        names::holder_key(4),
        names::life_key(5),
        names::heaps_key(6),
    ];
    golden.text("keys", &keys.join(" "));
    golden.text("greatest host", &names::HOST_MAX.to_string());
    let blockers = [
        None,
        Some(ResizeBlocker::InUse),
        Some(ResizeBlocker::NoMemory),
        Some(ResizeBlocker::Pinned),
        Some(ResizeBlocker::Failing),
    ];
    for blocker in blockers {
        add(&mut golden, "node", &node(blocker));
    }
    add(&mut golden, "disk node", &disk_node());
    add(&mut golden, "wanted", &RequestedMemory::new(1, 2, 3));
    let drained = RequestedMemory { drained_from: Some(3), ..RequestedMemory::new(1, 2, 0) };
    add(&mut golden, "wanted, drained", &drained);
    add(&mut golden, "wanted, forced", &RequestedMemory { is_forced: true, ..drained });
    let run = RecalledRun { node: 1, name: "a".into(), tenant: 2, bytes: 3, only_copy_bytes: 4 };
    add(&mut golden, "recalled", &RecalledRecord { host: 1, runs: vec![run] });
    let heaps =
        HeapsRecord { node: 1, address: "a".into(), device: None, memory_bytes: 2, kept_ms: 3, epoch: 4 };
    add(&mut golden, "heaps", &heaps);
    let life = NodeLife { node: 1, epoch: 2, kept_ms: 3 };
    add(&mut golden, "life", &LifeRecord { life, fabric: "tcp".into(), address: "a".into() });
    for remaining_lives in [None, Some(Vec::new()), Some(vec![life])] {
        add(&mut golden, "holder", &HolderRecord { host: 1, claim_epoch: 2, grace_ms: 3, remaining_lives });
    }
    let agent = AgentRecord { host: 1, address: "a".into(), epoch: 2, claim_epoch: 3, is_recovery: false };
    add(&mut golden, "agent", &agent);
    add(&mut golden, "successor", &AgentRecord { is_recovery: true, ..agent });
    add(&mut golden, "next host", &17_u16);
    add(&mut golden, "recovered hosts", &RecoveredHosts { epochs: [(1, 2), (300, u64::MAX)].into() });
    golden.check();
}

/// The entries after a node was registered and a host number was claimed.
#[test]
fn golden_keys_that_are_written() {
    let folder = tempfile::tempdir().expect("there is room for a folder");
    let directory = EmbeddedDirectory::open(&folder.path().join("file")).expect("the file can be created");
    let lease = directory.lease_grant(Duration::from_secs(60)).expect("there are few leases");
    names::register_node(&directory, lease, &node(None)).expect("no other node has the number");
    names::claim_host(&directory, lease, "agent.sock", 7).expect("all numbers are free");
    let mut golden = golden!("written");
    for entry in directory.list("").expect("the listing is short").entries {
        let value = String::from_utf8(entry.value).expect("JSON is UTF-8");
        golden.text(
            &entry.key,
            &format!("{value} version {} lease {}", entry.version, entry.lease.map_or(0, |lease| lease.0)),
        );
    }
    golden.check();
}

fn dump(path: &Path, golden: &mut Golden) {
    let database = Database::open(path).expect("no other process has it open");
    let read = database.begin_read().expect("the file can be read");
    let head: TableDefinition<'_, &str, u64> = TableDefinition::new("aquifer-directory");
    for row in read.open_table(head).expect("the row exists").iter().expect("the file can be read") {
        let (key, value) = row.expect("the file can be read");
        golden.text(&format!("aquifer-directory {}", key.value()), &value.value().to_string());
    }
    let entries: TableDefinition<'_, &str, (u64, u64, &[u8])> = TableDefinition::new("entries");
    for row in read.open_table(entries).expect("the row exists").iter().expect("the file can be read") {
        let (key, value) = row.expect("the file can be read");
        golden.text(&format!("entries {}", key.value()), &format!("{:?}", value.value()));
    }
    let leases: TableDefinition<'_, u64, u64> = TableDefinition::new("leases");
    for row in read.open_table(leases).expect("the row exists").iter().expect("the file can be read") {
        let (key, value) = row.expect("the file can be read");
        golden.text(&format!("leases {}", key.value()), &value.value().to_string());
    }
}

#[test]
fn golden_file() {
    let folder = tempfile::tempdir().expect("there is room for a folder");
    let path = folder.path().join("file");
    let directory = EmbeddedDirectory::open(&path).expect("the file can be created");
    let lease = directory.lease_grant(Duration::from_millis(60_001)).expect("there are few leases");
    let operations =
        vec![KeyOperation::put("a", vec![1, 2], Some(lease.id)), KeyOperation::put("é", vec![3], None)];
    let transaction = Transaction { compares: Vec::new(), operations };
    assert!(directory.transaction(&transaction).expect("nothing hinders it").is_committed());
    drop(directory);

    let mut golden = golden!("file");
    dump(&path, &mut golden);
    golden.check();
    let again = EmbeddedDirectory::open(&path).expect("the file is valid");
    let entry = again.get("a").expect("the file can be read").expect("the row exists");
    assert_eq!((entry.value, entry.lease), (vec![1, 2], Some(lease.id)));
}
