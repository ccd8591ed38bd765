//! Spans that rest: what a client has just emptied it takes again by one trip, and nobody is the poorer for it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use aquifer_fabric::sim::{SimFabric, SimOptions, SimTarget};
use aquifer_fabric::{Endpoint, Host, Identity, PostError, Tenant, Work, forward_endpoint};
use aquifer_pool::size::SECTION_BYTES;
use aquifer_pool::{Custody, Donation, NodeId, PoolClient, SizeClass, donate};

const NODE: NodeId = NodeId(1);
const HOST: Host = Host(1);
const SPAN_BYTES: u64 = 128 << 10;

/// Counts batches, each of which is a trip to the node.
#[derive(Debug)]
struct Counted {
    inner: Box<dyn Endpoint>,
    trips: Arc<AtomicU64>,
}

impl Endpoint for Counted {
    fn post(&mut self, batch: &[Work]) -> Result<(), PostError> {
        self.trips.fetch_add(1, Ordering::Relaxed);
        self.inner.post(batch)
    }

    forward_endpoint!(inner: poll, wait, poll_fd, register_local, receive, regions, limits, is_broken, late);
}

/// A node, and whoever comes to it.
struct Scene {
    fabric: SimFabric,
    target: SimTarget,
    donation: Donation,
    custody: Arc<Custody>,
    trips: Arc<AtomicU64>,
}

impl Scene {
    fn new() -> Self {
        Self::of(2)
    }

    fn of(sections: u64) -> Self {
        let fabric = SimFabric::new(1, SimOptions { step_on_poll: true, ..SimOptions::default() });
        let target = fabric.add_node();
        let donation = donate(&target, NODE, sections * SECTION_BYTES).expect("memory");
        Self { fabric, target, donation, custody: Arc::default(), trips: Arc::default() }
    }

    fn client(&self, host: Host) -> PoolClient {
        let who = Identity { host, epoch: 1, tenant: Tenant(0) };
        let inner = self.fabric.connect(self.target.node(), who).expect("it lives");
        let counted = Counted { inner, trips: Arc::clone(&self.trips) };
        let mut client = PoolClient::in_custody(host, Tenant(0), Arc::clone(&self.custody)).resting();
        client.add_node(NODE, Box::new(counted)).expect("a good node");
        client
    }

    fn trips_of(&self, work: impl FnOnce()) -> u64 {
        let before = self.trips.load(Ordering::Relaxed);
        work();
        self.trips.load(Ordering::Relaxed) - before
    }

    fn audit(&self, client: &mut PoolClient) -> u64 {
        let audited = self.custody.audit(client, NODE, |_| true).expect("it lives");
        audited.expect("nobody is in its way").spans
    }

    fn is_all_free(&self) -> bool {
        self.donation.free_bytes() == self.donation.layout.data_bytes()
    }
}

fn half_a_span() -> SizeClass {
    SizeClass::from_bytes(SPAN_BYTES / 2).expect("a class")
}

#[test]
fn what_was_emptied_is_taken_again_by_one_trip() {
    let scene = Scene::new();
    let mut client = scene.client(HOST);
    let mut extent = client.allocate(NODE, half_a_span()).expect("room");
    for _ in 0..5 {
        let given_back = scene.trips_of(|| client.free(extent).expect("it is ours"));
        assert_eq!(given_back, 2, "its key is struck out; its chunks are given back");
        let before = extent;
        let taken = scene.trips_of(|| extent = client.allocate(NODE, half_a_span()).expect("room"));
        assert_eq!(taken, 1);
        assert!(extent.addr == before.addr && extent.key != before.key, "the same place, by another key");
    }
    client.free(extent).expect("it is ours");
    assert_eq!(scene.donation.free_bytes(), 2 * SECTION_BYTES - SPAN_BYTES, "one span rests");
    client.settle();
    assert!(scene.is_all_free());
    assert_eq!(scene.trips_of(|| client.settle()), 0, "none rests any more");
}

#[test]
fn as_many_rest_as_a_section_has_and_others_are_closed() {
    let scene = Scene::of(4);
    let mut client = scene.client(HOST);
    let take = |client: &mut PoolClient, count| -> Vec<_> {
        (0..count).map(|_| client.allocate(NODE, half_a_span()).expect("room")).collect()
    };
    let give = |client: &mut PoolClient, extents: Vec<_>| {
        extents.into_iter().for_each(|extent| client.free(extent).expect("it is ours"));
    };
    let extents = take(&mut client, 40);
    give(&mut client, extents);
    let rests = || 4 * SECTION_BYTES - scene.donation.free_bytes();
    assert_eq!(rests(), SECTION_BYTES, "16 of 20 rest");
    let mut again = Vec::new();
    assert_eq!(scene.trips_of(|| again = take(&mut client, 32)), 32, "one trip each");
    give(&mut client, again);
    assert_eq!(rests(), SECTION_BYTES);
    client.settle();
    assert!(scene.is_all_free());
}

