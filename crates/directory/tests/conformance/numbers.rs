//! What every directory does for hosts and nodes that have numbers.

use aquifer_directory::{DirectoryError, names};

use super::harness::Harness;
use super::suite::TTL;

pub fn hosts_are_claimed_in_turn(harness: &dyn Harness) {
    let directory = harness.directory();
    let claim = || {
        let lease = directory.lease_grant(TTL).unwrap();
        let record = names::claim_host(&*directory, lease, "socket", 0).unwrap();
        assert_eq!(record.epoch, lease.epoch);
        (lease, record.host)
    };
    let (first, one) = claim();
    let (_, two) = claim();
    directory.lease_revoke(first.id).unwrap();
    let (_, three) = claim();
    assert_eq!([one, two, three], [1, 2, 3], "a number that was given back rests");

    // Near the end of the numbers it goes on from 1, past those that live.
    directory.put("hosts/next", b"4094", None).unwrap();
    let hosts = [claim().1, claim().1, claim().1];
    assert_eq!(hosts, [4094, 4, 5], "the first is dead, and may hold memory");
    let mut living: Vec<_> =
        names::agents(&*directory).unwrap().into_iter().map(|agent| agent.host).collect();
    living.sort_unstable();
    assert_eq!(living, [2, 3, 4, 5, 4094]);
}

pub fn a_dead_hosts_number_rests_until_it_holds_nothing(harness: &dyn Harness) {
    let directory = harness.directory();
    let lease = || directory.lease_grant(TTL).unwrap();
    let dead = || names::dead_hosts(&*directory).unwrap();
    let is_taken = |outcome: Result<_, DirectoryError>| matches!(outcome, Err(DirectoryError::Taken { .. }));
    let (first, second) = (lease(), lease());
    let record = names::claim_host(&*directory, first, "socket", 0).unwrap();
    names::claim_host(&*directory, second, "another", 0).unwrap();
    assert_eq!(dead(), []);
    let held = |record: &names::AgentRecord, left_in| names::HolderRecord {
        host: record.host,
        claimed: record.claimed,
        grace_ms: 0,
        left_in,
    };
    let of_first = held(&record, None);
    assert!(is_taken(names::succeed_host(&*directory, lease(), &of_first, "too early")), "it lives");
    directory.lease_revoke(first.id).unwrap();
    assert_eq!(dead(), std::slice::from_ref(&of_first));
    // One succeeds it, and no other; and not the host itself, as if nothing had been.
    let third = lease();
    let successor = names::succeed_host(&*directory, third, &of_first, "successor").unwrap();
    assert_eq!((successor.host, successor.epoch), (record.host, third.epoch));
    assert_eq!(dead(), []);
    assert!(is_taken(names::succeed_host(&*directory, lease(), &of_first, "late")));
    assert!(is_taken(names::reclaim_host(&*directory, lease(), &record, 0)));
    // It dies over it.
    directory.lease_revoke(third.id).unwrap();
    assert_eq!(dead(), [held(&successor, None)]);
    let forgotten = names::forget_host(&*directory, &successor, Vec::new());
    assert!(is_taken(forgotten.map(|()| successor.clone())));
    assert!(is_taken(names::succeed_host(&*directory, lease(), &of_first, "by an old tale")));
    // A node is not there, and its memory may come back.
    let fourth = names::succeed_host(&*directory, lease(), &held(&successor, None), "fourth").unwrap();
    let absent = vec![names::Life { node: 7, epoch: 3, kept_ms: 0 }];
    names::forget_host(&*directory, &fourth, absent.clone()).unwrap();
    let of_fourth = held(&fourth, Some(absent));
    assert_eq!(dead(), std::slice::from_ref(&of_fourth));
    let last = names::succeed_host(&*directory, lease(), &of_fourth, "last").unwrap();
    names::forget_host(&*directory, &last, Vec::new()).unwrap();
    assert_eq!(dead(), []);
    assert_eq!(names::agents(&*directory).unwrap().len(), 1);
    assert!(
        is_taken(names::reclaim_host(&*directory, lease(), &record, 0)),
        "what it held is others' by now"
    );
    directory.put("hosts/next", b"1", None).unwrap();
    assert_eq!(names::claim_host(&*directory, lease(), "new", 0).unwrap().host, record.host);
}

pub fn a_host_that_comes_back_in_time_keeps_its_number(harness: &dyn Harness) {
    let directory = harness.directory();
    let lease = || directory.lease_grant(TTL).unwrap();
    let first = lease();
    let record = names::claim_host(&*directory, first, "socket", 0).unwrap();
    directory.lease_revoke(first.id).unwrap();
    let again = names::reclaim_host(&*directory, lease(), &record, 0).unwrap();
    assert_eq!(again.host, record.host);
    assert!(again.epoch > record.epoch);
    // It dies before it has written down that it went on: the next goes on all the same, while its lease lives too.
    let third = names::reclaim_host(&*directory, lease(), &record, 0).unwrap();
    assert!(third.epoch > again.epoch);
    assert_eq!(names::dead_hosts(&*directory).unwrap(), []);
}

pub fn hosts_claimed_at_once_differ(harness: &dyn Harness) {
    let threads: Vec<_> = (0..6)
        .map(|_| {
            let directory = harness.directory();
            std::thread::spawn(move || {
                let lease = directory.lease_grant(TTL).unwrap();
                names::claim_host(&*directory, lease, "socket", 0).unwrap().host
            })
        })
        .collect();
    let mut hosts: Vec<_> = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
    hosts.sort_unstable();
    assert_eq!(hosts, [1, 2, 3, 4, 5, 6]);
}

pub fn a_node_number_is_taken_once(harness: &dyn Harness) {
    let directory = harness.directory();
    let register = || {
        let lease = directory.lease_grant(TTL).unwrap();
        let (fabric, address) = ("shm".to_owned(), "node-7.sock".to_owned());
        let record = names::NodeRecord {
            id: 7,
            fabric,
            address,
            memory_bytes: 1 << 30,
            memory_bytes_max: 1 << 30,
            memory_bytes_wanted: 1 << 30,
            held_up: None,
            kept_ms: 0,
            epoch: lease.epoch,
        };
        names::register_node(&*directory, lease, &record).map(|()| record)
    };
    let record = register().unwrap();
    assert_eq!(names::nodes(&*directory).unwrap(), [record]);
    assert_eq!(register(), Err(DirectoryError::Taken { key: "nodes/7".to_owned() }));
    harness.advance(TTL);
    register().expect("the number is free when its node's lease is gone");
    directory.put("nodes/8", b"{", None).unwrap();
    assert!(matches!(names::nodes(&*directory), Err(DirectoryError::Protocol { .. })));
}
