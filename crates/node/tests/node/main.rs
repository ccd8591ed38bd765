//! A whole node over shared memory and an embedded directory whose clock the test moves.

mod bed;
mod keeping;
mod lending;
mod old_keys;

use std::sync::atomic::Ordering;
use std::time::Duration;

use aquifer_directory::names::{self, NodeRecord};
use aquifer_directory::{Directory, DirectoryError, WatchEventKind};
use aquifer_fabric::{Tenant, shm};
use aquifer_metrics::MetricsError;
use aquifer_node::{Listen, NodeError, NodeOptions, Shutdown, serve};
use aquifer_pool::{NodeId, PoolError, SizeClass};
use aquifer_tests_support::openmetrics::scrape;

use bed::{BYTES, Bed, Stamp, TTL, until_fenced, use_it};

#[test]
fn a_node_serves_its_memory_and_says_so() {
    let bed = Bed::new();
    let node = bed.start(1);
    let record = bed.record(1).expect("it is in the directory");
    assert_eq!(record, node.ready.record);
    assert_eq!((record.id, record.memory_bytes, record.fabric.as_str()), (1, BYTES, "shm"));
    assert_eq!(record.address, bed.socket().display().to_string());
    let mut client = bed.client(1, 1).expect("it listens");
    assert_eq!(client.total_bytes(NodeId(1)), BYTES);
    use_it(&mut client).expect("room");
    node.stop();
    assert_eq!(bed.record(1), None);
    assert!(matches!(use_it(&mut client), Err(PoolError::NodeGone { .. })));
    assert!(bed.client(1, 1).is_err());
}

/// All of the memory goes from one tenant to another and back, and each finds it cleared.
#[test]
fn what_one_tenant_has_used_another_gets_cleared() {
    let bed = Bed::new();
    let node = bed.start(1);
    let mut clients = [1, 2].map(|host| bed.client_of(host, 1, Tenant(u32::from(host))).expect("it listens"));
    let stamps = clients.each_mut().map(Stamp::new);
    for turn in 0..6_usize {
        let (client, stamp) = (&mut clients[turn % 2], &stamps[turn % 2]);
        let mut extents = Vec::new();
        while extents.len() < 2 {
            match client.allocate(NodeId(1), SizeClass::SECTION) {
                Ok(extent) => extents.push(extent),
                // It is being cleared.
                Err(PoolError::Full { .. }) => std::thread::yield_now(),
                Err(error) => panic!("{error}"),
            }
        }
        for extent in &extents {
            assert!(stamp.finds_zeros(client, extent), "turn {turn}");
            stamp.write(client, extent);
        }
        extents.into_iter().for_each(|extent| client.free(extent).expect("it is ours"));
    }
    node.stop();
}

#[test]
fn a_host_whose_lease_ends_is_fenced() {
    let bed = Bed::new();
    let old = bed.enrol(1);
    let node = bed.start(1);
    let later = bed.enrol(2);
    let mut first = bed.client(1, old.epoch).expect("it listens");
    let mut second = bed.client(2, later.epoch).expect("it listens");
    use_it(&mut first).expect("room");
    bed.directory().lease_revoke(old.id).expect("it was alive");
    until_fenced(&mut first);
    assert!(bed.client(1, old.epoch).is_err(), "the old epoch cannot come back");
    let new = bed.enrol(1);
    use_it(&mut bed.client(1, new.epoch).expect("a new epoch can")).expect("room");
    use_it(&mut second).expect("others are not touched");
    // A lease that runs out by itself ends likewise.
    bed.clock.advance(Duration::from_secs(1001));
    bed.directory().tick().expect("room");
    until_fenced(&mut second);
    node.stop();
}

#[test]
fn a_new_lease_of_a_host_fences_the_old_one() {
    let bed = Bed::new();
    let old = bed.enrol(1);
    let node = bed.start(1);
    let mut client = bed.client(1, old.epoch).expect("it listens");
    bed.enrol(1);
    until_fenced(&mut client);
    node.stop();
}

#[test]
fn what_happens_while_the_directory_is_away_is_made_up_for() {
    let bed = Bed::new();
    let host = bed.enrol(1);
    let node = bed.start(1);
    let mut client = bed.client(1, host.epoch).expect("it listens");
    bed.wire.cut.store(true, Ordering::SeqCst);
    // The node notices, and cannot connect again.
    while bed.wire.failed.load(Ordering::SeqCst) < 3 {
        std::thread::yield_now();
    }
    use_it(&mut client).expect("the memory does not need the directory");
    bed.directory().lease_revoke(host.id).expect("it was alive");
    bed.wire.cut.store(false, Ordering::SeqCst);
    until_fenced(&mut client);
    node.stop();
}

#[test]
fn a_node_whose_lease_ended_takes_a_new_one_and_keeps_its_memory() {
    let bed = Bed::new();
    let node = bed.start(1);
    let mut client = bed.client(1, 1).expect("it listens");
    let extent = client.allocate(NodeId(1), SizeClass::CHUNK).expect("room");
    let from = bed.directory().list("nodes/").expect("the directory answers").revision + 1;
    let mut watch = bed.directory().watch("nodes/", from).expect("a watch");
    bed.clock.advance(2 * TTL);
    bed.directory().tick().expect("room");
    let mut kinds = Vec::new();
    while kinds.len() < 2 {
        kinds.extend(watch.next(TTL).expect("the watch goes on").map(|event| event.kind));
    }
    assert_eq!(kinds[0], WatchEventKind::Delete);
    assert!(matches!(kinds[1], WatchEventKind::Put { .. }));
    assert_eq!(bed.record(1).expect("it is back"), node.ready.record, "with the epoch of its memory");
    client.free(extent).expect("the memory is the same");
    node.stop();
}

