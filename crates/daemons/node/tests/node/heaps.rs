//! Memory that the node holds for heaps while hosts use the rest.

use std::os::fd::OwnedFd;
use std::path::PathBuf;

use aquifer_channel::{connect, receive_frame, send_frame};
use aquifer_fabric::{Host, Tenant};
use aquifer_ipc::{Frame, HoldSpans};
use aquifer_node::NodeOptions;
use aquifer_pool::size::{SECTION_BYTES, SECTION_SPANS, SPAN_BYTES};
use aquifer_pool::{Extent, NodeId, PoolClient, SizeClass};

use crate::harness::{BYTES, NodeHarness, SectionBuffer, ServingNode};
use crate::kept_memory::{self, TestKeeper};

const NODE: NodeId = NodeId(1);
/// All spans of the node.
const SPANS: u32 = 2 * SECTION_SPANS;
const _: () = assert!(BYTES == 2 * SECTION_BYTES);
/// The time in milliseconds for which memory is kept after the service has ended: none.
const NOT_KEPT: u64 = 0;

/// A service of heaps.
struct Service(OwnedFd);

impl Service {
    fn connect(harness: &NodeHarness) -> Self {
        Self(connect(&socket(harness)).expect("the node listens"))
    }

    fn hold(&self, spans: u32) -> u32 {
        send_frame(&self.0, &Frame::HoldSpans(HoldSpans { spans, kept_ms: NOT_KEPT }), &[])
            .expect("it reads");
        match receive_frame(&self.0) {
            Ok((Frame::SpansHeld(held), _)) => held,
            other => panic!("{other:?}"),
        }
    }
}

fn socket(harness: &NodeHarness) -> PathBuf {
    harness.dir.path().join("heaps")
}

fn start(harness: &NodeHarness) -> ServingNode {
    NodeHarness::start_with(NodeOptions { heaps: Some(socket(harness)), ..harness.options(1, BYTES) })
}

/// The spans that are free for a host, clear or not.
fn free_spans(client: &mut PoolClient) -> u64 {
    client.refresh(NODE).expect("it answers");
    client.free_bytes(NODE) / SPAN_BYTES
}

fn wait_for_free_spans(client: &mut PoolClient, spans: u32) {
    while free_spans(client) != u64::from(spans) {
        std::thread::yield_now();
    }
}

fn allocate_all(client: &mut PoolClient) -> Vec<Extent> {
    std::iter::from_fn(|| client.allocate(NODE, SizeClass::SPAN).ok()).collect()
}

#[test]
fn no_host_can_allocate_memory_that_is_held_for_heaps() {
    let harness = NodeHarness::new();
    let node = start(&harness);
    let mut client = harness.client(1, 1).expect("it listens");
    let service = Service::connect(&harness);
    assert_eq!(service.hold(20), 20);
    let mut extents = allocate_all(&mut client);
    assert_eq!(extents.len(), (SPANS - 20) as usize);
    assert_eq!(service.hold(SPANS), 20, "hosts have the rest");
    client.free(extents.pop().expect("many")).expect("it is ours");
    assert_eq!(service.hold(21), 21, "what a host frees, heaps can have");
    // The smallest groups are freed first, and a group only as a whole.
    assert_eq!(service.hold(2), SECTION_SPANS);
    wait_for_free_spans(&mut client, 21 - SECTION_SPANS);
    assert_eq!(service.hold(0), 0);
    wait_for_free_spans(&mut client, 21);
    node.stop();
}

#[test]
fn memory_of_a_service_that_has_ended_is_free_again() {
    let harness = NodeHarness::new();
    let node = start(&harness);
    let mut client = harness.client(1, 1).expect("it listens");
    let first = Service::connect(&harness);
    assert_eq!(first.hold(SPANS), SPANS);
    // The next process of the service connects before the end of the last is noticed.
    let second = Service::connect(&harness);
    assert_eq!(second.hold(SECTION_SPANS), SECTION_SPANS);
    drop(first);
    assert_eq!(second.hold(SECTION_SPANS), SECTION_SPANS);
    assert_eq!(free_spans(&mut client), u64::from(SPANS - SECTION_SPANS));
    drop(second);
    wait_for_free_spans(&mut client, SPANS);
    node.stop();
}

#[test]
fn a_restarted_node_holds_what_it_has_recorded_and_frees_the_rest() {
    let harness = NodeHarness::new();
    let keeper = TestKeeper::start(&harness);
    let options = || NodeOptions { heaps: Some(socket(&harness)), ..kept_memory::options(&harness, &keeper) };
    let node = NodeHarness::start_with(options());
    let service = Service::connect(&harness);
    assert_eq!(service.hold(5), 5);
    let lease = harness.grant_host_lease(1);
    let mut host = harness.client(1, lease.epoch).expect("it listens");
    let extent = host.allocate(NODE, SizeClass::SECTION).expect("room");
    let buffer = SectionBuffer::new(&mut host);
    buffer.write(&mut host, &extent);
    // The state of a process that was killed between its CAS and its record.
    let mut killed = harness.client(Host::HEAPS.0, 9).expect("it listens");
    for class in [SizeClass::SPAN, SizeClass::CHUNK] {
        killed.allocate(NODE, class).expect("room");
    }
    drop((killed, service));
    node.stop();

    let node = NodeHarness::start_with(options());
    let service = Service::connect(&harness);
    assert_eq!(service.hold(5), 5);
    let mut host = harness.client(1, lease.epoch).expect("it listens");
    assert_eq!(free_spans(&mut host), u64::from(SPANS - 5 - SECTION_SPANS));
    let buffer = SectionBuffer::new(&mut host);
    assert!(buffer.is_filled_with(&mut host, &extent, 7));
    node.stop();
}

#[test]
fn heaps_get_memory_that_becomes_free_without_another_request() {
    let harness = NodeHarness::new();
    let node = start(&harness);
    let mut client = harness.client(1, 1).expect("it listens");
    let extents = allocate_all(&mut client);
    let service = Service::connect(&harness);
    assert_eq!(service.hold(SPANS), 0);
    extents.into_iter().for_each(|extent| client.free(extent).expect("it is ours"));
    wait_for_free_spans(&mut client, 0);
    assert_eq!(service.hold(SPANS), SPANS);
    node.stop();
}

#[test]
fn memory_that_heaps_return_is_clear() {
    let harness = NodeHarness::new();
    let node = start(&harness);
    let mut first = harness.client(1, 1).expect("it listens");
    let buffer = SectionBuffer::new(&mut first);
    let extents: Vec<Extent> = std::iter::from_fn(|| first.allocate(NODE, SizeClass::SECTION).ok()).collect();
    extents.iter().for_each(|extent| buffer.write(&mut first, extent));
    let service = Service::connect(&harness);
    assert_eq!(service.hold(SPANS), 0);
    extents.into_iter().for_each(|extent| first.free(extent).expect("it is ours"));
    while service.hold(SPANS) < SPANS {
        std::thread::yield_now();
    }
    assert_eq!(service.hold(0), 0);
    let mut second = harness.client_of_tenant(2, 1, Tenant(9)).expect("it listens");
    let buffer = SectionBuffer::new(&mut second);
    for _ in 0..BYTES / SECTION_BYTES {
        let extent = second.allocate(NODE, SizeClass::SECTION).expect("it is free for all");
        assert!(buffer.is_zero(&mut second, &extent));
    }
    node.stop();
}
