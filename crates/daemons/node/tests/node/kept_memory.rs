//! Memory that outlives its node: the keeper holds it, and the next process lends it unchanged.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::Duration;

use aquifer_directory::Directory;
use aquifer_directory::names::{self, LifeRecord};
use aquifer_fabric::{Memory, Tenant};
use aquifer_ipc::{HeldItem, HeldKind, KeeperShare};
use aquifer_keeper::{CLAIM_TIMEOUT, ITEMS_MAX, KeeperClient, KeeperOptions, KeeperStore};
use aquifer_node::{KeepOptions, NodeError, NodeOptions, Shutdown, serve};
use aquifer_pool::{Extent, NodeId, SizeClass};

use crate::harness::{BYTES, NodeHarness, SectionBuffer, ServingNode, wait_until_fenced};

const HOST: u16 = 1;

pub struct TestKeeper {
    socket: PathBuf,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl TestKeeper {
    pub fn start(harness: &NodeHarness) -> Self {
        let socket = harness.dir.path().join("keeper");
        // The grace time outlasts the test, so that no item is released.
        let options = KeeperOptions {
            socket: socket.clone(),
            grace: Duration::from_secs(1000),
            listener: None,
            items_max: ITEMS_MAX,
            when_unused: Arc::default(),
        };
        let stop = Arc::new(AtomicBool::new(false));
        let keeper_stop = Arc::clone(&stop);
        let (sender, receiver) = mpsc::channel();
        let thread = std::thread::spawn(move || {
            aquifer_keeper::serve(&options, &keeper_stop, || sender.send(()).expect("the test waits"))
                .expect("it can listen");
        });
        receiver.recv().expect("it serves");
        Self { socket, stop, thread: Some(thread) }
    }

    fn options(&self) -> KeepOptions {
        KeepOptions { keeper: self.socket.clone(), grace: Duration::from_secs(1000) }
    }
}

impl Drop for TestKeeper {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            thread.join().expect("no panic");
        }
    }
}

pub fn options(harness: &NodeHarness, keeper: &TestKeeper) -> NodeOptions {
    NodeOptions { keep: Some(keeper.options()), ..harness.options(1, BYTES) }
}

fn start(harness: &NodeHarness, keeper: &TestKeeper) -> ServingNode {
    NodeHarness::start_with(options(harness, keeper))
}

/// True if a new client of the host reads `byte` from all of an extent.
fn reads(harness: &NodeHarness, epoch: u64, extent: &Extent, byte: u8) -> bool {
    let mut client = harness.client(HOST, epoch).expect("it listens");
    let buffer = SectionBuffer::new(&mut client);
    buffer.is_filled_with(&mut client, extent, byte)
}

#[test]
fn a_restarted_node_has_its_data() {
    let harness = NodeHarness::new();
    let keeper = TestKeeper::start(&harness);
    let lease = harness.grant_host_lease(HOST);
    let node = start(&harness, &keeper);
    let record = node.record.clone();
    assert_eq!(record.kept_ms, 1_000_000);
    let mut client = harness.client(HOST, lease.epoch).expect("it listens");
    let extent = client.allocate(NodeId(1), SizeClass::SECTION).expect("room");
    SectionBuffer::new(&mut client).write(&mut client, &extent);
    node.stop();
    assert_eq!(harness.record(1), None, "the node is absent");
    let life = LifeRecord::of(&record);
    assert_eq!(names::lives(harness.directory()).expect("it answers"), [life], "its memory is kept");

    let node = start(&harness, &keeper);
    assert_eq!(node.record, record, "the same life of the node");
    assert!(reads(&harness, lease.epoch, &extent, 7));
    let mut client = harness.client(HOST, lease.epoch).expect("it listens");
    assert_eq!(client.free_bytes(NodeId(1)), BYTES - SizeClass::SECTION.bytes());
    assert!(client.is_current(extent).expect("it answers"));
    client.free(extent).expect("it is ours");
    node.stop();
}

#[test]
fn a_host_whose_number_was_claimed_during_the_restart_is_fenced() {
    let harness = NodeHarness::new();
    let keeper = TestKeeper::start(&harness);
    let (old, node) = (harness.grant_host_lease(HOST), start(&harness, &keeper));
    let mut client = harness.client(HOST, old.epoch).expect("it listens");
    node.stop();
    // Another agent claims its number while the node is absent.
    let new = harness.grant_host_lease(HOST);
    let node = start(&harness, &keeper);
    assert!(harness.client(HOST, old.epoch).is_err());
    assert!(client.allocate(NodeId(1), SizeClass::CHUNK).is_err());
    assert!(harness.client(HOST, new.epoch).is_ok());
    node.stop();
}

#[test]
fn a_host_that_was_fenced_before_the_restart_stays_fenced() {
    let harness = NodeHarness::new();
    let keeper = TestKeeper::start(&harness);
    let (old, node) = (harness.grant_host_lease(HOST), start(&harness, &keeper));
    let mut client = harness.client(HOST, old.epoch).expect("it listens");
    let new = harness.grant_host_lease(HOST);
    wait_until_fenced(&mut client);
    node.stop();
    let node = start(&harness, &keeper);
    assert!(harness.client(HOST, old.epoch).is_err(), "the earlier process has seen the new epoch");
    assert!(harness.client(HOST, new.epoch).is_ok());
    node.stop();
}

