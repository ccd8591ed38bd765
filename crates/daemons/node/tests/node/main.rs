//! A whole node over shared memory and an embedded directory whose clock the test sets.

mod disk;
mod harness;
mod heaps;
mod kept_memory;
mod lending;
mod old_keys;

use std::sync::atomic::Ordering;
use std::time::Duration;

use aquifer_directory::names::{self, NodeRecord};
use aquifer_directory::{Directory, DirectoryError, WatchEventKind};
use aquifer_fabric::{Tenant, shm};
use aquifer_metrics::MetricsError;
use aquifer_node::{ListenAddress, NodeError, NodeOptions, Shutdown, serve};
use aquifer_pool::{NodeId, PoolError, SizeClass};
use aquifer_tests_support::openmetrics::scrape;

use harness::{BYTES, NodeHarness, SectionBuffer, TTL, allocate_and_free, wait_until_fenced};

#[test]
fn a_node_serves_its_memory_and_has_a_record() {
    let harness = NodeHarness::new();
    let node = harness.start(1);
    let record = harness.record(1).expect("it is in the directory");
    assert_eq!(record, node.record);
    assert_eq!((record.id, record.memory_bytes, record.fabric.as_str()), (1, BYTES, "shm"));
    assert_eq!(record.address, harness.socket().display().to_string());
    let mut client = harness.client(1, 1).expect("it listens");
    assert_eq!(client.total_bytes(NodeId(1)), BYTES);
    allocate_and_free(&mut client).expect("room");
    node.stop();
    assert_eq!(harness.record(1), None);
    assert!(matches!(allocate_and_free(&mut client), Err(PoolError::NodeGone { .. })));
    assert!(harness.client(1, 1).is_err());
}

/// Two tenants allocate all of the memory in turns.
#[test]
fn a_tenant_gets_cleared_memory_after_another_tenant() {
    let harness = NodeHarness::new();
    let node = harness.start(1);
    let mut clients =
        [1, 2].map(|host| harness.client_of_tenant(host, 1, Tenant(u32::from(host))).expect("it listens"));
    let buffers = clients.each_mut().map(SectionBuffer::new);
    for turn in 0..6_usize {
        let (client, buffer) = (&mut clients[turn % 2], &buffers[turn % 2]);
        let mut extents = Vec::new();
        while extents.len() < 2 {
            match client.allocate(NodeId(1), SizeClass::SECTION) {
                Ok(extent) => extents.push(extent),
                // The node is clearing the memory.
                Err(PoolError::Full { .. }) => std::thread::yield_now(),
                Err(error) => panic!("{error}"),
            }
        }
        for extent in &extents {
            assert!(buffer.is_zero(client, extent), "turn {turn}");
            buffer.write(client, extent);
        }
        extents.into_iter().for_each(|extent| client.free(extent).expect("it is ours"));
    }
    node.stop();
}

#[test]
fn a_host_whose_lease_ends_is_fenced() {
    let harness = NodeHarness::new();
    let old = harness.grant_host_lease(1);
    let node = harness.start(1);
    let later = harness.grant_host_lease(2);
    let mut first = harness.client(1, old.epoch).expect("it listens");
    let mut second = harness.client(2, later.epoch).expect("it listens");
    allocate_and_free(&mut first).expect("room");
    harness.directory().lease_revoke(old.id).expect("it was alive");
    wait_until_fenced(&mut first);
    assert!(harness.client(1, old.epoch).is_err(), "the old epoch cannot come back");
    let new = harness.grant_host_lease(1);
    allocate_and_free(&mut harness.client(1, new.epoch).expect("a new epoch can")).expect("room");
    allocate_and_free(&mut second).expect("others are not touched");
    // An expired lease has the same effect as a revoked one.
    harness.clock.advance(Duration::from_secs(1001));
    harness.directory().tick().expect("room");
    wait_until_fenced(&mut second);
    node.stop();
}

