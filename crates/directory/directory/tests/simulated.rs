//! Tests of the injected faults of the simulated directory.

use std::time::Duration;

use aquifer_directory::sim::{CallFault, DirectoryWorld};
use aquifer_directory::{Directory, DirectoryError, WatchEventKind};

fn unavailable<T: std::fmt::Debug>(result: Result<T, DirectoryError>) {
    assert!(matches!(result, Err(DirectoryError::Unavailable { .. })), "{result:?}");
}

#[test]
fn a_lost_call_changes_nothing_and_a_lost_answer_does() {
    let world = DirectoryWorld::new(1);
    let host = world.host(1);
    host.fail(1, CallFault::Lost);
    unavailable(host.put("lost", b"", None));
    assert_eq!(host.get("lost").unwrap(), None);
    host.fail(2, CallFault::AnswerLost);
    host.put("first", b"", None).unwrap();
    unavailable(host.put("done", b"", None));
    assert!(host.get("done").unwrap().is_some());
}

#[test]
fn a_disconnected_host_loses_its_lease_and_watches_report_it() {
    let world = DirectoryWorld::new(1);
    let (cut, other) = (world.host(1), world.host(2));
    let ttl = Duration::from_secs(1);
    let lease = cut.lease_grant(ttl).unwrap();
    cut.put("agents/1", b"", Some(lease.id)).unwrap();
    let mut own = cut.watch("", 1).unwrap();
    let mut watch = other.watch("agents/", 0).unwrap();
    cut.set_disconnected(true);
    unavailable(cut.lease_keep_alive(lease.id));
    assert_eq!(own.next(ttl).unwrap(), None);
    world.advance(ttl);
    assert_eq!(watch.next(ttl).unwrap().unwrap().kind, WatchEventKind::Delete);
    cut.set_disconnected(false);
    assert_eq!(cut.lease_keep_alive(lease.id), Err(DirectoryError::LeaseGone(lease.id)));
    assert!(own.next(ttl).unwrap().is_some(), "the watch continues at its position");
}

#[test]
fn delays_pass_virtual_time_and_repeat_with_the_seed() {
    let times = |seed| -> Vec<u64> {
        let world = DirectoryWorld::new(seed);
        let host = world.host(3);
        host.delay(Duration::from_millis(50));
        let step = |_| {
            host.get("k").unwrap();
            world.now_ms()
        };
        (0..50).map(step).collect()
    };
    assert_eq!(times(7), times(7));
    assert_ne!(times(7), times(8));
    let steps = times(7);
    assert!(steps.windows(2).all(|pair| pair[1] - pair[0] <= 50));
    assert!(steps[49] > 0);
}

#[test]
fn a_lease_can_be_expired() {
    let world = DirectoryWorld::new(1);
    let host = world.host(1);
    let lease = host.lease_grant(Duration::from_secs(1)).unwrap();
    host.put("k", b"", Some(lease.id)).unwrap();
    world.expire(lease.id).unwrap();
    assert_eq!(host.get("k").unwrap(), None);
    assert_eq!(world.expire(lease.id), Err(DirectoryError::LeaseGone(lease.id)));
}
