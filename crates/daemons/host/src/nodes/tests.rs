use std::time::Duration;

use super::reconnect::Reconnector;
use super::*;
use aquifer_directory::sim::DirectoryWorld;
use aquifer_fabric::reconnecting::{AwayPolicy, Reconnect, ReconnectOutcome};
use aquifer_fabric::shm::{self, ShmTarget};
use aquifer_fabric::{Access, LocalSlice, Memory, RemoteAddr, Scope, Target, Verb, Work, WorkError};

fn nodes(directory: &Arc<dyn Directory>) -> Arc<NodeRegistry> {
    let identity = Identity { host: Host(1), epoch: 1, tenant: Tenant(0) };
    let options = ConnectOptions::default();
    NodeRegistry::new(Arc::clone(directory), identity, None, options, AfterFence::Wait)
}

fn register(directory: &dyn Directory, id: u16) {
    register_at(directory, id, format!("/node-{id}"), 0);
}

fn register_at(directory: &dyn Directory, id: u16, address: String, kept_ms: u64) {
    let fabric = "shm".into();
    let record = NodeRecord {
        id,
        fabric,
        address,
        memory_bytes: 1 << 20,
        memory_bytes_max: 1 << 20,
        requested_memory_bytes: 1 << 20,
        resize_blocker: None,
        recalled_bytes: 0,
        recalled_from: Vec::new(),
        kept_ms,
        epoch: 1,
        is_disk: false,
    };
    directory.put(&names::node_key(id), &names::encode(&record), None).expect("put");
}

#[test]
fn require_lists_nodes_that_the_watch_has_not_reported() {
    let directory: Arc<dyn Directory> = Arc::new(DirectoryWorld::new(1).host(1));
    let nodes = nodes(&directory);
    assert_eq!(nodes.require(1), Err(0));
    // No watch has reported the node.
    register(&*directory, 1);
    assert_eq!(nodes.require(1), Ok(()));
    assert_eq!(nodes.require(2), Err(1));
}

#[test]
fn a_late_event_does_not_undo_a_listing() {
    let directory: Arc<dyn Directory> = Arc::new(DirectoryWorld::new(1).host(1));
    let nodes = nodes(&directory);
    let mut watch = directory.watch(names::NODES, 1).expect("watch");
    register(&*directory, 1);
    directory.delete(&names::node_key(1)).expect("delete");
    register(&*directory, 1);
    nodes.refresh().expect("list");
    while let Some(event) = watch.next(Duration::ZERO).expect("an event") {
        nodes.apply_event(&event);
        assert_eq!(nodes.list(), [NodeId(1)], "{event:?} removed a node");
    }
    directory.delete(&names::node_key(1)).expect("delete");
    nodes.apply_event(&watch.next(Duration::ZERO).expect("an event").expect("the deletion"));
    assert_eq!(nodes.count(), 0);
}

#[test]
fn a_late_listing_does_not_undo_an_event() {
    let directory: Arc<dyn Directory> = Arc::new(DirectoryWorld::new(1).host(1));
    let nodes = nodes(&directory);
    let mut watch = directory.watch(names::NODES, 1).expect("watch");
    register(&*directory, 1);
    let listing = directory.list(names::NODES).expect("list");
    register(&*directory, 2);
    directory.delete(&names::node_key(1)).expect("delete");
    while let Some(event) = watch.next(Duration::ZERO).expect("an event") {
        nodes.apply_event(&event);
    }
    nodes.apply_listing(&listing, Instant::now());
    assert_eq!(nodes.list(), [NodeId(2)]);
}

#[test]
fn a_listing_removes_nodes_whose_deletion_was_missed() {
    let directory: Arc<dyn Directory> = Arc::new(DirectoryWorld::new(1).host(1));
    let nodes = nodes(&directory);
    register(&*directory, 1);
    register(&*directory, 2);
    nodes.refresh().expect("list");
    directory.delete(&names::node_key(1)).expect("delete");
    nodes.refresh().expect("list");
    assert_eq!(nodes.list(), [NodeId(2)]);
}

/// A lease can end because its node, or the directory, was too busy to renew it, or because the
/// node is cut off from the directory.
#[test]
fn a_node_without_a_lease_is_used_as_long_as_it_answers() {
    for kept_ms in [0, 1] {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("node");
        let target = ShmTarget::listen(&path, shm::ShmOptions::default()).expect("a target");
        let memory = Arc::new(Memory::create("lent", 4096).expect("memory"));
        target.register(memory, Access::ALL, Scope::Anyone).expect("room");
        let directory: Arc<dyn Directory> = Arc::new(DirectoryWorld::new(1).host(1));
        let nodes = nodes(&directory);
        register_at(&*directory, 1, path.display().to_string(), kept_ms);
        nodes.refresh().expect("list");
        directory.delete(&names::node_key(1)).expect("delete");
        nodes.refresh().expect("list");
        assert_eq!(nodes.list(), []);
        let connector = nodes.connector(5, EndpointPurpose::Fetch);
        assert!(!connector.connect(NodeId(1)).expect("it answers").is_broken());
        drop(target);
        assert!(connector.connect(NodeId(1)).is_err(), "its memory is gone");
        assert!(connector.connect_lazily(NodeId(2)).is_err(), "it was never seen");
    }
}

