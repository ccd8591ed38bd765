//! Memory that outlives its node: kept by a keeper, and lent again as it was.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::Duration;

use aquifer_directory::Directory;
use aquifer_directory::names::{self, NodeLife};
use aquifer_fabric::{Memory, Tenant};
use aquifer_ipc::{HeldItem, HeldKind, KeeperShare};
use aquifer_keeper::{KeeperClient, KeeperOptions};
use aquifer_node::{Keep, NodeError, NodeOptions, Shutdown, serve};
use aquifer_pool::{Extent, NodeId, SizeClass};

use crate::bed::{BYTES, Bed, Serving, Stamp, until_fenced};

const HOST: u16 = 1;

struct Keeper {
    socket: PathBuf,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Keeper {
    fn start(bed: &Bed) -> Self {
        let socket = bed.dir.path().join("keeper");
        // Nothing is given up while the test runs.
        let options =
            KeeperOptions { socket: socket.clone(), grace: Duration::from_secs(1000), listener: None };
        let stop = Arc::new(AtomicBool::new(false));
        let theirs = Arc::clone(&stop);
        let (tell, told) = mpsc::channel();
        let thread = std::thread::spawn(move || {
            aquifer_keeper::serve(&options, &theirs, || tell.send(()).expect("the test waits"))
                .expect("it can listen");
        });
        told.recv().expect("it serves");
        Self { socket, stop, thread: Some(thread) }
    }

    fn keep(&self) -> Keep {
        Keep { keeper: self.socket.clone(), grace: Duration::from_secs(1000) }
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            thread.join().expect("no panic");
        }
    }
}

fn options(bed: &Bed, keeper: &Keeper) -> NodeOptions {
    NodeOptions { keep: Some(keeper.keep()), ..bed.options(1, BYTES) }
}

fn start(bed: &Bed, keeper: &Keeper) -> Serving {
    Bed::start_with(options(bed, keeper))
}

/// As the same client of the same host: it knows the extent, and nothing else.
fn reads_again(bed: &Bed, epoch: u64, extent: &Extent, byte: u8) -> bool {
    let mut client = bed.client(HOST, epoch).expect("it listens");
    let stamp = Stamp::new(&mut client);
    stamp.finds(&mut client, extent, byte)
}

#[test]
fn a_node_that_comes_back_has_what_was_written() {
    let bed = Bed::new();
    let keeper = Keeper::start(&bed);
    let lease = bed.enrol(HOST);
    let node = start(&bed, &keeper);
    let record = node.ready.record.clone();
    assert_eq!(record.kept_ms, 1_000_000);
    let mut client = bed.client(HOST, lease.epoch).expect("it listens");
    let extent = client.allocate(NodeId(1), SizeClass::SECTION).expect("room");
    Stamp::new(&mut client).write(&mut client, &extent);
    node.stop();
    assert_eq!(bed.record(1), None, "others are told that it is away");
    let life = NodeLife { node: 1, epoch: record.epoch, kept_ms: record.kept_ms };
    assert_eq!(names::lives(bed.directory()).expect("it answers"), [life], "and that its memory is not");

    let node = start(&bed, &keeper);
    assert_eq!(node.ready.record, record, "the same life of the node");
    assert!(reads_again(&bed, lease.epoch, &extent, 7));
    let mut client = bed.client(HOST, lease.epoch).expect("it listens");
    assert_eq!(client.free_bytes(NodeId(1)), BYTES - SizeClass::SECTION.bytes());
    assert!(client.is_current(extent).expect("it answers"));
    client.free(extent).expect("it is ours");
    node.stop();
}

#[test]
fn who_was_shut_out_stays_so() {
    let bed = Bed::new();
    let keeper = Keeper::start(&bed);
    let (old, node) = (bed.enrol(HOST), start(&bed, &keeper));
    let mut client = bed.client(HOST, old.epoch).expect("it listens");
    node.stop();
    // Another agent goes on under its number while the node is away.
    let new = bed.enrol(HOST);
    let node = start(&bed, &keeper);
    assert!(bed.client(HOST, old.epoch).is_err());
    assert!(client.allocate(NodeId(1), SizeClass::CHUNK).is_err());
    assert!(bed.client(HOST, new.epoch).is_ok());
    node.stop();
}

#[test]
fn who_was_followed_by_another_stays_shut_out() {
    let bed = Bed::new();
    let keeper = Keeper::start(&bed);
    let (old, node) = (bed.enrol(HOST), start(&bed, &keeper));
    let mut client = bed.client(HOST, old.epoch).expect("it listens");
    let new = bed.enrol(HOST);
    until_fenced(&mut client);
    node.stop();
    let node = start(&bed, &keeper);
    assert!(bed.client(HOST, old.epoch).is_err(), "the new one was seen by the process before");
    assert!(bed.client(HOST, new.epoch).is_ok());
    node.stop();
}

