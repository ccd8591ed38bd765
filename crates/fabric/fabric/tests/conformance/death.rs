use aquifer_fabric::{Access, EndpointError, Host, Identity, RemoteAddr, Scope, Verb, Work, WorkError};

use super::harness::{HOST, Harness, SuiteClient, WHO, signalled};

fn increments(remote: RemoteAddr) -> Vec<Work> {
    (0..4).map(|id| signalled(id, Verb::FetchAdd { remote, add: 1 })).collect()
}

/// Posts until the endpoint breaks. The first failures must have the cause, the later ones must be
/// flushed.
fn break_down<H: Harness>(client: &mut SuiteClient<'_, H>, remote: RemoteAddr, cause: WorkError) {
    let mut outcomes = Vec::new();
    while !outcomes.contains(&Err(WorkError::Flushed)) {
        outcomes.extend(client.run(&increments(remote)).iter().map(|done| done.outcome));
    }
    let failed = outcomes.iter().position(Result::is_err).unwrap();
    assert_eq!(outcomes[failed], Err(cause));
    let flushed = outcomes.iter().position(|o| *o == Err(WorkError::Flushed)).unwrap();
    assert!(outcomes[failed..flushed].iter().all(|outcome| *outcome == Err(cause)));
    assert!(outcomes[flushed..].iter().all(|outcome| *outcome == Err(WorkError::Flushed)));
    assert!(client.endpoint.is_broken());
    assert_eq!(client.add(remote.addr, remote.key, 1), Err(WorkError::Flushed));
    assert_eq!(client.send(b"hello"), Err(WorkError::Flushed));
}

pub fn work_after_the_death_of_the_target_fails_then_is_flushed<H: Harness>() {
    let mut harness = H::start();
    let (_, region) = harness.region(Access::ALL, Scope::Anyone);
    let remote = RemoteAddr { addr: region.base, key: region.key };
    let (mut busy, mut idle) = (harness.connect(WHO).unwrap(), harness.connect(WHO).unwrap());
    busy.post(&increments(remote)).unwrap();
    harness.kill_target();
    for _ in 0..4 {
        harness.pass_time();
    }
    idle.post(&increments(remote)).unwrap();
    let mut busy = harness.client_of(busy);
    let outcomes: Vec<_> = busy.wait(4).iter().map(|done| done.outcome).collect();
    let ends = [Err(WorkError::PeerGone), Err(WorkError::Flushed)];
    assert!(outcomes.iter().all(|o| o.is_ok() || ends.contains(o)), "{outcomes:?}");
    let mut idle = harness.client_of(idle);
    let idle_outcomes: Vec<_> = idle.wait(4).iter().map(|done| done.outcome).collect();
    assert_eq!(idle_outcomes, [ends[0], ends[1], ends[1], ends[1]]);
    assert!(idle.endpoint.is_broken());
    if outcomes.iter().all(Result::is_ok) {
        break_down(&mut busy, remote, WorkError::PeerGone);
    }
}

pub fn a_dead_target_cannot_be_connected_to<H: Harness>() {
    let mut harness = H::start();
    harness.kill_target();
    let refused = harness.connect(WHO);
    assert!(matches!(refused, Err(EndpointError::Unreachable { .. })), "{refused:?}");
}

pub fn a_fenced_host_is_stopped_and_refused<H: Harness>() {
    let harness = H::start();
    let (memory, region) = harness.region(Access::ALL, Scope::Anyone);
    let remote = RemoteAddr { addr: region.base, key: region.key };
    let mut fenced = harness.client(WHO);
    let mut other = harness.client(Identity { host: Host(8), ..WHO });
    let mut in_flight = harness.client(WHO);
    in_flight.endpoint.post(&increments(remote)).unwrap();
    harness.target().fence(HOST, WHO.epoch);
    let word = || memory.atomic_u64(0).load(std::sync::atomic::Ordering::SeqCst);
    let at_fence = word();
    let outcomes: Vec<_> = in_flight.wait(4).iter().map(|done| done.outcome).collect();
    assert_eq!(word(), at_fence, "nothing took effect after the fence");
    let done = outcomes.iter().filter(|outcome| outcome.is_ok()).count();
    assert_eq!(done as u64, at_fence);
    break_down(&mut fenced, remote, WorkError::Fenced);
    assert_eq!(word(), at_fence);
    assert_eq!(harness.target().send(HOST, b"hello"), 0);
    for epoch in [0, WHO.epoch - 1, WHO.epoch] {
        match harness.connect(Identity { epoch, ..WHO }) {
            Err(error) => assert!(error.is_fence(), "{error}"),
            other => panic!("epoch {epoch}: {other:?}"),
        }
    }
    assert_eq!(other.add(remote.addr, remote.key, 1), Ok(at_fence));
    let mut renewed = harness.client(Identity { epoch: WHO.epoch + 1, ..WHO });
    assert_eq!(renewed.add(remote.addr, remote.key, 1), Ok(at_fence + 1));
}

pub fn a_newer_epoch_of_a_host_fences_the_older<H: Harness>() {
    let harness = H::start();
    let (memory, region) = harness.region(Access::ALL, Scope::Anyone);
    let remote = RemoteAddr { addr: region.base, key: region.key };
    let word = || memory.atomic_u64(0).load(std::sync::atomic::Ordering::SeqCst);
    let mut old = harness.client(WHO);
    let mut in_flight = harness.client(WHO);
    in_flight.endpoint.post(&increments(remote)).unwrap();
    let mut other = harness.client(Identity { host: Host(8), ..WHO });
    let mut new = harness.client(Identity { epoch: WHO.epoch + 1, ..WHO });
    let at_takeover = word();
    let outcomes: Vec<_> = in_flight.wait(4).iter().map(|done| done.outcome).collect();
    let done = outcomes.iter().filter(|outcome| outcome.is_ok()).count();
    assert_eq!((done as u64, word()), (at_takeover, at_takeover), "no earlier operation takes effect");
    assert_eq!(old.add(remote.addr, remote.key, 1), Err(WorkError::Fenced));
    assert!(harness.connect(WHO).is_err());
    assert_eq!(other.add(remote.addr, remote.key, 1), Ok(at_takeover), "other hosts continue");
    assert_eq!(new.add(remote.addr, remote.key, 1), Ok(at_takeover + 1));
}

pub fn a_fence_stops_earlier_epochs_only<H: Harness>() {
    let harness = H::start();
    let (_, region) = harness.region(Access::ALL, Scope::Anyone);
    let mut old = harness.client(Identity { epoch: 4, ..WHO });
    let mut new = harness.client(WHO);
    harness.target().fence(HOST, 4);
    harness.target().fence(HOST, 2);
    assert_eq!(old.add(region.base, region.key, 1), Err(WorkError::Fenced));
    assert_eq!(new.add(region.base, region.key, 1), Ok(0));
    assert!(harness.connect(Identity { epoch: 4, ..WHO }).is_err(), "an older fence undoes nothing");
    assert!(harness.connect(WHO).is_ok());
}