/// A host that was stopped or cut off must not take the time that has passed for a loss.
#[test]
fn the_return_of_a_node_counts_although_the_watch_has_not_reported_it() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("node");
    let directory: Arc<dyn Directory> = Arc::new(DirectoryWorld::new(1).host(1));
    let nodes = nodes(&directory);
    let away_address = folder.path().join("away").display().to_string();
    register_at(&*directory, 1, away_address, 1);
    nodes.refresh().expect("list");
    directory.delete(&names::node_key(1)).expect("delete");
    nodes.refresh().expect("list");
    let reconnector = Reconnector { nodes: Arc::clone(&nodes), node: NodeId(1), tenant: Tenant(5), epoch: 1 };
    assert!(matches!(reconnector.attempt(), ReconnectOutcome::Retry));
    // The node returns at another address.
    let target = ShmTarget::listen(&path, shm::ShmOptions::default()).expect("a target");
    let memory = Arc::new(Memory::create("lent", 4096).expect("memory"));
    target.register(memory, Access::ALL, Scope::Anyone).expect("room");
    register_at(&*directory, 1, path.display().to_string(), 1);
    loop {
        match reconnector.attempt() {
            ReconnectOutcome::Retry => std::thread::yield_now(),
            outcome => break assert!(matches!(outcome, ReconnectOutcome::Connected(_)), "{outcome:?}"),
        }
    }
}

#[test]
fn connect_lazily_does_not_wait_for_a_node_that_is_away() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("node");
    let listen = || {
        let target = ShmTarget::listen(&path, shm::ShmOptions::default()).expect("a target");
        let memory = Arc::new(Memory::create("lent", 4096).expect("memory"));
        target.register(memory, Access::ALL, Scope::Anyone).expect("room");
        target
    };
    let target = listen();
    let directory: Arc<dyn Directory> = Arc::new(DirectoryWorld::new(1).host(1));
    let nodes = nodes(&directory);
    register_at(&*directory, 1, path.display().to_string(), 3_600_000);
    nodes.refresh().expect("list");
    let before = nodes.connect(NodeId(1), Tenant(5)).expect("it listens");
    drop(target);
    let queued =
        nodes.connect_lazily(NodeId(1), Tenant(5), EndpointPurpose::Write).expect("it was seen before");
    assert!(queued.is_away());
    assert_eq!(queued.regions(), before.regions());
    directory.delete(&names::node_key(1)).expect("delete");
    nodes.refresh().expect("list");
    assert!(
        nodes.connect_lazily(NodeId(1), Tenant(5), EndpointPurpose::Write).expect("it may return").is_away()
    );
    let reconnector =
        |epoch| Reconnector { nodes: Arc::clone(&nodes), node: NodeId(1), tenant: Tenant(5), epoch };
    assert!(matches!(reconnector(1).attempt(), ReconnectOutcome::Retry));
    let restarted = listen();
    register_at(&*directory, 1, path.display().to_string(), 3_600_000);
    nodes.refresh().expect("list");
    assert!(matches!(reconnector(1).attempt(), ReconnectOutcome::Connected(_)));
    assert!(matches!(reconnector(2).attempt(), ReconnectOutcome::Gone), "other memory");
    restarted.fence(Host(1), 1);
    assert!(matches!(reconnector(1).attempt(), ReconnectOutcome::Fenced));
}

/// The next process of a fenced host resumes the extents of the host, as after a crash.
#[test]
fn operations_of_a_fenced_host_wait() {
    for kept_ms in [0, 3_600_000] {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("node");
        let target = ShmTarget::listen(&path, shm::ShmOptions::default()).expect("a target");
        let memory = Arc::new(Memory::create("lent", 4096).expect("memory"));
        let region = target.register(memory, Access::ALL, Scope::Anyone).expect("room");
        let directory: Arc<dyn Directory> = Arc::new(DirectoryWorld::new(1).host(1));
        let nodes = nodes(&directory);
        register_at(&*directory, 1, path.display().to_string(), kept_ms);
        nodes.refresh().expect("list");
        let connector = nodes.connector(5, EndpointPurpose::Fetch);
        let mut waiting = connector.connect(NodeId(1)).expect("it listens");
        let mut failing = connector.connect_without_waiting(NodeId(1)).expect("it listens");
        let remote = RemoteAddr { addr: region.base, key: region.key };
        let read = |endpoint: &mut Box<dyn Endpoint>| {
            let local = Arc::new(Memory::create("local", 4096).expect("memory"));
            let key = endpoint.register_local(local).expect("room");
            let verb = Verb::Read { local: LocalSlice { key, offset: 0, len: 8 }, remote };
            endpoint.post(&[Work { id: 1, verb, signalled: true }]).expect("room");
            let mut completions = Vec::new();
            for _ in 0..100 {
                endpoint.poll(&mut completions, 8);
            }
            completions.first().map(|completion| completion.outcome)
        };
        assert_eq!(read(&mut waiting), Some(Ok(8)));
        assert_eq!(read(&mut failing), Some(Ok(8)));
        target.fence(Host(1), 1);
        assert_eq!(read(&mut waiting), None);
        assert!(waiting.is_away() && !waiting.is_broken());
        let mut ready = vec![waiting.poll_fd().expect("something to wait for")];
        assert_eq!(rustix::event::poll(&mut ready, Some(&rustix::fs::Timespec::default())), Ok(0));
        assert_eq!(read(&mut failing), Some(Err(WorkError::Away)));
        assert!(connector.connect_without_waiting(NodeId(1)).is_err_and(|error| error.is_fence()));
        let attempt = nodes.try_connect(NodeId(1), Tenant(5), EndpointPurpose::Fetch, AwayPolicy::Wait);
        assert!(attempt.is_err_and(|failure| failure.is_temporary), "it waits");
    }
}