#[test]
fn kept_memory_that_makes_no_sense_is_begun_anew() {
    let bed = Bed::new();
    let keeper = Keeper::start(&bed);
    // As a node of another format would find it.
    let share = KeeperShare::Node(1);
    let (client, _) = KeeperClient::connect(&keeper.socket, share).expect("it serves");
    let (memory, epochs) = (Memory::create("odd", 1 << 20), Memory::create("odd", 1 << 15));
    let (memory, epochs) = (memory.expect("memory"), epochs.expect("memory"));
    let record = r#"{"epoch": 3, "key": 131072}"#.to_owned();
    client.hold(&HeldItem { kind: HeldKind::Node, id: 1, pid: 0, record }, &[memory.fd(), epochs.fd()]);
    drop(client);
    let node = start(&bed, &keeper);
    assert_ne!(node.ready.record.epoch, 3, "it is another life");
    assert_eq!(bed.client(HOST, 1).expect("it listens").free_bytes(NodeId(1)), BYTES);
    node.stop();
}

#[test]
fn whose_lease_ended_while_the_node_was_away_is_shut_out() {
    let bed = Bed::new();
    let keeper = Keeper::start(&bed);
    let (present, gone) = (bed.enrol(HOST), bed.enrol(HOST + 1));
    let node = start(&bed, &keeper);
    let was_shut_out = || bed.client(HOST + 3, gone.epoch - 1).is_err();
    // One whose lease ended before, and that the node has seen go.
    let seen = bed.enrol(HOST + 3);
    let mut client = bed.client(HOST + 3, seen.epoch).expect("it listens");
    bed.directory().lease_revoke(seen.id).expect("it answers");
    until_fenced(&mut client);
    assert!(was_shut_out());
    node.stop();
    bed.directory().lease_revoke(gone.id).expect("it answers");
    let node = start(&bed, &keeper);
    assert!(bed.client(HOST, present.epoch).is_ok());
    assert!(bed.client(HOST + 1, gone.epoch).is_err(), "its lease ended while nobody looked");
    assert!(bed.client(HOST + 3, seen.epoch).is_err(), "it was shut out by the process before");
    assert!(was_shut_out());
    node.stop();
}

#[test]
fn what_the_node_was_at_is_set_right() {
    let bed = Bed::new();
    let keeper = Keeper::start(&bed);
    let lease = bed.enrol(HOST);
    let node = start(&bed, &keeper);
    // As a node that was killed in the middle of clearing a span, and of one that was killed over a section.
    let mut own = bed.client_of(aquifer_fabric::Host::NODE.0, 1 << 40, Tenant(u32::MAX)).expect("it listens");
    let span = own.allocate(NodeId(1), SizeClass::SPAN).expect("room");
    let section = own.allocate(NodeId(1), SizeClass::SECTION).expect("room");
    assert_ne!(span.addr, section.addr);
    node.stop();
    let node = start(&bed, &keeper);
    let mut client = bed.client(HOST, lease.epoch).expect("it listens");
    while client.free_bytes(NodeId(1)) < BYTES {
        std::thread::yield_now();
        client.refresh(NodeId(1)).expect("it answers");
    }
    node.stop();
}

#[test]
fn a_node_without_its_keeper_does_not_begin() {
    let bed = Bed::new();
    let keep = Keep { keeper: bed.dir.path().join("none"), grace: Duration::from_secs(1) };
    let options = NodeOptions { keep: Some(keep), ..bed.options(1, BYTES) };
    let refused = serve(&options, &Shutdown::new(), |_| panic!("it serves"));
    let Err(error @ NodeError::Keeper { .. }) = refused else { panic!("{refused:?}") };
    assert!(error.to_string().contains("aquifer keeper"), "{error}");
    assert_eq!(bed.record(1), None);
}

#[test]
fn memory_that_nobody_kept_is_another_life() {
    let bed = Bed::new();
    let lease = bed.enrol(HOST);
    let extent = {
        let keeper = Keeper::start(&bed);
        let node = start(&bed, &keeper);
        let mut client = bed.client(HOST, lease.epoch).expect("it listens");
        let extent = client.allocate(NodeId(1), SizeClass::SECTION).expect("room");
        node.stop();
        extent
    };
    let before = names::lives(bed.directory()).expect("it answers")[0];
    // Node and keeper are gone.
    let keeper = Keeper::start(&bed);
    let node = start(&bed, &keeper);
    let life = names::lives(bed.directory()).expect("it answers")[0];
    assert!(!life.is_same(&before), "it says so");
    let mut client = bed.client(HOST, lease.epoch).expect("it listens");
    assert!(!client.is_current(extent).expect("it answers"));
    assert_eq!(client.free_bytes(NodeId(1)), BYTES);
    node.stop();
}

#[test]
fn a_node_that_lends_nothing_leaves_for_good() {
    let bed = Bed::new();
    let keeper = Keeper::start(&bed);
    let node =
        Bed::start_with(NodeOptions { memory_bytes: 0, memory_bytes_max: BYTES, ..options(&bed, &keeper) });
    node.stop();
    assert_eq!(names::lives(bed.directory()).expect("it answers"), []);
}