#[test]
fn unusable_kept_memory_is_replaced_by_new_memory() {
    let harness = NodeHarness::new();
    let keeper = TestKeeper::start(&harness);
    // The memory has another format than the node expects.
    let share = KeeperShare::Node(1);
    let (client, _) = KeeperClient::connect(&keeper.socket, share, CLAIM_TIMEOUT).expect("it serves");
    let (memory, epochs) = (Memory::create("other", 1 << 20), Memory::create("other", 1 << 15));
    let (memory, epochs) = (memory.expect("memory"), epochs.expect("memory"));
    let record = r#"{"epoch": 3, "key": 131072}"#.to_owned();
    let item = HeldItem { kind: HeldKind::Node, id: 1, pid: 0, uid: 0, record };
    client.hold(&item, &[memory.fd(), epochs.fd()]).expect("the keeper has room");
    drop(client);
    let node = start(&harness, &keeper);
    assert_ne!(node.record.epoch, 3, "it is another life of the memory");
    assert_eq!(harness.client(HOST, 1).expect("it listens").free_bytes(NodeId(1)), BYTES);
    node.stop();
}

#[test]
fn a_host_whose_lease_ended_during_the_restart_is_fenced() {
    let harness = NodeHarness::new();
    let keeper = TestKeeper::start(&harness);
    let (present, gone) = (harness.grant_host_lease(HOST), harness.grant_host_lease(HOST + 1));
    let node = start(&harness, &keeper);
    let is_fenced = || harness.client(HOST + 3, gone.epoch - 1).is_err();
    // The lease of this host ends before the restart, and the node sees it end.
    let seen = harness.grant_host_lease(HOST + 3);
    let mut client = harness.client(HOST + 3, seen.epoch).expect("it listens");
    harness.directory().lease_revoke(seen.id).expect("it answers");
    wait_until_fenced(&mut client);
    assert!(is_fenced());
    node.stop();
    harness.directory().lease_revoke(gone.id).expect("it answers");
    let node = start(&harness, &keeper);
    assert!(harness.client(HOST, present.epoch).is_ok());
    assert!(harness.client(HOST + 1, gone.epoch).is_err(), "its lease ended during the restart");
    assert!(harness.client(HOST + 3, seen.epoch).is_err(), "the earlier process has fenced it");
    assert!(is_fenced());
    node.stop();
}

#[test]
fn incomplete_changes_of_an_earlier_process_are_undone() {
    let harness = NodeHarness::new();
    let keeper = TestKeeper::start(&harness);
    let lease = harness.grant_host_lease(HOST);
    let node = start(&harness, &keeper);
    // As if a node was killed while it cleared a span, and another while it took a section offline.
    let mut own = harness
        .client_of_tenant(aquifer_fabric::Host::NODE.0, 1 << 40, Tenant(u32::MAX))
        .expect("it listens");
    let span = own.allocate(NodeId(1), SizeClass::SPAN).expect("room");
    let section = own.allocate(NodeId(1), SizeClass::SECTION).expect("room");
    assert_ne!(span.addr, section.addr);
    node.stop();
    let node = start(&harness, &keeper);
    let mut client = harness.client(HOST, lease.epoch).expect("it listens");
    while client.free_bytes(NodeId(1)) < BYTES {
        std::thread::yield_now();
        client.refresh(NodeId(1)).expect("it answers");
    }
    node.stop();
}

#[test]
fn a_node_without_its_keeper_does_not_start() {
    let harness = NodeHarness::new();
    let keep = KeepOptions { keeper: harness.dir.path().join("none"), grace: Duration::from_secs(1) };
    let options = NodeOptions { keep: Some(keep), ..harness.options(1, BYTES) };
    let refused = serve(&options, &Shutdown::new(), |_| panic!("it serves"));
    let Err(error @ NodeError::Keeper { .. }) = refused else { panic!("{refused:?}") };
    assert!(error.to_string().contains("aquifer keeper"), "{error}");
    assert_eq!(harness.record(1), None);
}

#[test]
fn memory_that_was_not_kept_is_another_life() {
    let harness = NodeHarness::new();
    let lease = harness.grant_host_lease(HOST);
    let extent = {
        let keeper = TestKeeper::start(&harness);
        let node = start(&harness, &keeper);
        let mut client = harness.client(HOST, lease.epoch).expect("it listens");
        let extent = client.allocate(NodeId(1), SizeClass::SECTION).expect("room");
        node.stop();
        extent
    };
    let before = names::lives(harness.directory()).expect("it answers")[0].life;
    // Node and keeper have ended.
    let keeper = TestKeeper::start(&harness);
    let node = start(&harness, &keeper);
    let life = names::lives(harness.directory()).expect("it answers")[0].life;
    assert!(!life.is_same(&before), "the record has another epoch");
    let mut client = harness.client(HOST, lease.epoch).expect("it listens");
    assert!(!client.is_current(extent).expect("it answers"));
    assert_eq!(client.free_bytes(NodeId(1)), BYTES);
    node.stop();
}

#[test]
fn a_node_that_lends_nothing_leaves_no_kept_memory() {
    let harness = NodeHarness::new();
    let keeper = TestKeeper::start(&harness);
    let node = NodeHarness::start_with(NodeOptions {
        memory_bytes: 0,
        memory_bytes_max: BYTES,
        ..options(&harness, &keeper)
    });
    node.stop();
    assert_eq!(names::lives(harness.directory()).expect("it answers"), []);
}