#[test]
fn what_is_not_used_is_given_up_after_a_while() {
    let scene = Scene::new();
    let mut client = scene.client(HOST);
    let extent = client.allocate(NODE, half_a_span()).expect("room");
    client.settle_unused(|_| true);
    client.free(extent).expect("it is ours");
    client.settle_unused(|_| true);
    assert!(!scene.is_all_free(), "it has rested since the last time only");
    let extent = client.allocate(NODE, half_a_span()).expect("room");
    client.free(extent).expect("it is ours");
    client.settle_unused(|_| true);
    assert!(!scene.is_all_free(), "it was used meanwhile");
    client.settle_unused(|_| true);
    assert!(scene.is_all_free());
}

#[test]
fn who_needs_all_of_a_node_has_it() {
    let scene = Scene::new();
    let mut client = scene.client(HOST);
    let extent = client.allocate(NODE, half_a_span()).expect("room");
    client.free(extent).expect("it is ours");
    let stretch = client.allocate_stretch(NODE, 2).expect("what rests is no reason to refuse it");
    stretch.extents().for_each(|extent| client.free(extent).expect("it is ours"));
    assert!(scene.is_all_free());
}

#[test]
fn none_rests_where_there_is_little_room() {
    let scene = Scene::new();
    let mut client = scene.client(HOST);
    let whole = client.allocate(NODE, SizeClass::SECTION).expect("room");
    let spans: Vec<_> = (0..9).map(|_| client.allocate(NODE, SizeClass::SPAN).expect("room")).collect();
    let extent = client.allocate(NODE, half_a_span()).expect("room");
    client.free(extent).expect("it is ours");
    assert_eq!(scene.donation.free_bytes(), 7 * SPAN_BYTES);
    spans.into_iter().chain([whole]).for_each(|extent| client.free(extent).expect("it is ours"));
    assert!(scene.is_all_free());
}

#[test]
fn what_rests_is_given_up_when_there_is_little_room() {
    let scene = Scene::new();
    let mut client = scene.client(HOST);
    let extent = client.allocate(NODE, half_a_span()).expect("room");
    let whole = client.allocate(NODE, SizeClass::SECTION).expect("room");
    client.free(extent).expect("it is ours");
    let rests = |taken| 2 * SECTION_BYTES - scene.donation.free_bytes() - taken;
    assert_eq!(rests(SECTION_BYTES), SPAN_BYTES);
    let spans: Vec<_> = (0..9).map(|_| client.allocate(NODE, SizeClass::SPAN).expect("room")).collect();
    assert_eq!(rests(SECTION_BYTES + 9 * SPAN_BYTES), SPAN_BYTES);
    client.settle_unused(|_| true);
    assert_eq!(rests(SECTION_BYTES + 9 * SPAN_BYTES), 0, "others may need it");
    spans.into_iter().chain([whole]).for_each(|extent| client.free(extent).expect("it is ours"));
    assert!(scene.is_all_free());
}

#[test]
fn what_rests_with_one_who_is_gone_is_found_by_an_audit() {
    let scene = Scene::new();
    let mut client = scene.client(HOST);
    let extent = client.allocate(NODE, half_a_span()).expect("room");
    client.free(extent).expect("it is ours");
    let mut other = scene.client(HOST);
    assert!(!scene.custody.is_in_doubt());
    drop(client);
    assert!(scene.custody.is_in_doubt(), "somebody has to look");
    assert_eq!(scene.audit(&mut other), 1);
    assert!(scene.is_all_free());
}

#[test]
fn an_audit_may_take_what_rests_from_one_who_is_there() {
    let scene = Scene::new();
    let [mut client, mut other] = [(); 2].map(|()| scene.client(HOST));
    let extent = client.allocate(NODE, half_a_span()).expect("room");
    client.free(extent).expect("it is ours");
    assert_eq!(scene.audit(&mut other), 1);
    assert!(scene.is_all_free());
    let whole = [(); 2].map(|()| other.allocate(NODE, SizeClass::SECTION).expect("room"));
    let refused = client.allocate(NODE, half_a_span());
    assert!(refused.is_err(), "nothing is free, whatever rested once: {refused:?}");
    whole.into_iter().for_each(|extent| other.free(extent).expect("it is ours"));
    let extent = client.allocate(NODE, half_a_span()).expect("room");
    client.free(extent).expect("it is ours");
    client.settle();
    assert!(scene.is_all_free());
}

#[test]
fn what_rested_with_a_host_that_died_is_given_back() {
    let scene = Scene::new();
    let mut client = scene.client(HOST);
    let extent = client.allocate(NODE, half_a_span()).expect("room");
    client.free(extent).expect("it is ours");
    std::mem::forget(client);
    let recovered = scene.client(Host(2)).recover(NODE, HOST).expect("the node lives");
    assert_eq!((recovered.extents, recovered.spans), (0, 1));
    assert!(scene.is_all_free());
}