#[test]
fn a_new_lease_of_a_host_fences_the_old_one() {
    let harness = NodeHarness::new();
    let old = harness.grant_host_lease(1);
    let node = harness.start(1);
    let mut client = harness.client(1, old.epoch).expect("it listens");
    harness.grant_host_lease(1);
    wait_until_fenced(&mut client);
    node.stop();
}

#[test]
fn a_lease_that_ends_while_the_directory_is_unreachable_is_fenced_later() {
    let harness = NodeHarness::new();
    let host = harness.grant_host_lease(1);
    let node = harness.start(1);
    let mut client = harness.client(1, host.epoch).expect("it listens");
    harness.directory_link.is_cut.store(true, Ordering::SeqCst);
    // The node observes the failure, and cannot reconnect.
    while harness.directory_link.failed_calls.load(Ordering::SeqCst) < 3 {
        std::thread::yield_now();
    }
    allocate_and_free(&mut client).expect("the memory does not need the directory");
    harness.directory().lease_revoke(host.id).expect("it was alive");
    harness.directory_link.is_cut.store(false, Ordering::SeqCst);
    wait_until_fenced(&mut client);
    node.stop();
}

#[test]
fn a_node_whose_lease_ended_takes_a_new_one_and_keeps_its_memory() {
    let harness = NodeHarness::new();
    let node = harness.start(1);
    let mut client = harness.client(1, 1).expect("it listens");
    let extent = client.allocate(NodeId(1), SizeClass::CHUNK).expect("room");
    let from = harness.directory().list("nodes/").expect("the directory answers").revision + 1;
    let mut watch = harness.directory().watch("nodes/", from).expect("a watch");
    harness.clock.advance(2 * TTL);
    harness.directory().tick().expect("room");
    let mut kinds = Vec::new();
    while kinds.len() < 2 {
        kinds.extend(watch.next(TTL).expect("the watch goes on").map(|event| event.kind));
    }
    assert_eq!(kinds[0], WatchEventKind::Delete);
    assert!(matches!(kinds[1], WatchEventKind::Put { .. }));
    assert_eq!(harness.record(1).expect("it is back"), node.record, "with the epoch of its memory");
    client.free(extent).expect("the memory is the same");
    node.stop();
}

#[test]
fn a_node_with_the_number_of_another_node_does_not_start() {
    let harness = NodeHarness::new();
    let other = NodeRecord {
        id: 1,
        fabric: "shm".to_owned(),
        address: "/elsewhere".to_owned(),
        memory_bytes: 1,
        memory_bytes_max: 1,
        requested_memory_bytes: 1,
        resize_blocker: None,
        recalled_bytes: 0,
        recalled_from: Vec::new(),
        kept_ms: 0,
        epoch: 1,
        is_disk: false,
    };
    harness.directory().put(&names::node_key(1), &names::encode(&other), None).expect("room");
    let taken = serve(&harness.options(1, BYTES), &Shutdown::new(), |_| panic!("it cannot serve"));
    assert!(
        matches!(&taken, Err(NodeError::IdTaken { id: 1, address }) if address == "/elsewhere"),
        "{taken:?}"
    );
    harness.directory().put(&names::node_key(1), b"{", None).expect("room");
    let taken = serve(&harness.options(1, BYTES), &Shutdown::new(), |_| panic!("it cannot serve"));
    assert!(matches!(taken, Err(NodeError::IdTaken { .. })));
    // A record with this node's address is that of an earlier process.
    let dead = NodeRecord { address: harness.socket().display().to_string(), ..other };
    harness.directory().put(&names::node_key(1), &names::encode(&dead), None).expect("room");
    let node = harness.start(1);
    assert_eq!(harness.record(1).as_ref(), Some(&node.record));
    node.stop();
}