#[test]
fn a_number_is_given_once() {
    let bed = Bed::new();
    let other = NodeRecord {
        id: 1,
        fabric: "shm".to_owned(),
        address: "/elsewhere".to_owned(),
        memory_bytes: 1,
        memory_bytes_max: 1,
        requested_memory_bytes: 1,
        resize_blocker: None,
        kept_ms: 0,
        epoch: 1,
    };
    bed.directory().put(&names::node_key(1), &names::encode(&other), None).expect("room");
    let taken = serve(&bed.options(1, BYTES), &Shutdown::new(), |_| panic!("it cannot serve"));
    assert!(
        matches!(&taken, Err(NodeError::IdTaken { id: 1, address }) if address == "/elsewhere"),
        "{taken:?}"
    );
    bed.directory().put(&names::node_key(1), b"{", None).expect("room");
    let taken = serve(&bed.options(1, BYTES), &Shutdown::new(), |_| panic!("it cannot serve"));
    assert!(matches!(taken, Err(NodeError::IdTaken { .. })));
    // A record with our own address was left by a node that died there.
    let dead = NodeRecord { address: bed.socket().display().to_string(), ..other };
    bed.directory().put(&names::node_key(1), &names::encode(&dead), None).expect("room");
    let node = bed.start(1);
    assert_eq!(bed.record(1).as_ref(), Some(&node.ready.record));
    node.stop();
}

#[test]
fn what_cannot_be_served_is_said() {
    let bed = Bed::new();
    let refused =
        |options: NodeOptions| serve(&options, &Shutdown::new(), |_| panic!("it cannot serve")).unwrap_err();
    assert!(matches!(refused(bed.options(1, u64::MAX)), NodeError::NoMemory { asked: u64::MAX, .. }));
    assert!(matches!(refused(bed.options(1, (2 << 20) - 1)), NodeError::Donate(_)));
    let mut nowhere = bed.options(1, BYTES);
    nowhere.listen = Listen::Shm(bed.dir.path().join("no/such/dir"), shm::Options::default());
    assert!(matches!(refused(nowhere), NodeError::Listen(_)));
    let node = bed.start(1);
    assert!(matches!(refused(bed.options(2, BYTES)), NodeError::Listen(_)), "another listens there");
    node.stop();
    bed.wire.cut.store(true, Ordering::SeqCst);
    let error = refused(bed.options(1, BYTES));
    assert!(matches!(error, NodeError::Directory(DirectoryError::Unavailable { .. })));
    assert!(error.to_string().contains("cannot join the cluster"), "{error}");
}

#[test]
fn odd_records_of_hosts_are_passed_over() {
    let bed = Bed::new();
    for (key, value) in [
        ("agents/0", &b"{}"[..]),
        ("agents/4096", b"{}"),
        ("agents/x", b"{}"),
        ("agents/+7", b"{}"),
        ("agents/7", b"\xff\xfe"),
        ("agents/8", b"{\"host\":9,\"address\":\"\",\"epoch\":99}"),
    ] {
        bed.directory().put(key, value, None).expect("room");
    }
    let node = bed.start(1);
    bed.directory().put("agents/7", b"[]", None).expect("room");
    bed.directory().delete("agents/8").expect("room");
    let mut client = bed.client(9, 1).expect("nobody was fenced");
    use_it(&mut client).expect("room");
    node.stop();
}

#[test]
fn figures_tell_of_memory_endpoints_and_leases() {
    let bed = Bed::new();
    let place = format!("unix:{}", bed.dir.path().join("metrics").display());
    let mut options = bed.options(1, BYTES);
    options.metrics = Some(place.parse().expect("a fit place"));
    let host = bed.enrol(1);
    let node = Bed::start_with(options);
    let sum = |name: &str| scrape(&place).expect("they are right").sum(name, &[]).expect(name);
    assert_eq!(sum("aquifer_node_memory_bytes"), BYTES as f64);
    assert_eq!(sum("aquifer_node_free_bytes"), BYTES as f64);
    assert_eq!(sum("aquifer_node_endpoints"), 0.0);
    assert_eq!(sum("aquifer_node_build_info"), 1.0);
    let mut client = bed.client(1, host.epoch).expect("it listens");
    let _taken = client.allocate(NodeId(1), SizeClass::SPAN).expect("room");
    assert_eq!(sum("aquifer_node_free_bytes"), (BYTES - SizeClass::SPAN.bytes()) as f64);
    assert_eq!(sum("aquifer_node_endpoints"), 1.0);
    let fences = sum("aquifer_node_fences_total");
    bed.directory().lease_revoke(host.id).expect("it was alive");
    until_fenced(&mut client);
    while sum("aquifer_node_fences_total") < fences + 1.0 || sum("aquifer_node_lease_renewals_total") < 1.0 {
        std::thread::yield_now();
    }
    let failures = sum("aquifer_node_lease_renewal_failures_total");
    bed.clock.advance(2 * TTL);
    bed.directory().tick().expect("room");
    while sum("aquifer_node_lease_renewal_failures_total") < failures + 1.0 {
        std::thread::yield_now();
    }
    // The place is taken, and that is said before the memory is.
    let mut second = bed.options(2, BYTES);
    second.metrics = Some(place.parse().expect("a fit place"));
    let taken = serve(&second, &Shutdown::new(), |_| panic!("it cannot serve"));
    assert!(matches!(taken, Err(NodeError::Metrics(MetricsError::Listen { .. }))), "{taken:?}");
    node.stop();
    assert!(scrape(&place).is_err());
}