#[test]
fn a_node_that_cannot_start_returns_the_reason() {
    let harness = NodeHarness::new();
    let refused =
        |options: NodeOptions| serve(&options, &Shutdown::new(), |_| panic!("it cannot serve")).unwrap_err();
    assert!(matches!(refused(harness.options(1, u64::MAX)), NodeError::NoMemory { asked: u64::MAX, .. }));
    assert!(matches!(refused(harness.options(1, (2 << 20) - 1)), NodeError::Memory(_)));
    let mut nowhere = harness.options(1, BYTES);
    nowhere.listen = ListenAddress::Shm(harness.dir.path().join("no/such/dir"), shm::ShmOptions::default());
    assert!(matches!(refused(nowhere), NodeError::Listen(_)));
    let node = harness.start(1);
    assert!(matches!(refused(harness.options(2, BYTES)), NodeError::Listen(_)), "another listens there");
    node.stop();
    harness.directory_link.is_cut.store(true, Ordering::SeqCst);
    let error = refused(harness.options(1, BYTES));
    assert!(matches!(error, NodeError::Directory(DirectoryError::Unavailable { .. })));
    assert!(error.to_string().contains("cannot join the cluster"), "{error}");
}

#[test]
fn malformed_records_of_hosts_are_ignored() {
    let harness = NodeHarness::new();
    for (key, value) in [
        ("agents/0", &b"{}"[..]),
        ("agents/4096", b"{}"),
        ("agents/x", b"{}"),
        ("agents/+7", b"{}"),
        ("agents/7", b"\xff\xfe"),
        ("agents/8", b"{\"host\":9,\"address\":\"\",\"epoch\":99}"),
    ] {
        harness.directory().put(key, value, None).expect("room");
    }
    let node = harness.start(1);
    harness.directory().put("agents/7", b"[]", None).expect("room");
    harness.directory().delete("agents/8").expect("room");
    let mut client = harness.client(9, 1).expect("no host was fenced");
    allocate_and_free(&mut client).expect("room");
    node.stop();
}

#[test]
fn metrics_show_memory_endpoints_and_leases() {
    let harness = NodeHarness::new();
    let address = format!("unix:{}", harness.dir.path().join("metrics").display());
    let mut options = harness.options(1, BYTES);
    options.metrics = Some(address.parse().expect("a valid address"));
    let host = harness.grant_host_lease(1);
    let node = NodeHarness::start_with(options);
    let sum = |name: &str| scrape(&address).expect("valid metrics").sum(name, &[]).expect(name);
    assert_eq!(sum("aquifer_node_memory_bytes"), BYTES as f64);
    assert_eq!(sum("aquifer_node_free_bytes"), BYTES as f64);
    assert_eq!(sum("aquifer_node_endpoints"), 0.0);
    assert_eq!(sum("aquifer_node_build_info"), 1.0);
    let mut client = harness.client(1, host.epoch).expect("it listens");
    let _taken = client.allocate(NodeId(1), SizeClass::SPAN).expect("room");
    assert_eq!(sum("aquifer_node_free_bytes"), (BYTES - SizeClass::SPAN.bytes()) as f64);
    assert_eq!(sum("aquifer_node_endpoints"), 1.0);
    let fences = sum("aquifer_node_fences_total");
    harness.directory().lease_revoke(host.id).expect("it was alive");
    wait_until_fenced(&mut client);
    while sum("aquifer_node_fences_total") < fences + 1.0 || sum("aquifer_node_lease_renewals_total") < 1.0 {
        std::thread::yield_now();
    }
    let failures = sum("aquifer_node_lease_renewal_failures_total");
    harness.clock.advance(2 * TTL);
    harness.directory().tick().expect("room");
    while sum("aquifer_node_lease_renewal_failures_total") < failures + 1.0 {
        std::thread::yield_now();
    }
    // The address is in use, which is noticed before any memory is created.
    let mut second = harness.options(2, BYTES);
    second.metrics = Some(address.parse().expect("a valid address"));
    let taken = serve(&second, &Shutdown::new(), |_| panic!("it cannot serve"));
    assert!(matches!(taken, Err(NodeError::Metrics(MetricsError::Listen { .. }))), "{taken:?}");
    node.stop();
    assert!(scrape(&address).is_err());
}
